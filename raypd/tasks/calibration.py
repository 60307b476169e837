"""Confidence as the share of such values that are right, by a logistic regression over what the model found likely.

`raypd calibrate` and `raypd fit` write it into a file beside the weights; it is used without scikit-learn."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from raypd.config import ModelConfig
from raypd.errors import ModelError

FILE = "calibration.json"  # beside weights
_EDGE = 1e-4  # probabilities are taken to be as far from 0 and 1 as this
FEATURES = ("logit", "logit of a null", "null", "stands in the document")


def features(probability: float, null: bool, stands: bool) -> list[float]:
    """What a value's chance to be right is told from: [FEATURES]. stands: the value is text of the document."""
    inside = min(max(probability, _EDGE), 1 - _EDGE)
    logit = math.log(inside / (1 - inside))
    return [logit, logit * null, float(null), float(stands)]


@dataclass
class Calibration:
    """p(right) = sigmoid(weights . features + intercept + that of the attribute)."""

    weights: list[float]  # of FEATURES
    intercept: float
    attributes: dict[str, float]  # "category/attribute" -> its own intercept, drawn to 0 where it has few labels
    values: int = 0  # that it was fitted on

    def confidence(self, category: str, attribute: str, probability: float, null: bool, stands: bool) -> float:
        score = float(np.dot(self.weights, features(probability, null, stands))) + self.intercept
        score += self.attributes.get(f"{category}/{attribute}", 0.0)
        return 0.5 + 0.5 * math.tanh(score / 2)  # the sigmoid, which no score makes overflow

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def calibration_of(config: ModelConfig) -> Calibration | None:
    """The calibration that a model's configuration names, or that stands beside its weights; None: there is none.

    Raises ModelError: it is named and not there, or cannot be read."""
    if config.calibration == "none":
        return None
    beside = [Path(folder, FILE) for folder in (config.adapter, config.name) if folder and Path(folder).is_dir()]
    paths = [Path(config.calibration)] if config.calibration else [path for path in beside[:1] if path.is_file()]
    if not paths:
        return None
    try:
        made = Calibration(**json.loads(paths[0].read_text(encoding="utf-8")))
        made.confidence("", "", 0.5, null=False, stands=False)
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(
            f"model.calibration {paths[0]}: cannot be read ({error}); `raypd calibrate` makes one"
        ) from None
    return made
