"""Calibrates confidences: the probability that such a value is right, by a logistic regression.

`raypd calibrate` and `raypd fit` write the calibration into a file beside the weights. Applying it
needs no scikit-learn.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from raypd import storage
from raypd.config import ModelConfig
from raypd.errors import ModelError

# The file's name beside the weights.
FILE = "calibration.json"
FEATURES = ("logit", "logit of a null", "null", "in the document")
# Probabilities are clipped so far from 0 and 1 before a logarithm is taken.
_EDGE = 1e-4
# No weight of a regression that was fitted on labels comes near this.
_LARGEST_WEIGHT = 1e9


def clipped_probability(probability: float) -> float:
    """Return a probability that is neither 0 nor 1, so that it has a logit and a log loss."""
    return min(max(probability, _EDGE), 1 - _EDGE)


def features(probability: float, null: bool, in_document: bool) -> list[float]:
    """Return the features of a value from which its chance to be right is computed.

    Args:
        probability: The value's uncalibrated confidence.
        null: Whether the value is null.
        in_document: Whether the value is a part of the document's text.

    Returns:
        One number for each of FEATURES.
    """
    clipped = clipped_probability(probability)
    logit = math.log(clipped / (1 - clipped))
    return [logit, logit * null, float(null), float(in_document)]


@dataclass
class Calibration:
    """p(right) = sigmoid(weights . features + intercept + intercept of the attribute).

    Attributes:
        weights: One for each of FEATURES.
        intercept: The intercept of all attributes.
        attributes: The intercept of each "category/attribute". With few labels it is near 0.
        values: The number of labelled values that it was fitted on.
        finds_numbers: Whether its labelled numbers were looked for in their documents. In files of
            earlier versions they were not.
        method: `decoding.method` of the run with these values, "" if unknown.
        run: That run's fingerprint and start.
    """

    weights: list[float]
    intercept: float
    attributes: dict[str, float]
    values: int = 0
    finds_numbers: bool = False
    method: str = ""
    run: str = ""

    def confidence(
        self,
        category: str,
        attribute: str,
        probability: float,
        *,
        null: bool,
        in_document: bool,
        is_number: bool = False,
    ) -> float:
        """Return the probability that a value is right.

        Args:
            category: The category of the document.
            attribute: The attribute's name.
            probability: The value's uncalibrated confidence.
            null: Whether the value is null.
            in_document: Whether the value is a part of the document's text.
            is_number: Whether the value is a number.
        """
        if is_number and not self.finds_numbers:
            in_document = False
        score = float(np.dot(self.weights, features(probability, null, in_document)))
        score += self.intercept + self.attributes.get(f"{category}/{attribute}", 0.0)
        # The sigmoid, in a form that does not overflow for any score.
        return 0.5 + 0.5 * math.tanh(score / 2)

    def write(self, path: Path) -> None:
        """Write the calibration as JSON."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


def calibration_of(config: ModelConfig, method: str = "") -> Calibration | None:
    """Return the calibration of a model.

    Args:
        config: The section `model` of a configuration.
        method: The decoding method. A file beside the weights is ignored if it was made with
            another method; a file that the configuration names is always used.

    Returns:
        The calibration that the configuration names, or else the one beside the weights (of the
        adapter, or else of the model). None if there is none.

    Raises:
        ModelError: If the named file is missing, or the file cannot be read.
    """
    if config.calibration == "none":
        return None
    path = config.calibration or _path_beside_weights(config)
    if path is None:
        return None
    try:
        if not config.calibration and not storage.exists(path):
            return None
        calibration = Calibration(**json.loads(storage.read(path)))
        _check_numbers(calibration)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"model.calibration {path}: cannot be read ({error}); `raypd calibrate` makes one"
        ) from None
    if config.calibration or not method or calibration.method in ("", method):
        return calibration
    return None


def _path_beside_weights(config: ModelConfig) -> str | None:
    """Return where a calibration would be beside the weights; None for a model of the Hub."""
    for folder in (config.adapter, config.name):
        if folder and (storage.is_remote(folder) or Path(folder).is_dir()):
            return storage.join(folder, FILE)
    return None


def _check_numbers(calibration: Calibration) -> None:
    numbers = [*calibration.weights, calibration.intercept, *calibration.attributes.values()]
    in_range = all(abs(number) < _LARGEST_WEIGHT for number in numbers)
    if len(calibration.weights) != len(FEATURES) or not in_range:
        raise ValueError("its numbers are not those of a calibration")
