"""What a run has left in its folder.

A file that is not there is None; of many, those that are torn are left out.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from raypd import storage
from raypd.errors import RunError
from raypd.run import layout, records
from raypd.run.load import is_nightly

_R = TypeVar("_R")
_T = TypeVar("_T")
_Row = TypeVar("_Row", bound=Mapping[str, Any])


def record(kind: type[_R], *path: str) -> _R | None:
    """The record in a file, None where there is no such file. Raises RunError when it is torn."""
    try:
        return records.read(kind, storage.join(*path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except records.RecordError as error:
        raise RunError(str(error)) from None


def runs(root: str) -> list[str]:
    """The folders of a run: its own, or of a nightly folder those of all nights, the oldest
    first.
    """
    if not is_nightly(root):
        return [root]
    folder = storage.join(root, layout.NIGHTS)
    nights = [storage.join(folder, name) for name in sorted(storage.folders(folder))]
    return [run for night in nights for run in (night, storage.join(night, layout.ADDED))]


def sessions(outputs: Sequence[str]) -> list[records.Session]:
    """The sessions of some runs, the oldest first."""
    intact = []
    for folder in (storage.join(output, layout.SESSIONS) for output in outputs):
        for name in storage.names(folder):
            with contextlib.suppress(records.RecordError, OSError):
                intact.append(records.read(records.Session, storage.join(folder, name)))
    return sorted(intact, key=lambda session: session.began)  # names of one second sort by chance


def bills(outputs: Sequence[str]) -> tuple[list[records.Bill], list[str]]:
    """The bills of all sessions of some runs, the oldest first, and the paths of torn files.

    Raises OSError.
    """
    intact = []
    torn = []
    for folder in (storage.join(output, layout.LEDGER) for output in outputs):
        for path in (
            storage.join(folder, name) for name in storage.names(folder) if name.endswith(".json")
        ):
            try:
                intact.append(records.read(records.Bill, path))
            except records.RecordError:
                torn.append(path)
    return sorted(intact, key=lambda bill: bill.began), torn


def failures(output: str) -> Iterator[tuple[str, str]]:
    """(unit, the last line of its worker) of every unit whose worker has failed, also of those that
    are done since.
    """
    folder = storage.join(output, layout.FAILURES)
    for name in storage.names(folder):
        if name.endswith(".txt"):
            with contextlib.suppress(FileNotFoundError):  # done meanwhile
                text = storage.read(storage.join(folder, name)).decode(errors="replace").strip()
                yield (
                    name.removesuffix(".txt"),
                    text.splitlines()[-1] if text else "its worker left no reason",
                )


def by_document(rows: Iterable[_Row]) -> dict[tuple[str, int], list[_Row]]:
    """(source, row) -> the rows of that document, in order: one with questions or turns has
    several.
    """
    documents: dict[tuple[str, int], list[_Row]] = {}
    for row in rows:
        documents.setdefault((row["source"], row["row"]), []).append(row)
    return documents


def spread(items: Sequence[_T], limit: int) -> list[_T]:
    """At most that many of them, evenly spaced."""
    count = min(limit, len(items))
    return [items[i * len(items) // count] for i in range(count)]
