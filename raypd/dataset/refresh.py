"""A stored plan and the input as it is now: units of unchanged objects are kept, all else is to be planned. The listing
lies in a small database on this machine's disk, so that memory does not grow with the number of objects."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from raypd import storage
from raypd.dataset.listing import InputObject
from raypd.dataset.plan import Plan
from raypd.run.unit import Part, Unit

_EXAMPLES = 5
_COLUMNS = ", ".join(InputObject._fields)


class Listing:
    """The input's objects of now, by name."""

    def __init__(self, objects: Iterable[InputObject]) -> None:
        self._base = sqlite3.connect("")  # a file that SQLite removes itself
        self._base.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -32768;"
            f"CREATE TABLE now (number INTEGER PRIMARY KEY, kept INTEGER NOT NULL DEFAULT 0, {_COLUMNS});"
        )
        digest = hashlib.sha256()
        self._base.executemany(f"INSERT INTO now ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", digested(objects, digest))
        self._base.execute("CREATE UNIQUE INDEX by_name ON now (name)")
        self.digest = digest.hexdigest()  # of all that is known of each: with the same one nothing has changed
        self.objects: int = self._base.execute("SELECT count(*) FROM now").fetchone()[0]
        self._last: tuple[str, InputObject | None] | None = None
        self._changed, self._examples = 0, list[str]()

    def close(self) -> None:
        self._base.close()

    def find(self, part: Part) -> InputObject | None:
        """The object of a part as it is now, or None where it is gone or another."""
        if self._last is None or self._last[0] != part.name:  # an object's parts follow on each other
            row = self._base.execute(f"SELECT {_COLUMNS} FROM now WHERE name = ?", (part.name,)).fetchone()
            item = InputObject(*row) if row is not None else None
            same = item is not None and _same(part, item)
            if not same:
                self._changed += 1
                if self._changed <= _EXAMPLES:
                    self._examples.append(f"{part.name} {'is gone' if item is None else 'was replaced'}")
            self._last = part.name, item if same else None
        return self._last[1]

    def changes(self) -> str:
        """The objects that were looked for and are gone or others: the first of them, and how many more."""
        remainder = f", and {self._changed - _EXAMPLES} more" if self._changed > _EXAMPLES else ""
        return ", ".join(self._examples) + remainder

    def keep(self, name: str) -> None:
        self._base.execute("UPDATE now SET kept = 1 WHERE name = ?", (name,))

    def left(self) -> Iterator[InputObject]:
        """The objects that are not marked, in the order of the input."""
        for row in self._base.execute(f"SELECT {_COLUMNS} FROM now WHERE kept = 0 ORDER BY number"):
            yield InputObject(*row)


def _same(part: Part, item: InputObject) -> bool:
    if part.size != item.size:
        return False
    if part.stamp == item.stamp or storage.is_remote(item.path):
        return part.stamp == item.stamp
    try:  # a copied or touched local file has another stamp, and may be the same all the same
        return part.version == storage.version(item.path)
    except OSError as error:
        if outage := storage.outage(error, item.path):
            raise outage from None
        return False  # looking into it tells why


def digested(objects: Iterable[InputObject], digest: hashlib._Hash) -> Iterator[InputObject]:
    """The objects, each added to the digest."""
    for item in objects:
        digest.update("\0".join(map(str, item)).encode() + b"\n")
        yield item


def kept(before: Plan, now: Listing, alone: set[str]) -> Iterator[Unit]:
    """The units whose objects are all as they were, which it marks; no damaged ones, nor shared ones of `alone`."""
    keep = lru_cache(1)(now.keep)  # once an object, whose parts follow on each other
    for unit in before.all():
        pairs = [(part, now.find(part)) for part in unit.parts]
        shared = len(unit.parts) > 1 and not alone.isdisjoint(part.name for part in unit.parts)
        if unit.damaged is not None or shared or any(item is None for _, item in pairs):
            continue
        for part in unit.parts:
            keep(part.name)
        # The folder of the input may have another place than in the last session.
        yield Unit(unit.id, tuple(replace(part, path=item.path, stamp=item.stamp) for part, item in pairs if item))
