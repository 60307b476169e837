"""The card beside trained weights (raypd.json), as far as it decides what a configuration leaves open."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CARD = "raypd.json"
TEMPLATES = ("product",)  # that come with raypd, beside the one that is taken where task.template is null
_TRAINED_WITH = {"ee723ef6dab991e4": "product"}  # digest of a template on a card -> its name


def card_of(model: Any, kind: str) -> dict[str, Any]:
    """The raypd.json of an adapter or a model in a folder, if it is for this kind of task; {} without one."""
    names = (model.get("adapter"), model.get("name")) if isinstance(model, Mapping) else (model,)
    for name in filter(None, names):
        try:
            card = json.loads(Path(name, CARD).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError):
            continue  # none, or one that `check_card` refuses
        if isinstance(card, dict) and card.get("task") == kind:
            return card
    return {}


def template_of(card: Mapping[str, Any]) -> str | None:
    """The name of the template that weights were trained with; None: the built-in one, or one that has no name."""
    return _TRAINED_WITH.get(str(card.get("template")))
