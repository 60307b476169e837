"""The card of trained weights (raypd.json), to the extent that it decides what a configuration
leaves open.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CARD = "raypd.json"
# The digest, in cards, of the earlier prompt, in which descriptions followed a colon. Weights that
# were trained with that prompt still get it.
EARLIER_TEMPLATE = "e54ee5e8ff9f2b52"


def has_earlier_template(model: Any, kind: str) -> bool:
    """Return whether weights were trained with the earlier extraction prompt, as their card
    says.
    """
    return card_of(model, kind).get("template") == EARLIER_TEMPLATE


def card_of(model: Any, kind: str) -> dict[str, Any]:
    """Return the raypd.json of an adapter or a model in a folder if it is for this kind of task, or
    {} if there is none.
    """
    names = (model.get("adapter"), model.get("name")) if isinstance(model, Mapping) else (model,)
    for name in filter(None, names):
        try:
            card = json.loads(Path(name, CARD).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError):
            # There is no card, or `check_card` rejects it.
            continue
        if isinstance(card, dict) and card.get("task") == kind:
            return card
    return {}
