"""Measures answers: scores against labels, calibration, and the threshold of a cascade.

Other rooms import the names below from here. Each is loaded when it is first used, because some
import matplotlib or the engine.
"""

from typing import TYPE_CHECKING

from raypd.lazy import LazyExports

if TYPE_CHECKING:
    from raypd.evaluation.calibration import (
        calibration_error as calibration_error,
        fit_calibration as fit_calibration,
        is_improved as is_improved,
        reliability as reliability,
    )
    from raypd.evaluation.calibration_file import (
        calibrate_command as calibrate_command,
        calibrate_run as calibrate_run,
    )
    from raypd.evaluation.cascade import (
        describe_cascade as describe_cascade,
        tune_cascade as tune_cascade,
    )
    from raypd.evaluation.labels import (
        asked_attributes as asked_attributes,
        flat_values as flat_values,
        read_answers as read_answers,
        read_labels as read_labels,
    )
    from raypd.evaluation.page import (
        reliability_chart as reliability_chart,
        write_page as write_page,
    )
    from raypd.evaluation.score import (
        AttributeScore as AttributeScore,
        Evaluation as Evaluation,
        Measure as Measure,
        Metric as Metric,
        Score as Score,
        about_perfect as about_perfect,
        attributes_of as attributes_of,
        describe as describe,
        evaluate as evaluate,
        f1_of as f1_of,
        labelled_values as labelled_values,
        measures_of as measures_of,
    )

__getattr__ = LazyExports(
    __name__,
    {
        "calibration": ("calibration_error", "fit_calibration", "is_improved", "reliability"),
        "calibration_file": ("calibrate_command", "calibrate_run"),
        "cascade": ("describe_cascade", "tune_cascade"),
        "labels": ("asked_attributes", "flat_values", "read_answers", "read_labels"),
        "page": ("reliability_chart", "write_page"),
        "score": (
            "AttributeScore",
            "Evaluation",
            "Measure",
            "Metric",
            "Score",
            "about_perfect",
            "attributes_of",
            "describe",
            "evaluate",
            "f1_of",
            "labelled_values",
            "measures_of",
        ),
    },
)
