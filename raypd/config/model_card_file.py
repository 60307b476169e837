"""The card beside trained weights (raypd.json), as far as it decides what a configuration leaves
open.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CARD = "raypd.json"


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
