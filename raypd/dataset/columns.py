"""Whether columns of the configuration exist: in Parquet schemas, CSV headers, first lines of JSONL, or paths."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raypd.config import RunConfig
from raypd.errors import did_you_mean

_SHOWN = 20


@dataclass
class SeenColumns:
    """The columns of an object's schema or first lines, and of its path."""

    names: list[str]
    lines: int = 0
    objects: int = 0  # lines that are JSON objects
    schema: bool = False  # whether `names` are all that it has


def columns_of(lines: Iterable[bytes]) -> SeenColumns:
    """The columns of lines of JSONL."""
    columns = SeenColumns([])
    names: set[str] = set()
    for data in lines:
        columns.lines += 1
        try:
            row = json.loads(data.removeprefix(b"\xef\xbb\xbf"))
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            columns.objects += 1
            names.update(row)
    columns.names = sorted(names)
    return columns


class Columns:
    """The columns of a configuration, looked for in one object after the other."""

    def __init__(self, config: RunConfig) -> None:
        self.wanted = config.wanted_columns()
        # An object without any of these has nothing to read.
        self.content = {k: n for k, n in self.wanted.items() if k not in ("input.id_column", "input.category_column")}
        self._seen: set[str] = set()
        self._first: tuple[str, list[str]] | None = None  # a JSONL object that was looked into, and its columns
        self._objects = 0

    def lacks(self, columns: SeenColumns) -> str | None:
        """Why an object cannot be read: a column that a schema lacks, or all text columns of its lines."""
        if columns.schema:
            missing = [(key, name) for key, name in self.wanted.items() if name not in columns.names]
        else:
            nothing = columns.objects and not set(columns.names).intersection(self.content.values())
            missing = list(self.content.items()) if nothing else []
        return self._missing(*missing[0], columns.names) if missing else None

    def note(self, name: str, columns: SeenColumns) -> None:
        """Counts the lines of a JSONL object for `nowhere`."""
        if columns.lines:
            self._first = self._first or (name, columns.names[: 4 * _SHOWN])
            self._objects += columns.objects
            self._seen |= set(self.wanted.values()).intersection(columns.names)

    def nowhere(self) -> str | None:
        """After the last object: what no line of any JSONL object had; None when all is there."""
        if self._first is None:
            return None
        name, names = self._first
        if not self._objects:
            return f"{name}: none of the first lines is a JSON object; is it JSON Lines?"
        for key, column in self.wanted.items():
            if column not in self._seen:
                return f"{name}: {self._missing(key, column, names)}"
        return None

    @staticmethod
    def _missing(key: str, name: str, present: Sequence[str]) -> str:
        hint = did_you_mean(name, present)
        shown = ", ".join(present[:_SHOWN]) + (", ..." if len(present) > _SHOWN else "")
        extra = {
            "input.id_column": "; input.id_column=null numbers the documents",
            "input.category_column": "; input.category_column=null with input.category gives all the same",
        }.get(key, "")
        return f"no column {name!r} ({key}): {' '.join(filter(None, [hint, f'it has {shown}{extra}']))}"
