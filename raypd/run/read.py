"""Read what a run left in its folder.

A missing file is returned as None. Lists leave out files that are damaged.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import raypd.run.layout as layout
import raypd.run.records as records
from raypd import storage
from raypd.errors import RunError
from raypd.run.lease import Session
from raypd.run.reading import ReadingRecord

_Record = TypeVar("_Record")
_Item = TypeVar("_Item")
_Row = TypeVar("_Row", bound=Mapping[str, Any])


def record(kind: type[_Record], *path: str) -> _Record | None:
    """Read a record, or return None if its file does not exist.

    Args:
        kind: The dataclass of the record.
        path: The components of the path, which are joined.

    Raises:
        RunError: If the file is damaged.
    """
    try:
        return records.read(kind, storage.join(*path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except records.RecordError as error:
        raise RunError(str(error)) from None


def runs(root: str) -> list[str]:
    """List the run folders of an output folder.

    A run is its own only run folder. A folder of nightly runs has two for each night, oldest first.
    """
    if not layout.is_nightly(root):
        return [root]
    nights = storage.join(root, layout.NIGHTS)
    folders = []
    for name in sorted(storage.folders(nights)):
        night = storage.join(nights, name)
        folders += [night, storage.join(night, layout.ADDED)]
    return folders


def sessions(outputs: Sequence[str]) -> list[Session]:
    """Read the sessions of some runs, oldest first."""
    intact = []
    for output in outputs:
        folder = storage.join(output, layout.SESSIONS)
        for name in storage.names(folder):
            with contextlib.suppress(records.RecordError, OSError):
                intact.append(records.read(Session, storage.join(folder, name)))
    # File names do not order sessions that began in the same second.
    return sorted(intact, key=lambda session: session.began)


def readings(outputs: Sequence[str], sessions: Sequence[str]) -> list[ReadingRecord]:
    """Read what was read ahead in some sessions, in the order of the sessions.

    Args:
        outputs: The folders of the runs.
        sessions: The ids of the sessions.
    """
    readings = {}
    for output in outputs:
        folder = storage.join(output, layout.READING)
        for name in storage.names(folder):
            with contextlib.suppress(records.RecordError, OSError):
                reading = records.read(ReadingRecord, storage.join(folder, name))
                readings[reading.session] = reading
    return [readings[session] for session in sessions if session in readings]


def failures(output: str) -> Iterator[tuple[str, str]]:
    """Yield each unit that a worker failed on, with the last line that the worker left.

    Units that were committed by a later attempt are included.
    """
    folder = storage.join(output, layout.FAILURES)
    for name in storage.names(folder):
        if not name.endswith(".txt"):
            continue
        try:
            content = storage.read(storage.join(folder, name))
        except FileNotFoundError:  # the unit was committed in the meantime
            continue
        lines = content.decode(errors="replace").strip().splitlines()
        yield name.removesuffix(".txt"), lines[-1] if lines else "its worker left no reason"


def by_document(rows: Iterable[_Row]) -> dict[tuple[str, int], list[_Row]]:
    """Group rows by document, in order.

    A document has several rows if it asks several questions or has several turns.

    Returns:
        The rows by (source, row).
    """
    documents: dict[tuple[str, int], list[_Row]] = {}
    for row in rows:
        documents.setdefault((row["source"], row["row"]), []).append(row)
    return documents


def spread(items: Sequence[_Item], limit: int) -> list[_Item]:
    """Return at most `limit` of the items, evenly spaced."""
    count = min(limit, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def spread_stream(items: Iterable[_Item], limit: int) -> list[_Item]:
    """Return at most `limit` of the items, evenly spaced; few are in memory at a time."""
    held: list[_Item] = []
    step = 1
    for number, item in enumerate(items):
        if number % step == 0:
            held.append(item)
        if len(held) > 2 * limit:
            held = held[::2]
            step *= 2
    return spread(held, limit)
