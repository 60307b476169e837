"""How `raypd fit` finds the cheapest model that holds an F1."""

import re
from typing import Any

from pydantic import Field, field_validator

from raypd.config.model import Keys
from raypd.config.section import Section, Uri, check_secrets

_SECTIONS = ("model", "decoding", "training", "engine")  # that a candidate may change


class FitConfig(Section, use_attribute_docstrings=True):
    """What `raypd fit` needs beside the run's own keys; other commands do not look at it."""

    path: Uri | None = Field(None, description="Folder of the fit, local; null: output.path with -fit behind it")
    labels: Uri | None = None
    """Labelled documents: a file, folder or glob with the input's columns and training.labels_column, or the output
    folder of a run over the input; null: the teacher labels, or the input itself has that column"""
    teacher: Keys | None = None
    """Keys of the run that labels, dotted: {model.name: Qwen/Qwen3-8B}, or {model.endpoint: {...}}"""
    documents: int = Field(400, ge=1, description="Labelled documents that are drawn; a corpus is drawn from evenly")
    test_share: float = Field(0.25, gt=0, lt=1, description="Of these, for the figures alone")
    validation_share: float = Field(0.1, gt=0, lt=1, description="Of these, to pick checkpoint and learning rate")
    candidates: dict[str, dict[str, Any]] = Field(
        {"lora": {"training.weights": "lora"}, "full": {"training.weights": "full"}}, min_length=1
    )
    """What is trained: name -> keys, dotted, of model, decoding, training and engine"""
    curve: list[float] = Field([0.25, 0.5])
    """Every candidate is trained on these shares of the training part too; []: no curve"""
    f1_floor: float = Field(0.7, ge=0, le=1, description="F1 that the recommended model has to hold, surely (95%)")
    sample: int = Field(32, ge=2, description="Documents that are decoded to measure what each model costs")
    sample_minutes: float = Field(5.0, gt=0, description="Most time for that, of each model")

    @field_validator("candidates")
    @classmethod
    def _named_and_known(cls, candidates: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        check_secrets(candidates)
        for name, keys in candidates.items():
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
                raise ValueError(f"{name!r}: a name is of letters, digits and . _ -")
            if name == "teacher":
                raise ValueError("'teacher' is the name of what fit.teacher is: give the candidate another")
            for key in keys:
                if key.partition(".")[0] not in _SECTIONS or "." not in key:
                    raise ValueError(f"{name}: {key!r}: give keys of {', '.join(_SECTIONS)}, such as training.weights")
        return candidates

    @field_validator("curve")
    @classmethod
    def _shares(cls, shares: list[float]) -> list[float]:
        if not all(0 < share < 1 for share in shares):
            raise ValueError(f"{shares}: shares of the training part lie between 0 and 1")
        return sorted(set(shares))
