"""Writes and checks the card of a trained adapter or model.

The card is stored next to the weights and says what they were trained for: the task, the decoding
method and the prompt's template.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import raypd
from raypd.config import ANSWER_KEYS, ExtractionConfig, RunConfig, card_of, model_card_file
from raypd.errors import ModelError, raised_as
from raypd.tasks.prompting import extraction_template

# Keys of `decoding` that must have the same values as in training for weights to answer as trained.
_TRAINED_KEYS = ("max_value_tokens", "skeleton")


def write_card(
    folder: Path, config: RunConfig, data: str, documents: int, rate: float, validation_loss: float
) -> None:
    """Write the card of trained weights.

    Args:
        folder: The folder of the weights.
        config: The configuration of the training.
        data: A digest of the documents and labels.
        documents: The number of documents that the weights were trained on.
        rate: The learning rate.
        validation_loss: The loss on the validation documents.
    """
    answer_keys = ANSWER_KEYS[config.task.kind][config.decoding.method]
    decoding = {key: getattr(config.decoding, key) for key in answer_keys}
    decoding["options"] = asdict(config.decoding.method_options)
    card = {
        "base": config.model.name,
        "revision": config.model.revision,
        "task": config.task.kind,
        "method": config.decoding.method,
        "decoding": decoding,
        "template": _template_digest(config),
        "data": data,
        "documents": documents,
        "learning_rate": rate,
        "epochs": config.training.epochs,
        "validation_loss": validation_loss,
        "version": raypd.__version__,
    }
    text = json.dumps(card, indent=1, ensure_ascii=False)
    (folder / model_card_file.CARD).write_text(f"{text}\n", encoding="utf-8")


def check_card(config: RunConfig) -> None:
    """Check that weights are decoded in the way that their cards say they were trained for.

    Raises:
        ModelError: A card cannot be read, or names another template, another length of values or
            another skeleton.
    """
    for key, name in (("model.adapter", config.model.adapter), ("model.name", config.model.name)):
        if name is None:
            continue
        file = Path(name, model_card_file.CARD)
        if file.is_file():
            _check_file(file, f"{key} {name!r}", config)


def _check_file(file: Path, weights: str, config: RunConfig) -> None:
    """Check one card.

    Args:
        file: The card.
        weights: The key of the weights and its value, for messages.
        config: The run's configuration.
    """
    with raised_as(ModelError, f"{file}: cannot be read", OSError, ValueError, TypeError, KeyError):
        card = json.loads(file.read_text(encoding="utf-8"))
        task: str = card["task"]
        method: str = card["method"]
        template: str = card["template"]
        decoding: Any = card["decoding"]
    if task == config.task.kind and template != _template_digest(config):
        raise ModelError(
            f"{weights} was trained with another task.template: use that one, or train again"
        )
    if config.decoding.method != method:
        return
    for key in _TRAINED_KEYS:
        trained = decoding.get(key)
        current = getattr(config.decoding, key)
        if trained not in (None, current):
            raise ModelError(
                f"{weights} was trained with decoding.{key} {trained}, and the run has {current}: "
                f"set it to {trained}, or train again"
            )


def untrained(config: RunConfig) -> str | None:
    """Return a warning if `hyper_parallel` decodes weights without a card for it, or None."""
    if config.decoding.method != "hyper_parallel" or not config.model.has_weights:
        return None
    if card_of(config.model.model_dump(), config.task.kind).get("method") == "hyper_parallel":
        return None
    return (
        f"decoding.method hyper_parallel: {config.model.adapter or config.model.name} has no model "
        "card that says it was trained for this method. Other weights get few values right (2 to "
        "14% on three sets of products). `raypd train` with a thousand labelled rows trains "
        "an adapter; decoding.method=guided needs no training"
    )


def _template_digest(config: RunConfig) -> str:
    """Return a digest of the prompt's template; an empty string for tasks without one."""
    if not isinstance(config.task, ExtractionConfig):
        return ""
    template = extraction_template(config.task, config.model)
    return hashlib.sha256(template.encode()).hexdigest()[:16]
