"""The command `raypd calibrate`: write a calibration file from a run and labels."""

import importlib.util
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raypd import storage
from raypd.config import ModelConfig
from raypd.errors import ConfigError, UserError, raised_as
from raypd.evaluation.calibration import (
    MIN_VALUES,
    calibration_error,
    fit_calibration,
    is_improved,
    reliability,
)
from raypd.evaluation.score import labelled_values
from raypd.run import load_record
from raypd.tasks import calibration as tasks_calibration, calibration_of
from raypd.text import counted


def calibrate_run(
    run: str,
    labels: str,
    output: str | None = None,
    labels_column: str = "target",
    tolerance: float = 0.0,
) -> tuple[str, str]:
    """Write the calibration of a run's model, if it makes the confidences better.

    Args:
        run: The folder of the run.
        labels: The file of labels, as for `evaluate`.
        output: The file that is written; None for one beside the model's weights.
        labels_column: The column that is read in place of `target`.
        tolerance: The share by which a number may differ from its label.

    Returns:
        What was fitted and where it is, and what to do next, in words.

    Raises:
        ConfigError: If the run's confidences are already calibrated or were cut, or the file cannot
            be written.
        InputError: If the labels cannot be read, are too few, or all trained the model.
    """
    record = load_record(storage.absolute(run))
    made_from = f"{record.fingerprint} {record.created}"
    model = ModelConfig.model_validate(record.config["model"])
    method = (record.config.get("decoding") or {}).get("method", "")
    _check_confidences(run, record.config)
    existing = calibration_of(model, method)
    if existing is not None and existing.run != made_from:
        raise ConfigError(
            f"{run}: its confidences are already calibrated; run it with model.calibration=none"
        )
    path = Path(output) if output is not None else _beside_weights(run, model)
    values, trained = labelled_values(run, labels, labels_column, tolerance)
    calibration = fit_calibration(values)
    right = sum(value.right for value in values)
    before = calibration_error(reliability(values))
    left_out = ""
    if trained:
        left_out = (
            f"\nleft out: {counted(trained, 'document')} that trained or validated the model, "
            "because it has seen their labels"
        )
    if not is_improved(values):
        unchanged, step = _without_calibration(run, path, named=output is not None)
        return (
            "the confidences are as good without a calibration from these labels, so nothing was "
            f"written{unchanged}"
            f"\ncalibration error on {len(values):,} values, {right:,} of them right: "
            f"{before:.3f}; it is not certain that a calibration improves other documents, "
            f"and more labels may change that{left_out}"
        ), step
    calibration.method = method
    calibration.run = made_from
    with raised_as(ConfigError, f"{path}: cannot be written"):
        calibration.write(path)
    after = calibration_error(reliability(values, calibration))
    return (
        f"{path}: fitted on {len(values):,} values, {right:,} of them right\n"
        f"calibration error on these: {before:.3f} before, {after:.3f} now; `raypd evaluate` "
        f"measures it on others{left_out}"
    ), (
        "run other labelled documents with this calibration, then `raypd evaluate RUN LABELS` "
        "measures it"
    )


def _without_calibration(run: str, path: Path, named: bool) -> tuple[str, str]:
    """Return what becomes of an existing file, and what to do next.

    The file stays, because it may come from more labels than these, and the user may want it.
    """
    if not path.exists():
        return "", f"`raypd report {run}` shows the run with its confidences"
    users = "runs that name it in model.calibration" if named else "later runs with these weights"
    step = "run with model.calibration=none" if named else f"delete {path}"
    return (
        f"; {path}, from an earlier calibration, stays as it was, and {users} use it",
        f"{step} to have the model's own confidences",
    )


def calibrate_command(
    run: str,
    labels: str,
    points: Sequence[tuple[float, float, int]],
    labels_column: str = "target",
    tolerance: float = 0.0,
) -> str | None:
    """Return the command that calibrates a run's model.

    Args:
        run: The folder of the run.
        labels: The file of labels, as for `evaluate`.
        points: The reliability of the run's confidences over these labels.
        labels_column: The column that is read in place of `target`.
        tolerance: The share by which a number may differ from its label.

    Returns:
        The command; None if it would not work, or if the confidences are calibrated already.
    """
    values = sum(count for *_, count in points)
    right = round(sum(share_right * count for _, share_right, count in points))
    has_package = importlib.util.find_spec("sklearn") is not None
    if values < MIN_VALUES or right in (0, values) or not has_package or storage.is_remote(run):
        return None
    words = ["raypd", "calibrate", run, labels]
    try:
        config = load_record(storage.absolute(run)).config
        model = ModelConfig.model_validate(config["model"])
        _check_confidences(run, config)
        method = (config.get("decoding") or {}).get("method", "")
        if calibration_of(model, method) is not None:
            return None
    except (UserError, ValueError, KeyError):
        return None
    try:
        _beside_weights(run, model)
    except ConfigError:
        words += ["--output", storage.join(run, tasks_calibration.FILE)]
    if labels_column != "target":
        words += ["--labels-column", labels_column]
    if tolerance:
        words += ["--tolerance", f"{tolerance:g}"]
    return shlex.join(words)


def _check_confidences(run: str, config: dict[str, Any]) -> None:
    """Raise ConfigError for a run with confidences of two models, or without the low ones."""
    if (config.get("cascade") or {}).get("model") is not None:
        raise ConfigError(
            f"{run}: two models answered (cascade.model): calibrate each with its own run"
        )
    if (config.get("output") or {}).get("min_confidence"):
        raise ConfigError(
            f"{run}: output.min_confidence took unsure values away: run it with "
            "output.min_confidence=0"
        )


def _beside_weights(run: str, model: ModelConfig) -> Path:
    """Return the path of the calibration that every run with the model's weights uses."""
    for folder in (model.adapter, model.name):
        if folder and Path(folder).is_dir():
            return Path(folder, tasks_calibration.FILE)
    raise ConfigError(
        f"{run}: its model has no local folder; name a file with --output, and set "
        "model.calibration to it"
    )
