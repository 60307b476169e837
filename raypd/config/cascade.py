"""A second model, for what the first is not sure of."""

from typing import Any

from pydantic import Field

from raypd.config.model import ModelConfig
from raypd.config.section import Section


class CascadeConfig(Section, use_attribute_docstrings=True):
    """Values that the first model is not sure of are asked of a second (extraction)."""

    model: ModelConfig | None = Field(None, description="The second model, as `model`; null: there is none")
    decoding: dict[str, Any] = Field({})
    """Its decoding, over that of the run; method: auto (as for `model`) where none is given"""
    engine: dict[str, Any] = Field({}, description="Its engine, over that of the run, such as {kind: vllm}")
    under: float = Field(0.8, gt=0, le=1)
    """Confidence under which a value of the first model is asked of the second; `raypd tune --cascade` finds it"""
    share: float = Field(1.0, gt=0, le=1)
    """Most documents that the second model is asked of, out of every 100 of a unit: the least sure ones"""
