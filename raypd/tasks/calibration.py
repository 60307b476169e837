"""Confidence as the share of such values that are right, by a logistic regression over what the
model found likely. `raypd calibrate` and `raypd fit` write it into a file beside the weights; it is
used without scikit-learn.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from raypd import storage
from raypd.config import ModelConfig
from raypd.errors import ModelError

FILE = "calibration.json"  # beside weights
_EDGE = 1e-4  # probabilities are taken to be as far from 0 and 1 as this
FEATURES = ("logit", "logit of a null", "null", "stands in the document")


def features(probability: float, null: bool, stands: bool) -> list[float]:
    """What a value's chance to be right is told from: [FEATURES]. stands: the value is text of the
    document.
    """
    inside = min(max(probability, _EDGE), 1 - _EDGE)
    logit = math.log(inside / (1 - inside))
    return [logit, logit * null, float(null), float(stands)]


@dataclass
class Calibration:
    """p(right) = sigmoid(weights . features + intercept + that of the attribute)."""

    weights: list[float]  # of FEATURES
    intercept: float
    # "category/attribute" -> its own intercept, drawn to 0 where it has few labels.
    attributes: dict[str, float]
    values: int = 0  # that it was fitted on
    method: str = ""  # decoding.method of the run that it was made from; "": not known
    run: str = ""  # that run: fingerprint and begin

    def confidence(
        self, category: str, attribute: str, probability: float, null: bool, stands: bool
    ) -> float:
        score = float(np.dot(self.weights, features(probability, null, stands))) + self.intercept
        score += self.attributes.get(f"{category}/{attribute}", 0.0)
        return 0.5 + 0.5 * math.tanh(score / 2)  # the sigmoid, which no score makes overflow

    def write(self, path: Path) -> None:
        path.write_text(
            json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def calibration_of(config: ModelConfig, method: str = "") -> Calibration | None:
    """The calibration that a model's configuration names, or that stands beside its weights; None:
    there is none. method: that decodes; for another's none beside the weights counts. Raises
    ModelError: not there or not readable.
    """
    if config.calibration == "none":
        return None
    folders = [
        f for f in (config.adapter, config.name) if f and (storage.is_remote(f) or Path(f).is_dir())
    ]
    path = config.calibration or (storage.join(folders[0], FILE) if folders else None)
    try:
        if path is None or not (config.calibration or storage.exists(path)):
            return None
        made = Calibration(**json.loads(storage.read(path)))
        numbers = [*made.weights, made.intercept, *made.attributes.values()]
        if len(made.weights) != len(FEATURES) or not all(abs(number) < 1e9 for number in numbers):
            raise ValueError("its numbers are none of a calibration")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"model.calibration {path}: cannot be read ({error}); `raypd calibrate` makes one"
        ) from None
    return made if config.calibration or not method or made.method in ("", method) else None
