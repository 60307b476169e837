"""Load the configuration of an earlier run from its folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import raypd.run.layout as layout
import raypd.run.records as records
from raypd import storage
from raypd.config import (
    RunConfig,
    StorageConfig,
    card_of,
    make_config,
    set_key,
    value_of,
    with_current_keys,
)
from raypd.errors import ConfigError, did_you_mean, raised_as
from raypd.run.manifest import RunRecord

# A placeholder configuration, of which only `storage` is used.
_NO_RUN = {
    "input": {"path": "-"},
    "output": {"path": "-"},
    "task": {"kind": "generation"},
    "model": {"name": "fake"},
}


# A fit trains each candidate in a folder of this name.
_TRAINING_FOLDER = "training"


class NoRun(ConfigError):
    """The folder contains no run."""


def load_record(output: str, overrides: Sequence[str] = ()) -> RunRecord:
    """Read run.json, or state.json in a folder of nightly runs.

    Storage is configured as the record says, with the `storage` keys of the overrides on top.

    Args:
        output: The folder of the run.
        overrides: Configuration overrides of the form key=value.

    Raises:
        NoRun: If the folder contains no run.
        ConfigError: If the record cannot be read, or an override is wrong.
    """
    storage_overrides = [override for override in overrides if override.startswith("storage.")]
    storage.configure(make_config(_NO_RUN, storage_overrides).storage)
    storage_keys: dict[str, Any] = {}
    for override in storage_overrides:
        key, _, value = override.removeprefix("storage.").partition("=")
        set_key(storage_keys, key, value_of(value))
    record = read_record(output)
    recorded = with_current_keys(record.config).get("storage") or {}
    try:
        storage.configure(_storage_settings(recorded, storage_keys))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{output}: its storage settings cannot be used: {error}") from None
    return record


def read_record(output: str) -> RunRecord:
    """Read run.json, or state.json in a folder of nightly runs, by storage as it is configured.

    Args:
        output: The folder of the run.

    Raises:
        NoRun: If the folder contains no run.
        ConfigError: If the record cannot be read.
    """
    path = storage.join(output, layout.RUN)
    try:
        if layout.is_nightly(output):
            path = storage.join(output, layout.STATE)
        return records.read(RunRecord, path)
    except FileNotFoundError:
        raise NoRun(f"{output}: {_why_no_run(output)}") from None
    except storage.Unavailable:
        raise
    except (storage.StorageError, records.RecordError) as error:  # the message names the path
        raise ConfigError(str(error)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _why_no_run(output: str) -> str:
    if storage.folders(storage.join(output, layout.NIGHTS)):
        return "no night has succeeded yet; each folder in nights/ is a run that you can inspect"
    if storage.exists(storage.join(output, layout.FIT)):
        return _about_fit(output)
    if storage.exists(storage.join(output, layout.ESTIMATE)):
        return (
            "no run here yet, only an estimate. Start the run, or show the estimate with "
            f"`raypd report {output}`"
        )
    missing = "run.json is missing"
    hint = ""
    if not storage.is_folder(output):
        missing = "no such folder"
        hint = similar_folder(output)
    if hint:
        return (
            f"no run here ({missing}); {hint} A job that was submitted may not have started yet "
            "(`ray job status ID`)"
        )
    return (
        f"no run here ({missing}): give the output.path of a run, or wait, because a job that was "
        "submitted may not have started yet (`ray job status ID`)"
    )


def similar_folder(missing: str) -> str:
    """Return a hint at the folder that a misspelt path most likely means; "" if there is none."""
    parent, _, name = missing.rstrip("/").rpartition("/")
    try:
        siblings = storage.folders(parent or ".")
    except OSError:
        return ""
    return did_you_mean(
        name, siblings, lambda sibling: storage.join(parent, sibling) if parent else sibling
    )


def _about_fit(output: str) -> str:
    """Return what to look at in the folder of a fit, which contains runs but is not a run."""
    report = storage.join(output, layout.REPORT)
    begun = {path.parent: path.stat().st_mtime for path in Path(output).rglob(layout.RUN)}
    trainings = {}
    for ledger in Path(output).rglob(f"{_TRAINING_FOLDER}/{layout.LEDGER}"):
        trainings[ledger.parent] = ledger.stat().st_mtime
    written = Path(output, layout.FIT).stat().st_mtime
    # A fit that was resumed begins runs or trainings after its earlier result.
    if written >= max([*begun.values(), *trainings.values()], default=0.0):
        ended = _result_of_fit(output)
        if ended:
            return f"is the folder of a fit, not of a run. {ended}. {report} shows its results"
    says = (
        "is the folder of a fit, not of a run. Its terminal shows its progress, and "
        f"{report} the result when it has ended"
    )
    if begun:
        latest = max(begun, key=begun.__getitem__)
        says += f". `raypd status {latest}` shows its latest run"
    newer = []
    for training, began in trainings.items():
        is_done = (training / layout.TRAINING).exists()
        if not is_done and began > max(begun.values(), default=0.0):
            newer.append(training)
    if newer:
        says += f"; the training {newer[-1]} has begun since, and is not a run"
    return says


def _result_of_fit(output: str) -> str:
    """Return what a fit that has ended recommends; "" if it has not ended."""
    try:
        result = json.loads(storage.read(storage.join(output, layout.FIT)))
    except (OSError, ValueError):
        return ""
    if not isinstance(result, dict) or not (result.get("scores") or result.get("stopped")):
        return ""
    says = "The fit has ended"
    if result.get("stopped"):
        says += f" early ({result['stopped']})"
    if result.get("configuration"):
        return f"{says} and recommends {result.get('recommended')}: {result['configuration']}"
    says += " and recommends no model"
    if result.get("best_configuration"):
        says += f"; the best one is {result.get('best')}: {result['best_configuration']}"
    return says


def load_run(output: str, overrides: list[str]) -> RunConfig:
    """Load the configuration of a run.

    Raises:
        ConfigError: If there is no run, or if something that its answers depend on has changed.
    """
    record = load_record(output, overrides)
    tree = with_current_keys(record.config)
    if isinstance(tree.get("task"), dict):
        # The record contains the categories themselves, so their sources are not read again.
        for key in ("categories_file", "schema"):
            tree["task"].pop(key, None)
    with raised_as(
        ConfigError, f"{output}: a file that the run's prompts come from cannot be read"
    ):
        config = make_config(tree, overrides)
        fingerprint = config.fingerprint()
    if fingerprint != record.fingerprint:
        if record.model_card and not card_of(config.model.model_dump(), config.task.kind):
            weights = config.model.adapter or config.model.name
            raise ConfigError(
                f"{output}: the trained weights {weights} of this run are not here. If this is a "
                "relative path, run the command in the folder where the run was started"
            )
        version = record.versions.get("raypd", "unknown")
        raise ConfigError(
            f"{output}: the configuration now has the fingerprint {fingerprint}, but the run has "
            f"{record.fingerprint}. Either an override or a file that prompts come from (template, "
            "few_shot, examples) has changed, or the run was made by another version of raypd "
            f"({version})"
        )
    return config


def _storage_settings(recorded: dict[str, Any], overrides: dict[str, Any]) -> StorageConfig:
    """Return the settings for the storage of a run.

    Args:
        recorded: Section `storage` in the run's record.
        overrides: The same section from the command line, which takes precedence.
    """
    options = {**recorded.get("options", {}), **overrides.get("options", {})}
    return StorageConfig.model_validate({"options": options})
