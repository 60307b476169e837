"""Lines of JSONL files, plain or compressed: the one place that counts them, for planning and for reading alike."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, cast

import zstandard

from raypd import storage

# What a damaged or cut compressed stream raises.
BROKEN_STREAM = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError)


_SKIP = 1 << 20  # bytes at a time of a line that is not wanted
BOM = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """A line that is not blank. `number` counts from 1 and counts blank lines; `data` is None above the limit.

    offset: of its first byte in the (uncompressed) file.
    """

    number: int
    offset: int
    length: int
    data: bytes | None


def open_lines(path: str, compression: str | None, offset: int = 0, version: str | None = None) -> BinaryIO:
    """The uncompressed bytes of a JSONL file; `offset` is for uncompressed files alone.

    Raises storage.Changed where the file is not of this version.
    """
    raw = storage.open_read(path, offset, version)
    if compression == "gz":
        return cast(BinaryIO, io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 20))
    if compression == "zst":
        return cast(BinaryIO, io.BufferedReader(_Zstd(raw), 1 << 20))
    return raw


class _Zstd(io.RawIOBase):
    """A zstd file of any number of frames, which raises where the last one is cut (the library ends silently)."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._inside = False  # between the first byte of a frame and its last
        self._out = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._out:
            data = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._inside = zstandard.ZstdDecompressor().decompressobj(), False
            data = data or self._raw.read(1 << 17)
            if not data:
                if self._inside:
                    raise zstandard.ZstdError("the last frame is cut short")
                return 0
            self._inside = True
            self._out = memoryview(self._frame.decompress(data))
        count = min(len(buffer), len(self._out))
        buffer[:count] = self._out[:count]
        self._out = self._out[count:]
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


def lines(file: BinaryIO, limit: int) -> Iterator[Line]:
    """The lines of a file that are not blank, in memory bounded by `limit` bytes a line."""
    return _lines(file, limit, 1, 0, None)


def lines_of_range(file: BinaryIO, limit: int, start: int, end: int) -> Iterator[Line]:
    """The lines whose first byte lies in [start, end); numbers count from the first of them.

    file: opened at max(0, start - 1), because a line begins at `start` where the byte before it ends one.
    """
    offset = start
    if start > 0:
        offset -= 1
        while offset < end and (data := file.readline(min(_SKIP, end - offset))):
            offset += len(data)
            if data.endswith(b"\n"):
                break
        else:
            return  # no line begins in this range: it lies within one
    yield from _lines(file, limit, 1, offset, end)


def _lines(file: BinaryIO, limit: int, number: int, offset: int, end: int | None) -> Iterator[Line]:
    while (end is None or offset < end) and (data := file.readline(limit + 2)):
        length = len(data)
        whole: bytes | None = data
        blank = not (data.removeprefix(BOM) if offset == 0 else data).strip()
        while not data.endswith(b"\n") and (data := file.readline(_SKIP)):
            length += len(data)
            blank = blank and not data.strip()
            whole = None
        if whole is not None and len(whole.rstrip(b"\r\n")) > limit:
            whole = None
        if not blank:
            yield Line(number, offset, length, whole)
        offset += length
        number += 1
