"""Tasks without a run: configurations around them."""

from __future__ import annotations

from typing import Any

from raypd.config import RunConfig


def configured(**sections: Any) -> RunConfig:
    """A configuration of these sections, over an input that nothing reads."""
    return RunConfig.model_validate({"input": {"path": "x.jsonl"}, "output": {"path": "out"}, **sections})
