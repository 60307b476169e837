"""The records of a run beside its rows: run.json at the start, manifest.json at the end."""

import contextlib
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import raypd
from raypd import storage
from raypd.config import RunConfig
from raypd.errors import ConfigError
from raypd.run import layout, read, records
from raypd.run.records import (
    LeftOutFiles,
    Manifest,
    RecordError,
    RunCost,
    RunRecord,
    SessionTotals,
    UnitSummary,
)
from raypd.run.text import iso
from raypd.run.unreadable import Unreadable

# What makes another fingerprint beside the keys.
NO_KEY = "a file that prompts come from, or raypd itself"


def versions() -> dict[str, str]:
    """Of what an answer may depend on."""
    libraries = {
        name: metadata.version(name) for name in ("torch", "transformers", "ray", "pyarrow")
    }
    return {"raypd": raypd.__version__, "python": platform.python_version(), **libraries}


def claim(config: RunConfig, output: str, held: bool = False) -> bool:
    """Makes the folder this run's, or checks that it is.

    Raises ConfigError: it is another's, or cannot be written. held: under its lease, so that a run
    which has committed nothing gives way; True: one did.
    """
    record = RunRecord(config.fingerprint(), recorded(config), iso(), versions())
    path = storage.join(output, layout.RUN)
    check(config, output)
    try:
        storage.make_folder(output)
        storage.put_new(path, records.encoded(record), private=True)
        gives_way = held and records.read(RunRecord, path).fingerprint != record.fingerprint
        if gives_way:
            storage.put(path, records.encoded(record), private=True)
        return gives_way
    except OSError as error:
        raise _refusal(error, f"output.path {output}: cannot be written: {error}") from None


def _refusal(error: OSError, message: str) -> Exception:
    """A ConfigError, except where the store does not answer."""
    if isinstance(error, storage.Unavailable):
        return error
    return ConfigError(
        f"output.path: {error}" if isinstance(error, storage.StorageError) else message
    )


def recorded(config: RunConfig) -> dict[str, Any]:
    """The configuration with absolute paths, so that it means the same files from any folder."""
    tree = config.model_dump(mode="json")
    paths = tree["input"]["path"]
    tree["input"]["path"] = (
        [storage.absolute(p) for p in paths] if isinstance(paths, list) else storage.absolute(paths)
    )
    examples = tree["task"].get("examples") or {}
    for section, key in (
        (tree["task"], "template"),
        (tree["task"], "few_shot"),
        (examples, "path"),
    ):
        if section.get(key):
            section[key] = storage.absolute(section[key])
    return tree


def check(config: RunConfig, output: str) -> None:
    """Whether a run may have its folder; writes nothing.

    Raises ConfigError: another's are there, or unreadable.
    """
    path = storage.join(output, layout.RUN)
    units = storage.join(output, layout.UNITS)
    try:
        if storage.exists(output) and not storage.is_folder(output):
            raise ConfigError(f"output.path {output}: is a file; give a folder")
        record = records.read(RunRecord, path)
    except FileNotFoundError:
        if next(storage.walk(units), None) is not None:
            raise ConfigError(
                f"output.path {output}: has units but no run.json; give a new output.path"
            ) from None
        return
    except RecordError as error:
        raise ConfigError(f"{error}; give a new output.path") from None
    except OSError as error:
        raise _refusal(error, f"{path}: cannot be read ({error}); give a new output.path") from None
    if record.fingerprint != config.fingerprint() and next(storage.walk(units), None) is not None:
        changed = differences(record.config, config) or [NO_KEY]
        raise ConfigError(
            f"output.path {output}: holds the run of another configuration, "
            f"{record.fingerprint}; this one is "
            f"{config.fingerprint()} (changed: {', '.join(changed[:6])}). Give a new "
            "output.path, or go back to that "
            "configuration"
        )


def differences(old: dict[str, Any], config: RunConfig) -> list[str]:
    """Dotted keys of the fingerprint that `old` has otherwise; none where only a prompt file or
    raypd itself differ.
    """
    idle = config.idle_keys()
    # Of a version with other keys: it is compared as it stands.
    with contextlib.suppress(ValueError):
        was = RunConfig.model_validate(old)
        old = was.model_dump(mode="json")
        idle = idle & was.idle_keys()
    return _differing(old, recorded(config), idle)


def _differing(old: Any, new: Any, idle: set[str], key: str = "") -> list[str]:
    if key in idle:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(k for k in new if k not in old)]
        return [
            d
            for k in keys
            for d in _differing(old.get(k), new.get(k), idle, f"{key}.{k}" if key else str(k))
        ]
    return [] if old == new else [key]


def make(
    config: RunConfig,
    output: str,
    units_planned: int,
    units: Sequence[UnitSummary],
    unreadable: Unreadable,
    cost: RunCost | None,
    left_out: Sequence[LeftOutFiles] = (),
) -> Manifest:
    """Add up the committed units and the sessions of a run.

    Args:
        config: The run's configuration.
        output: The run's folder.
        units_planned: How many units the plan has.
        units: The summaries of the committed units.
        unreadable: Units of the input that cannot be read.
        cost: The bill of all sessions; None where no ledger ran.
        left_out: Files of the input that are not read.
    """
    sessions = []
    for session in read.sessions([output]):
        committed = [u for u in units if u.session == session.id]
        # A session that was killed left no end: its last commit is what is known.
        ended = session.ended or max((u.committed_at for u in committed), default=session.began)
        seconds = round(max(0.0, session.seconds or ended - session.began), 3)
        totals = (seconds, len(committed), sum(u.documents for u in committed))
        sessions.append(
            SessionTotals(
                session.id, iso(session.began), iso(ended), session.how or "killed", *totals
            )
        )
    sums: dict[str, Any] = {
        n: sum(getattr(u, n) for u in units) for n in ("documents", "ok", "failed", "truncated")
    }
    for kind in ("prefill_tokens", "shared_tokens", "decode_tokens"):
        sums[kind] = sum(u.counts.get(kind, 0) for u in units)
    seconds = sum(s.seconds for s in sessions)
    return Manifest(
        fingerprint=config.fingerprint(),
        fake=config.model.is_fake,
        **sums,
        output=output,
        cost=cost,
        units=len(units),
        units_planned=units_planned,
        units_unreadable=unreadable.units,
        seconds=round(seconds, 3),
        documents_per_second=round(sums["documents"] / seconds, 3) if seconds else 0.0,
        started=sessions[0].started if sessions else None,
        ended=sessions[-1].ended if sessions else None,
        sessions=sessions,
        unreadable=[*unreadable.files.values()],
        left_out=[*left_out],
        versions=versions(),
        config=config.model_dump(mode="json"),
    )
