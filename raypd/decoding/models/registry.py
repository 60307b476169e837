"""The families that are computed by the engine's own parts. `stock.py` computes all others."""

from typing import Any

from raypd.decoding.models.decoder import Family
from raypd.decoding.models.experts import EXPERTS
from raypd.decoding.models.gpt_oss import GPT_OSS
from raypd.decoding.models.llama import LLAMA, MISTRAL

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    EXPERTS,
    GPT_OSS,
)


def find_family(model: Any) -> Family | None:
    """Return the family of a model of transformers; None if `stock.py` computes it.

    A class of the same name with code of its own is not one of transformers.
    """
    kind = type(model)
    if not kind.__module__.startswith("transformers.models."):
        return None
    for family in FAMILIES:
        if kind.__name__ in family.classes:
            return family
    return None
