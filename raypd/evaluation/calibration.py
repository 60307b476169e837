"""Fit a calibration: from a run's confidences and labels to how often such values are right."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raypd.errors import InputError
from raypd.tasks import Calibration, clipped_probability, features
from raypd.text import counted

# The scale of an attribute's own intercept beside the other features. A small one makes a few
# labels move it little.
_ATTRIBUTE_SCALE = 0.5
_BINS = 10
MIN_VALUES = 50  # for a calibration
_FOLDS = 5


@dataclass
class LabelledValue:
    """A value of a run that has a confidence, and whether it agrees with its label."""

    category: str
    attribute: str
    confidence: float
    null: bool
    in_document: bool  # whether the document's text contains it
    right: bool
    is_number: bool = False
    document: str = field(kw_only=True)  # its id


def fit_calibration(values: Sequence[LabelledValue]) -> Calibration:
    """Fit a calibration (Platt's).

    Args:
        values: Labelled values of one model.

    Raises:
        InputError: If there are too few values, or all are right or all wrong.
    """
    right = np.array([value.right for value in values])
    if len(values) < MIN_VALUES or right.all() or not right.any():
        count = counted(len(values), "labelled value")
        if len(values) < MIN_VALUES:
            raise InputError(f"a calibration needs {MIN_VALUES} labelled values; there are {count}")
        all_are = "right" if right.all() else "wrong"
        raise InputError(
            f"a calibration needs right and wrong values, but all {count} are {all_are}"
        )
    return _fitted(values)


def _fitted(values: Sequence[LabelledValue]) -> Calibration:
    """Return the calibration of values of which some are right and some wrong."""
    from sklearn.linear_model import LogisticRegression

    right = np.array([value.right for value in values])
    attributes, attribute_of_value = np.unique(
        [f"{value.category}/{value.attribute}" for value in values], return_inverse=True
    )
    shared = np.array(
        [features(value.confidence, value.null, value.in_document) for value in values]
    )
    one_hot = _ATTRIBUTE_SCALE * np.eye(len(attributes))[attribute_of_value]
    model: Any = LogisticRegression(C=1.0, max_iter=1000).fit(np.hstack([shared, one_hot]), right)
    weights = model.coef_[0]
    count = shared.shape[1]
    intercepts = (_ATTRIBUTE_SCALE * weights[count:]).tolist()
    return Calibration(
        weights=weights[:count].tolist(),
        intercept=float(model.intercept_[0]),
        attributes=dict(zip(attributes.tolist(), intercepts, strict=True)),
        values=len(values),
        finds_numbers=any(value.is_number and value.in_document for value in values),
    )


def is_improved(values: Sequence[LabelledValue]) -> bool:
    """Return whether a calibration makes the confidences of other documents better.

    On the values that it was fitted on, a calibration looks better than it is on others. So each
    fifth of the documents is judged by a calibration of the other four. The parts consist of whole
    documents because the values of one document are often right or wrong together.

    The measure is the log loss, whose expectation is lowest for the true chances. In simulations
    with 100 values it told useful from harmful calibrations better than the Brier score. The mean
    gain of a document has to be larger than its standard error, because with few labels the gain of
    a useless calibration is above zero by chance in one case of seven. A single sure value that is
    wrong cannot make it so large.

    Args:
        values: Labelled values of one model, for which `fit_calibration` finds a calibration.

    Returns:
        False also if the values cannot show it: they are of fewer than five documents, or one fifth
        has all that are right or all that are wrong.
    """
    from sklearn.model_selection import GroupKFold

    documents, document_of_value = np.unique(
        [value.document for value in values], return_inverse=True
    )
    if len(documents) < _FOLDS:
        return False
    gains = np.zeros(len(documents))
    # GroupKFold draws nothing at random.
    for others, held_out in GroupKFold(_FOLDS).split(document_of_value, groups=document_of_value):
        rights = {values[index].right for index in others}
        if len(rights) < 2:
            return False
        calibration = _fitted([values[index] for index in others])
        for index in held_out:
            value = values[index]
            gain = _log_loss(value.confidence, value.right)
            gain -= _log_loss(_confidence(value, calibration), value.right)
            gains[document_of_value[index]] += gain
    return bool(gains.mean() > gains.std(ddof=1) / np.sqrt(len(gains)))


def _log_loss(confidence: float, right: bool) -> float:
    probability = clipped_probability(confidence)
    return -math.log(probability if right else 1 - probability)


def _confidence(value: LabelledValue, calibration: Calibration) -> float:
    return calibration.confidence(
        value.category,
        value.attribute,
        value.confidence,
        null=value.null,
        in_document=value.in_document,
        is_number=value.is_number,
    )


def reliability(
    values: Sequence[LabelledValue], calibration: Calibration | None = None
) -> list[tuple[float, float, int]]:
    """Compare confidences with the share of right values.

    Args:
        values: Labelled values.
        calibration: Calibrates the confidences first; None to take them as they are.

    Returns:
        (mean confidence, share right, number of values) for each tenth of 0 to 1 that holds values.
    """
    confidences = []
    for value in values:
        confidence = value.confidence
        if calibration is not None:
            confidence = _confidence(value, calibration)
        confidences.append(confidence)
    confidence_of = np.array(confidences)
    is_right = np.array([value.right for value in values], dtype=float)
    bin_of = np.minimum((confidence_of * _BINS).astype(int), _BINS - 1)
    points = []
    for number in np.unique(bin_of):
        mask = bin_of == number
        mean_confidence = float(confidence_of[mask].mean())
        points.append((mean_confidence, float(is_right[mask].mean()), int(mask.sum())))
    return points


def calibration_error(points: Sequence[tuple[float, float, int]]) -> float:
    """Return the expected calibration error.

    Args:
        points: What `reliability` returned.

    Returns:
        The difference between confidence and share right, averaged over all values; 0 without any.
    """
    total = sum(count for *_, count in points)
    gaps = sum(abs(confidence - share) * count for confidence, share, count in points)
    return gaps / max(1, total)
