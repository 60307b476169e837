"""Fine-tuning for the way a model is decoded.

Attention masks, positions and targets of a training example come from the decoding methods
themselves. Other rooms import the names below from here; each is loaded when it is first used,
because training brings torch, transformers and Ray Train.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypd.training.data import check_training
    from raypd.training.job import run_training
    from raypd.training.prerequisites import train
    from raypd.training.teacher import label_documents

__all__ = ["check_training", "label_documents", "run_training", "train"]

_MODULES = {
    "check_training": "raypd.training.data",
    "label_documents": "raypd.training.teacher",
    "run_training": "raypd.training.job",
    "train": "raypd.training.prerequisites",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
