"""Weights that bitsandbytes quantized in advance, which transformers reads by itself."""

import importlib.util
from typing import Any

from raypd.models.checkpoints.format import CheckpointFormat, method_of


class BitsAndBytes(CheckpointFormat):
    """NF4, FP4 and int8 of bitsandbytes, such as unsloth/Qwen3-8B-bnb-4bit."""

    name = "bitsandbytes"
    description = "4 or 8 bits, kept in memory and computed with by the package bitsandbytes"
    read_by_transformers = True
    stays_quantized = True

    @classmethod
    def matches(cls, settings: dict[str, Any]) -> bool:
        return method_of(settings) == "bitsandbytes"

    def refusal(self) -> str | None:
        if importlib.util.find_spec("bitsandbytes") is None:
            return "they need the package bitsandbytes: pip install 'raypd[quantize]'"
        return None
