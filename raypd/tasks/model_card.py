"""What a trained adapter or model was trained for, kept beside its weights and held against how it
is decoded.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import raypd
from raypd.config import ANSWER_KEYS, ExtractionConfig, RunConfig, card_of, model_card_file
from raypd.errors import ModelError, raised_as
from raypd.tasks.prompting import extraction_template


def write_card(
    folder: Path, config: RunConfig, data: str, documents: int, rate: float, validation_loss: float
) -> None:
    """Puts the card into a folder of weights. data: digest of documents and labels; rate: the
    learning rate.
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
        "template": _template(config),
        "data": data,
        "documents": documents,
        "learning_rate": rate,
        "epochs": config.training.epochs,
        "validation_loss": validation_loss,
        "version": raypd.__version__,
    }
    (folder / model_card_file.CARD).write_text(
        json.dumps(card, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def check_card(config: RunConfig) -> None:
    """Raises ModelError: another template, or for `hyper_parallel` another gap or skeleton, than
    its card's.
    """
    for key, name in (("model.adapter", config.model.adapter), ("model.name", config.model.name)):
        file = Path(name or "", model_card_file.CARD)
        if name is None or not file.is_file():
            continue
        with raised_as(
            ModelError, f"{file}: cannot be read", OSError, ValueError, TypeError, KeyError
        ):
            card = json.loads(file.read_text(encoding="utf-8"))
            task, method, template, decoding = (
                card[key] for key in ("task", "method", "template", "decoding")
            )
        if task == config.task.kind and template != _template(config):
            raise ModelError(
                f"{key} {name!r} was trained with another task.template: use that one, or "
                "train again"
            )
        for answer_key in (
            ("max_value_tokens", "skeleton") if config.decoding.method == method else ()
        ):
            trained = decoding.get(answer_key)
            here = getattr(config.decoding, answer_key)
            if trained not in (None, here):
                advice = f"and the run has {here}: set it to {trained}, or train again"
                raise ModelError(
                    f"{key} {name!r} was trained with decoding.{answer_key} {trained}, {advice}"
                )


def untrained(config: RunConfig) -> str | None:
    """What to say of `hyper_parallel` with weights that no card calls trained for it; None:
    nothing.
    """
    if config.decoding.method != "hyper_parallel" or not config.model.has_weights:
        return None
    if card_of(config.model.model_dump(), config.task.kind).get("method") == "hyper_parallel":
        return None
    return (
        f"decoding.method hyper_parallel: {config.model.adapter or config.model.name} has "
        "no card that says it was "
        "trained for it; weights that were not give few right values (2 to 14% on three "
        "sets of products). "
        "`raypd train` with a thousand labelled rows makes an adapter that was; "
        "decoding.method=guided needs none"
    )


def _template(config: RunConfig) -> str:
    if not isinstance(config.task, ExtractionConfig):
        return ""
    return hashlib.sha256(extraction_template(config).encode()).hexdigest()[:16]
