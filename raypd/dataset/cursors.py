"""Sequential reading, unit by unit, of files that cannot be read from the middle.

To get to a later row, a compressed stream, a row group, a JSON array and a workbook have to be read
from the beginning. The units of such a file are usually consecutive, so each one continues where
the previous one ended, and every byte is read once instead of once per unit.
"""

import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import replace
from itertools import islice

import pyarrow as pa

from raypd.config import InputConfig
from raypd.dataset.formats import FORMATS, SourceRow
from raypd.errors import InputError
from raypd.run import Part

# Files that stay open between two units. An open row group keeps its compressed columns in memory.
_MAX_OPEN = 4
_MAX_LOCKS = 1024
# Skipped rows that are kept, because units do not start exactly in order.
_KEPT_ROWS = 4096


class _Cursor:
    """An open file, which is read from a part on.

    Args:
        part: The first part to read.
        source: Section `input`.
        columns: The columns that are needed.
    """

    def __init__(self, part: Part, source: InputConfig, columns: set[str | None]) -> None:
        self._format = FORMATS[part.format]
        self._rows = iter(self._format.read(replace(part, end=sys.maxsize), source, columns))
        self._position = part.start  # as `Part.start` counts
        self._kept: dict[int, SourceRow] = {}  # by their numbers in the file

    def read(self, part: Part) -> list[SourceRow] | None:
        """Return the rows of a part, or None if the file has to be opened there."""
        gap = part.start - self._position
        if not self._format.counts_rows(part):
            if gap:
                return None
        elif gap < 0:
            return self._take_kept(part)
        elif (gap > _KEPT_ROWS and self._format.enters_groups) or not self._pass_over(gap):
            return None
        rows = list(islice(self._rows, part.expected))
        self._position = part.end
        return rows

    def _pass_over(self, count: int) -> bool:
        """Skip rows, and keep them, because they may belong to units that come later.

        Returns:
            False if a row cannot be read. The rows after it may be readable.
        """
        try:
            for number, row in enumerate(islice(self._rows, count), self._position):
                self._kept[number] = row
                if len(self._kept) > _KEPT_ROWS:
                    del self._kept[next(iter(self._kept))]
        except (InputError, OSError, ValueError, pa.ArrowException):
            return False
        return True

    def _take_kept(self, part: Part) -> list[SourceRow] | None:
        numbers = range(part.start, part.end)
        if any(number not in self._kept for number in numbers):
            return None
        return [self._kept.pop(number) for number in numbers]

    def close(self) -> None:
        close = getattr(self._rows, "close", None)
        if close is not None:
            close()


class Cursors:
    """The open files of a process, which its threads share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: OrderedDict[Hashable, _Cursor] = OrderedDict()
        # One thread at a time reads a file; the next one then continues.
        self._file_locks: OrderedDict[Hashable, threading.Lock] = OrderedDict()

    def rows(self, part: Part, source: InputConfig, columns: set[str | None]) -> list[SourceRow]:
        """Return the rows of a part whose documents are counted; raises as `Format.read` does.

        Args:
            part: A part for which `applies` returns True.
            source: Section `input`.
            columns: The columns that are needed.
        """
        key = (part.path, part.version, part.format, frozenset(columns), source.model_dump_json())
        with self._file_lock(key):
            with self._lock:
                cursor = self._idle.pop(key, None)
            part_rows = None
            if cursor is not None:
                part_rows = _read_or_close(cursor, part)
            if cursor is None or part_rows is None:
                cursor = _Cursor(part, source, columns)
                part_rows = _read_or_close(cursor, part)
            self._put(key, cursor)
        return part_rows or []

    def _file_lock(self, key: Hashable) -> threading.Lock:
        with self._lock:
            lock = self._file_locks.pop(key, None) or threading.Lock()
            self._file_locks[key] = lock
            while len(self._file_locks) > _MAX_LOCKS:
                self._file_locks.popitem(last=False)
            return lock

    def _put(self, key: Hashable, cursor: _Cursor) -> None:
        with self._lock:
            self._idle[key] = cursor
            oldest = None
            if len(self._idle) > _MAX_OPEN:
                _, oldest = self._idle.popitem(last=False)
        if oldest is not None:
            oldest.close()

    def close(self) -> None:
        """Close all files that no thread is reading."""
        with self._lock:
            cursors = list(self._idle.values())
            self._idle.clear()
        for cursor in cursors:
            cursor.close()


def _read_or_close(cursor: _Cursor, part: Part) -> list[SourceRow] | None:
    """Return the result of `_Cursor.read`; close the file if it returns None or raises an error."""
    rows = None
    try:
        rows = cursor.read(part)
    finally:
        if rows is None:
            cursor.close()
    return rows


def applies(part: Part) -> bool:
    """Return whether a part is one of several of a file that cannot be read from the middle."""
    is_whole = part.bytes >= part.size
    return part.exact and not is_whole and not FORMATS[part.format].can_enter(part)


# Shared by all threads of the process.
default = Cursors()
