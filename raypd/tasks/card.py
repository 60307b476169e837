"""What a trained adapter or model was trained for, kept beside its weights and held against how it is decoded."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import raypd
from raypd.config import ANSWER_KEYS, ExtractionConfig, RunConfig
from raypd.config.card import CARD, card_of
from raypd.errors import ModelError
from raypd.tasks.prompting import template_text


@dataclass
class Card:
    """What weights were trained for, and how."""

    base: str  # the model that was trained
    revision: str | None
    task: str
    method: str
    decoding: dict[str, Any]  # the keys of `decoding` that the method's answers depend on
    template: str  # digest of the prompt's template
    data: str  # digest of the documents and their labels
    documents: int
    learning_rate: float
    epochs: float
    validation_loss: float
    version: str

    def write(self, folder: Path) -> None:
        (folder / CARD).write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def make_card(config: RunConfig, data: str, documents: int, learning_rate: float, validation_loss: float) -> Card:
    return Card(
        base=config.model.name,
        revision=config.model.revision,
        task=config.task.kind,
        method=config.decoding.method,
        decoding=_answer_keys(config),
        template=_template(config),
        data=data,
        documents=documents,
        learning_rate=learning_rate,
        epochs=config.training.epochs,
        validation_loss=validation_loss,
        version=raypd.__version__,
    )


def check_card(config: RunConfig) -> None:
    """Raises ModelError for another template, or for `hyper_parallel` another position gap, than the card tells of."""
    for key, name in (("model.adapter", config.model.adapter), ("model.name", config.model.name)):
        file = Path(name or "", CARD)
        if name is None or not file.is_file():
            continue
        try:
            card = Card(**json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ModelError(f"{file}: cannot be read: {error}") from None
        if card.task == config.task.kind and card.template != _template(config):
            raise ModelError(
                f"{key} {name!r} was trained with another prompt template (task.template): use that one, or train again"
            )
        gap = card.decoding.get("max_value_tokens")
        if config.decoding.method == card.method and gap not in (None, config.decoding.max_value_tokens):
            raise ModelError(
                f"{key} {name!r} was trained with decoding.max_value_tokens {gap}, which is the gap between its "
                f"positions, and the run has {config.decoding.max_value_tokens}: set it to {gap}, or train again"
            )


def untrained(config: RunConfig) -> str | None:
    """What to say of `hyper_parallel` with weights that no card calls trained for it; None: nothing."""
    if config.decoding.method != "hyper_parallel" or not config.model.has_weights:
        return None
    if card_of(config.model.model_dump(), config.task.kind).get("method") == "hyper_parallel":
        return None
    return (
        f"decoding.method hyper_parallel: {config.model.adapter or config.model.name} has no card that says it was "
        "trained for it; weights that were not give few right values (2 to 14% on three sets of products). "
        "`raypd train` with a thousand labelled rows makes an adapter that was; decoding.method=guided needs none"
    )


def _answer_keys(config: RunConfig) -> dict[str, Any]:
    return {key: getattr(config.decoding, key) for key in ANSWER_KEYS[config.task.kind][config.decoding.method]}


def _template(config: RunConfig) -> str:
    if not isinstance(config.task, ExtractionConfig):
        return ""
    return hashlib.sha256(template_text(config.task.template, "extraction.j2").encode()).hexdigest()[:16]
