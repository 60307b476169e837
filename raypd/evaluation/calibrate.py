"""The command `raypd calibrate`: checks what a calibration is made from, and says what it
brings.
"""

from pathlib import Path

from raypd import storage
from raypd.config import ModelConfig
from raypd.errors import ConfigError, raised_as
from raypd.evaluation.calibration import calibrate, calibration_error, reliability
from raypd.evaluation.score import labelled_values
from raypd.run.load import load_record
from raypd.tasks.calibration import FILE, calibration_of


def calibrate_run(
    run: str,
    labels: str,
    output: str | None = None,
    labels_column: str = "target",
    tolerance: float = 0.0,
) -> str:
    """Writes the calibration of a run's model; what it is and where, in words.

    Raises ConfigError: its confidences are calibrated already or cut, or there is no place for the
    file; InputError.
    """
    record = load_record(storage.absolute(run))
    config, made_from = record.config, f"{record.fingerprint} {record.created}"
    if (config.get("cascade") or {}).get("model") is not None:
        raise ConfigError(
            f"{run}: two models answered (cascade.model): calibrate each by a run of its own"
        )
    model = ModelConfig.model_validate(config["model"])
    if (config.get("output") or {}).get("min_confidence"):
        raise ConfigError(
            f"{run}: output.min_confidence took unsure values away: run it with "
            "output.min_confidence=0"
        )
    method = (config.get("decoding") or {}).get("method", "")
    if (there := calibration_of(model, method)) is not None and there.run != made_from:
        raise ConfigError(
            f"{run}: its confidences are calibrated already; run it with model.calibration=none"
        )
    weights = next(
        (folder for folder in (model.adapter, model.name) if folder and Path(folder).is_dir()), None
    )
    if output is None and weights is None:
        raise ConfigError(
            f"{run}: its weights lie in no folder here; --output names a file for model.calibration"
        )
    path = Path(output) if output is not None else Path(str(weights), FILE)
    values = labelled_values(run, labels, labels_column, tolerance)
    made = calibrate(values)
    made.method, made.run = method, made_from
    with raised_as(ConfigError, f"{path}: cannot be written"):
        made.write(path)
    before, after = (
        calibration_error(reliability(values, calibration)) for calibration in (None, made)
    )
    return (
        f"{path}: fitted on {len(values):,} values, "
        f"{sum(v.right for v in values) / len(values):.0%} of them right\n"
        f"calibration error on these: {before:.3f} before, {after:.3f} now; `raypd "
        "evaluate` measures it on others"
    )
