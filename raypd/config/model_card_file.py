"""The card beside trained weights (raypd.json), as far as it decides what a configuration leaves
open.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CARD = "raypd.json"
# The digest, in cards, of the prompt that descriptions followed behind a colon, which weights that
# were trained with it go on to get.
EARLIER_TEMPLATE = "e54ee5e8ff9f2b52"


def has_earlier_template(model: Any, kind: str) -> bool:
    """Whether weights were trained with the earlier prompt of extractions, as their card says."""
    return card_of(model, kind).get("template") == EARLIER_TEMPLATE


def card_of(model: Any, kind: str) -> dict[str, Any]:
    """The raypd.json of an adapter or a model in a folder, if it is for this kind of task; {}
    without one.
    """
    names = (model.get("adapter"), model.get("name")) if isinstance(model, Mapping) else (model,)
    for name in filter(None, names):
        try:
            card = json.loads(Path(name, CARD).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError):
            continue  # none, or one that `check_card` refuses
        if isinstance(card, dict) and card.get("task") == kind:
            return card
    return {}
