"""The configuration of an earlier run, from the run.json in its folder."""

from collections.abc import Sequence

from raypd import storage
from raypd.config import RunConfig, StorageConfig
from raypd.config.load import make_config, value_of
from raypd.errors import ConfigError, raised_as
from raypd.run import layout, records


class NoRun(ConfigError):
    """There is no run in the folder."""


def is_nightly(output: str) -> bool:
    """Whether a folder holds nights (`raypd nightly`), and at least one good one."""
    return not storage.exists(storage.join(output, layout.RUN)) and storage.exists(
        storage.join(output, layout.STATE)
    )


def load_record(output: str, overrides: Sequence[str] = ()) -> records.RunRecord:
    """run.json, or the state.json of nights; S3 is then reached as it or overrides say.

    Raises ConfigError, NoRun.
    """
    pairs = [
        o.removeprefix("storage.").split("=", 1)
        for o in overrides
        if o.startswith("storage.") and "=" in o
    ]
    keys = {key: value_of(value) for key, value in pairs}
    path = storage.join(output, layout.RUN)
    try:
        storage.configure(StorageConfig.model_validate(keys))
        if is_nightly(output):
            path = storage.join(output, layout.STATE)
        record = records.read(records.RunRecord, path)
        storage.configure(
            StorageConfig.model_validate({**(record.config.get("storage") or {}), **keys})
        )
        return record
    except FileNotFoundError:
        reason = "no run here (it has no run.json); give the output.path of a run"
        if storage.folders(storage.join(output, layout.NIGHTS)):
            reason = (
                "no night has ended well here yet; the folders in nights/ are runs, of which "
                "each can be looked at"
            )
        elif storage.exists(storage.join(output, layout.ESTIMATE)):
            reason = (
                f"no run here yet, only an estimate: start the run, or `raypd report {output}` "
                "shows it"
            )
        raise NoRun(f"{output}: {reason}") from None
    except storage.Unavailable:
        raise
    except (storage.StorageError, records.RecordError) as error:  # which name the path
        raise ConfigError(str(error)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def load_run(output: str, overrides: list[str]) -> RunConfig:
    """A run's configuration.

    Raises ConfigError: there is no run, or what its answers depend on is not what it was.
    """
    record = load_record(output, overrides)
    tree = record.config
    if isinstance(tree.get("task"), dict):
        for key in ("categories_file", "schema"):  # the categories themselves stand there
            tree["task"].pop(key, None)
    with raised_as(
        ConfigError, f"{output}: a file that the run's prompts come from cannot be read"
    ):
        config = make_config(tree, overrides)
        fingerprint = config.fingerprint()
    if fingerprint != record.fingerprint:
        raise ConfigError(
            f"{output}: its configuration makes the fingerprint {fingerprint}, and the run "
            f"has {record.fingerprint}: "
            "an override or a file that prompts come from (template, few_shot, examples) "
            "has changed it, or the run is "
            f"of another version of raypd ({record.versions.get('raypd', 'unknown')})"
        )
    return config
