"""raypd: structured answers out of very large document collections, decoded in parallel."""

import importlib
import logging
import warnings
from typing import Any

__version__ = "0.1.0"
# Importing peft causes these warnings from bitsandbytes and torch, which a user cannot act on.
# Several modules of transformers import peft, so the warnings are disabled here, before all of
# them.
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
    """Return a name of raypd.api, which is only imported on use, because `raypd.decoding` must work
    if only torch is installed.
    """
    # raypd.data.build_processor needs Ray Data.
    if name == "data":
        return importlib.import_module("raypd.data")
    if name not in __all__:
        raise AttributeError(f"module 'raypd' has no attribute {name!r}")
    return getattr(importlib.import_module("raypd.api"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
