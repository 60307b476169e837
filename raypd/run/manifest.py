"""Write the records of a run: run.json at the start and manifest.json at the end."""

import contextlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import raypd
import raypd.run.layout as layout
import raypd.run.read as read
import raypd.run.records as records
from raypd import storage
from raypd.config import RunConfig, card_of
from raypd.errors import ConfigError
from raypd.run.lease import Session
from raypd.run.left_out import LeftOutFiles
from raypd.run.records import RecordError
from raypd.run.unit_totals import SessionUnits, UnitTotals
from raypd.run.unreadable import Unreadable, UnreadableUnit
from raypd.run.usage import RunCost
from raypd.text import iso

# What can change the fingerprint apart from the keys of the configuration.
NO_KEY = "a file that prompts come from, or raypd itself"
_SHOWN_KEYS = 6
_REASONS = 20  # kinds of reasons


@dataclass
class RunRecord:
    """run.json: the configuration of a run. An output folder belongs to one fingerprint."""

    fingerprint: str
    config: dict[str, Any]
    created: str | None = None  # ISO 8601
    versions: dict[str, str] = field(default_factory=dict)  # of libraries that affect answers
    # The model card of the weights, which says what they were trained for; empty if there is none.
    model_card: dict[str, Any] = field(default_factory=dict)
    # Labelled values on which the confidences were calibrated when the run began: 0 if they were
    # not calibrated, -1 if it is not known.
    calibrated_on: int = -1


@dataclass
class SessionTotals:
    """A session in the manifest, with what it committed."""

    id: str
    started: str  # ISO 8601
    ended: str  # ISO 8601
    how: str
    seconds: float
    units: int
    documents: int


@dataclass
class Manifest:
    """manifest.json: the totals of a run."""

    fingerprint: str = ""
    fake: bool = False  # whether the answers are made up (`model: fake`)
    documents: int = 0
    ok: int = 0
    failed: int = 0
    truncated: int = 0  # documents that were cut to fit the model's context
    # Failed documents by kind of reason, the most frequent kinds first.
    reasons: dict[str, int] = field(default_factory=dict)
    units: int = 0
    units_planned: int = 0
    units_unreadable: int = 0  # units that could not be read from the input
    prefill_tokens: int = 0
    shared_tokens: int = 0
    decode_tokens: int = 0
    seconds: float = 0.0
    documents_per_second: float = 0.0  # over the time of all sessions
    started: str | None = None
    ended: str | None = None
    sessions: list[SessionTotals] = field(default_factory=list)
    unreadable: list[UnreadableUnit] = field(default_factory=list)  # the first hundred
    left_out: list[LeftOutFiles] = field(default_factory=list)  # files that were not read at all
    versions: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    output: str = ""
    cost: RunCost | None = None  # None if no ledger ran


def versions() -> dict[str, str]:
    """Return the versions of raypd, Python and the libraries that affect answers."""
    libraries = {
        name: metadata.version(name) for name in ("torch", "transformers", "ray", "pyarrow")
    }
    return {"raypd": raypd.__version__, "python": platform.python_version(), **libraries}


def claim(config: RunConfig, output: str, held: bool = False, calibrated_on: int = -1) -> bool:
    """Write run.json, or check that the folder already belongs to this run.

    Args:
        config: The configuration of the run.
        output: The folder of the run.
        held: Whether the caller holds the lease of the folder. A run of another configuration that
            has committed nothing is then replaced.
        calibrated_on: As in `RunRecord`.

    Returns:
        Whether a run of another configuration was replaced.

    Raises:
        ConfigError: If the folder belongs to another run or cannot be written.
    """
    card = card_of(config.model.model_dump(), config.task.kind)
    record = RunRecord(
        config.fingerprint(), recorded(config), iso(), versions(), card, calibrated_on
    )
    path = storage.join(output, layout.RUN)
    check(config, output)
    try:
        storage.make_folder(output)
        storage.put_new(path, records.encoded(record), private=True)
        if not held:
            return False
        if records.read(RunRecord, path).fingerprint == record.fingerprint:
            return False
        storage.put(path, records.encoded(record), private=True)
        return True
    except OSError as error:
        raise _refusal(error, f"output.path {output}: cannot be written: {error}") from None


def _refusal(error: OSError, message: str) -> Exception:
    """Return a ConfigError for a storage error, unless the storage did not answer."""
    if isinstance(error, storage.Unavailable):
        return error
    if isinstance(error, storage.StorageError):
        return ConfigError(f"output.path: {error}")
    return ConfigError(message)


def recorded(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as JSON with absolute paths, valid in any working folder."""
    tree = config.model_dump(mode="json")
    input_path = tree["input"]["path"]
    if isinstance(input_path, list):
        tree["input"]["path"] = [storage.absolute(path) for path in input_path]
    else:
        tree["input"]["path"] = storage.absolute(input_path)
    task = tree["task"]
    examples = task.get("examples") or {}
    paths = ((task, "template"), (task, "few_shot"), (examples, "path"), (tree["fit"], "labels"))
    for section, key in paths:
        if section.get(key):
            section[key] = storage.absolute(section[key])
    return tree


def check(config: RunConfig, output: str) -> None:
    """Check that a run may use its output folder, without writing anything.

    Raises:
        ConfigError: If the folder contains another run, or cannot be read.
    """
    path = storage.join(output, layout.RUN)
    try:
        if storage.exists(output) and not storage.is_folder(output):
            raise ConfigError(f"output.path {output}: is a file; give a folder")
        record = records.read(RunRecord, path)
    except FileNotFoundError:
        if _has_units(output):
            raise ConfigError(
                f"output.path {output}: has units but no run.json; choose another output.path"
            ) from None
        return
    except RecordError as error:
        raise ConfigError(f"{error}; choose another output.path") from None
    except OSError as error:
        raise _refusal(
            error, f"{path}: cannot be read ({error}); choose another output.path"
        ) from None
    if record.fingerprint == config.fingerprint() or not _has_units(output):
        return
    changed = differences(record.config, config) or [NO_KEY]
    raise ConfigError(
        f"output.path {output}: already holds a run with another configuration "
        f"({', '.join(changed[:_SHOWN_KEYS])} changed; its fingerprint is {record.fingerprint}, "
        f"this one has {config.fingerprint()}). Choose another output.path, or restore that "
        "configuration"
    )


def _has_units(output: str) -> bool:
    """Return whether a run has committed units."""
    if next(storage.walk(storage.join(output, layout.UNITS)), None) is not None:
        return True
    return storage.exists(storage.join(output, layout.COMPACTION))


def differences(old: dict[str, Any], config: RunConfig) -> list[str]:
    """List the keys of the fingerprint that have another value in an earlier configuration.

    Args:
        old: The earlier configuration, as `recorded` returned it.
        config: The configuration to compare it with.

    Returns:
        Dotted keys; none if only raypd itself or a file that prompts come from has changed.
    """
    ignored_keys = config.idle_keys()
    # A configuration from a version with other keys is compared unchanged.
    with contextlib.suppress(ValueError):
        old_config = RunConfig.model_validate(old)
        old = old_config.model_dump(mode="json")
        ignored_keys = ignored_keys & old_config.idle_keys()
    return _differing(old, recorded(config), ignored_keys)


def _differing(old: Any, new: Any, ignored_keys: set[str], key: str = "") -> list[str]:
    if key in ignored_keys:
        return []
    if not isinstance(old, dict) or not isinstance(new, dict):
        return [] if old == new else [key]
    changed = []
    for name in dict.fromkeys([*old, *new]):
        dotted = f"{key}.{name}" if key else str(name)
        changed += _differing(old.get(name), new.get(name), ignored_keys, dotted)
    return changed


def make(
    config: RunConfig,
    output: str,
    units_planned: int,
    units: UnitTotals,
    unreadable: Unreadable,
    cost: RunCost | None,
    left_out: Sequence[LeftOutFiles] = (),
) -> Manifest:
    """Add up the committed units and the sessions of a run.

    Args:
        config: The configuration of the run.
        output: The folder of the run.
        units_planned: Number of units in the plan.
        units: Totals of all committed units.
        unreadable: The units that cannot be read from the input.
        cost: The bills of all sessions together; None if no ledger ran.
        left_out: Files of the input that are not read.
    """
    sessions = []
    for session in read.sessions([output]):
        committed = units.sessions.get(session.id, SessionUnits())
        sessions.append(_session_totals(session, committed))
    documents = units.total("documents")
    seconds = sum(session.seconds for session in sessions)
    return Manifest(
        fingerprint=config.fingerprint(),
        fake=config.model.is_fake,
        documents=documents,
        ok=units.total("ok"),
        failed=units.total("failed"),
        truncated=units.total("truncated"),
        reasons=dict(units.reasons.most_common(_REASONS)),
        units=units.total("units"),
        units_planned=units_planned,
        units_unreadable=unreadable.units,
        prefill_tokens=units.tokens("prefill_tokens"),
        shared_tokens=units.tokens("shared_tokens"),
        decode_tokens=units.tokens("decode_tokens"),
        seconds=round(seconds, 3),
        documents_per_second=round(documents / seconds, 3) if seconds else 0.0,
        started=sessions[0].started if sessions else None,
        ended=sessions[-1].ended if sessions else None,
        sessions=sessions,
        unreadable=[*unreadable.files.values()],
        left_out=[*left_out],
        versions=versions(),
        config=config.model_dump(mode="json"),
        output=output,
        cost=cost,
    )


def _session_totals(session: Session, committed: SessionUnits) -> SessionTotals:
    # A session that was killed recorded no end. Its last commit is the best estimate.
    last_commit = committed.last_commit or session.began
    ended = session.ended or last_commit
    seconds = session.seconds or ended - session.began
    return SessionTotals(
        id=session.id,
        started=iso(session.began),
        ended=iso(ended),
        how=session.how or "killed",
        seconds=round(max(0.0, seconds), 3),
        units=committed.units,
        documents=committed.documents,
    )
