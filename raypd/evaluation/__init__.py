"""Measuring answers: scores against labels, calibration, and the threshold of a cascade.

Other rooms import the names below from here; each is loaded when it is first used, because some
bring matplotlib or the engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypd.evaluation.calibration import calibration_error, fit_calibration, reliability
    from raypd.evaluation.calibration_file import calibrate_run
    from raypd.evaluation.cascade import CascadeTuning, describe_cascade, tune_cascade
    from raypd.evaluation.labels import (
        asked_attributes,
        category_of,
        flat_values,
        read_answers,
        read_labels,
    )
    from raypd.evaluation.page import reliability_chart, write_page
    from raypd.evaluation.score import (
        Evaluation,
        Measure,
        Metric,
        Score,
        describe,
        evaluate,
        f1_of,
        labelled_values,
        measures_of,
    )

__all__ = [
    "CascadeTuning",
    "Evaluation",
    "Measure",
    "Metric",
    "Score",
    "asked_attributes",
    "calibrate_run",
    "calibration_error",
    "category_of",
    "describe",
    "describe_cascade",
    "evaluate",
    "f1_of",
    "fit_calibration",
    "flat_values",
    "labelled_values",
    "measures_of",
    "read_answers",
    "read_labels",
    "reliability",
    "reliability_chart",
    "tune_cascade",
    "write_page",
]

_NAMES = {
    "calibration": ("calibration_error", "fit_calibration", "reliability"),
    "calibration_file": ("calibrate_run",),
    "cascade": ("CascadeTuning", "describe_cascade", "tune_cascade"),
    "labels": ("asked_attributes", "category_of", "flat_values", "read_answers", "read_labels"),
    "page": ("reliability_chart", "write_page"),
    "score": (
        "Evaluation",
        "Measure",
        "Metric",
        "Score",
        "describe",
        "evaluate",
        "f1_of",
        "labelled_values",
        "measures_of",
    ),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
