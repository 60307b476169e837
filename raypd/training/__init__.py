"""Fine-tuning for the way a model is decoded.

Attention masks, positions and targets of a training example come from the decoding methods
themselves. Other rooms import the names below from here; each is loaded when it is first used,
because training brings torch, transformers and Ray Train.
"""

from typing import TYPE_CHECKING

from raypd.lazy import LazyExports

if TYPE_CHECKING:
    from raypd.training.data import check_training as check_training
    from raypd.training.job import run_training as run_training
    from raypd.training.prerequisites import train as train
    from raypd.training.teacher import label_documents as label_documents
    from raypd.training.weights import check_weights as check_weights

__getattr__ = LazyExports(
    __name__,
    {
        "data": ("check_training",),
        "job": ("run_training",),
        "prerequisites": ("train",),
        "teacher": ("label_documents",),
        "weights": ("check_weights",),
    },
)
