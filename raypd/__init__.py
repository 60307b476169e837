"""raypd: structured answers out of very large document collections, decoded in parallel."""

import importlib
import logging
import warnings
from typing import Any

__version__ = "0.1.0"
# peft's import causes these warnings of bitsandbytes and torch, about which a user can do nothing.
# Several modules of transformers import peft, so they are switched off here, before any of them.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
__all__ = [
    "LLM",
    "Answer",
    "Run",
    "answer",
    "estimate",
    "extract",
    "fit",
    "generate",
    "nightly",
    "train",
    "tune",
]


def __getattr__(name: str) -> Any:
    """Names of raypd.api, imported when they are used: `raypd.decoding` must do where torch is all
    that there is.
    """
    if name == "data":  # raypd.data.build_processor, which needs Ray Data
        return importlib.import_module("raypd.data")
    if name not in __all__:
        raise AttributeError(f"module 'raypd' has no attribute {name!r}")
    return getattr(importlib.import_module("raypd.api"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
