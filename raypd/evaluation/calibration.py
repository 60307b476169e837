"""`raypd calibrate RUN LABELS`: from a run's confidences and labels to how often such values are
right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raypd.errors import InputError
from raypd.tasks.calibration import Calibration, features

# Of an attribute's own intercept beside the other features: few labels move it little.
_STRENGTH = 0.5
_BINS = 10
LEAST = 50  # values, for a calibration


@dataclass
class LabelledValue:
    """A value of a run that has a confidence, and whether it is what the label says."""

    category: str
    attribute: str
    confidence: float
    null: bool
    stands: bool  # in the document's text
    right: bool


def calibrate(values: Sequence[LabelledValue]) -> Calibration:
    """Fits a calibration (Platt's).

    Raises InputError: too few values, or all are right or wrong.
    """
    from sklearn.linear_model import LogisticRegression

    right = np.array([value.right for value in values])
    if len(values) < LEAST or right.all() or not right.any():
        reason = (
            "all are right"
            if len(values) >= LEAST and right.all()
            else f"{int(right.sum())} are right"
        )
        raise InputError(
            f"{len(values)} labelled values, of which {reason}: a calibration needs {LEAST} of "
            "both kinds"
        )
    names, place = np.unique(
        [f"{value.category}/{value.attribute}" for value in values], return_inverse=True
    )
    own = _STRENGTH * np.eye(len(names))[place]
    shared = np.array([features(value.confidence, value.null, value.stands) for value in values])
    model: Any = LogisticRegression(C=1.0, max_iter=1000).fit(np.hstack([shared, own]), right)
    weights = model.coef_[0]
    return Calibration(
        weights[: shared.shape[1]].tolist(),
        float(model.intercept_[0]),
        dict(zip(names.tolist(), (_STRENGTH * weights[shared.shape[1] :]).tolist(), strict=True)),
        values=len(values),
    )


def reliability(
    values: Sequence[LabelledValue], made: Calibration | None = None
) -> list[tuple[float, float, int]]:
    """(mean confidence, share that is right, values) in each tenth of 0 to 1 that holds any. made:
    calibrates.
    """
    sure = (
        [made.confidence(v.category, v.attribute, v.confidence, v.null, v.stands) for v in values]
        if made
        else None
    )
    confidence = np.array(sure or [value.confidence for value in values])
    bins = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
    hits = np.array([value.right for value in values], dtype=float)
    masks = [bins == n for n in np.unique(bins)]
    return [
        (float(confidence[mask].mean()), float(hits[mask].mean()), int(mask.sum()))
        for mask in masks
    ]


def calibration_error(points: Sequence[tuple[float, float, int]]) -> float:
    """The expected calibration error: by how much confidence and share differ, over the values of
    all tenths.
    """
    total = sum(count for *_, count in points)
    return sum(abs(sure - share) * count for sure, share, count in points) / max(1, total)
