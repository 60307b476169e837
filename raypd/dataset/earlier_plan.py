"""The plan of an earlier session, compared with the input as it is now.

The listing is in a small database on this machine's disk, so that memory does not grow with the
number of files. It is SQLite, because the files of the earlier plan are looked up by name, one at a
time: DuckDB, which compares whole tables in `verify`, takes 80 times as long for that.
"""

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import replace

from raypd import storage
from raypd.dataset.listing import InputObject
from raypd.dataset.plan import Plan
from raypd.run import Part, Unit, temporary_space

_MAX_EXAMPLES = 5  # names of files that are gone or replaced, in a message
_COLUMNS = ", ".join(InputObject._fields)


class Listing:
    """The files of the input as they are now, by name.

    Args:
        files: All files of the input.
    """

    def __init__(self, files: Iterable[InputObject]) -> None:
        self._database = sqlite3.connect("")  # a file that SQLite removes itself
        self._database.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -32768;"
            "CREATE TABLE now (number INTEGER PRIMARY KEY, kept INTEGER NOT NULL DEFAULT "
            f"0, {_COLUMNS});"
        )
        digest = hashlib.sha256()
        with temporary_space(sqlite3.OperationalError):
            self._database.executemany(
                f"INSERT INTO now ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)",
                add_to_digest(files, digest),
            )
            self._database.execute("CREATE UNIQUE INDEX by_name ON now (name)")
        # If the digest is the same, no file has changed.
        self.digest = digest.hexdigest()
        self.objects: int = self._database.execute("SELECT count(*) FROM now").fetchone()[0]
        # The parts of a file are consecutive, so the last result is often asked for again.
        self._last_name: str | None = None
        self._last_object: InputObject | None = None
        self._changed_files = 0
        self._examples: list[str] = []

    def close(self) -> None:
        self._database.close()

    def find(self, part: Part) -> InputObject | None:
        """Return the file of a part as it is now, or None if it is gone or was replaced."""
        if part.name == self._last_name:
            return self._last_object
        row = self._database.execute(
            f"SELECT {_COLUMNS} FROM now WHERE name = ?", (part.name,)
        ).fetchone()
        self._last_name = part.name
        self._last_object = None
        if row is None:
            self._note_change(f"{part.name} is gone")
        elif _is_same(part, InputObject(*row)):
            self._last_object = InputObject(*row)
        else:
            self._note_change(f"{part.name} was replaced")
        return self._last_object

    def _note_change(self, description: str) -> None:
        self._changed_files += 1
        if len(self._examples) < _MAX_EXAMPLES:
            self._examples.append(description)

    def changes(self) -> str:
        """Return a description of the files that were looked up but are gone or were replaced."""
        text = ", ".join(self._examples)
        if self._changed_files > _MAX_EXAMPLES:
            text += f", and {self._changed_files - _MAX_EXAMPLES} more"
        return text

    def keep(self, name: str) -> None:
        """Mark a file whose units of the earlier plan are kept."""
        with temporary_space(sqlite3.OperationalError):
            self._database.execute("UPDATE now SET kept = 1 WHERE name = ?", (name,))

    def remaining(self) -> Iterator[InputObject]:
        """Yield the files that are not marked, in the order of the input."""
        query = f"SELECT {_COLUMNS} FROM now WHERE kept = 0 ORDER BY number"
        for row in self._database.execute(query):
            yield InputObject(*row)


def _is_same(part: Part, item: InputObject) -> bool:
    """Return whether a part was planned from this version of its file."""
    if part.size != item.size:
        return False
    if part.stamp == item.stamp or storage.is_remote(item.path):
        return part.stamp == item.stamp
    # A local file that was copied or touched has another stamp but may have the same content.
    try:
        return part.version == storage.version(item.path)
    except OSError as error:
        outage = storage.outage(error, item.path)
        if outage is not None:
            raise outage from None
        # Planning inspects the file and reports what is wrong.
        return False


def add_to_digest(files: Iterable[InputObject], digest: "hashlib._Hash") -> Iterator[InputObject]:
    """Yield the files, each after everything known about it was added to the digest."""
    for item in files:
        digest.update("\0".join(map(str, item)).encode() + b"\n")
        yield item


def unchanged_units(plan: Plan, listing: Listing, alone: set[str]) -> Iterator[Unit]:
    """Yield the units of an earlier plan whose files are as they were, and mark these files.

    Units that cannot be read are planned again.

    Args:
        plan: The earlier plan.
        listing: The input as it is now.
        alone: Names of files that must not share a unit; units in which they do are left out.
    """
    last_kept: str | None = None
    for unit in plan.all():
        files = [listing.find(part) for part in unit.parts]
        is_shared = len(unit.parts) > 1 and any(part.name in alone for part in unit.parts)
        if unit.damaged is not None or is_shared:
            continue
        # The input's folder may have moved since the earlier session.
        parts = []
        for part, item in zip(unit.parts, files, strict=True):
            if item is not None:
                parts.append(replace(part, path=item.path, stamp=item.stamp))
        if len(parts) < len(unit.parts):
            continue
        for part in parts:
            if part.name != last_kept:
                listing.keep(part.name)
            last_kept = part.name
        yield Unit(unit.id, tuple(parts))
