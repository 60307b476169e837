"""Lines of JSONL files, plain or compressed: the one place that counts them, for planning and for reading alike."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, cast

import zstandard

from raypd.cluster import storage

# What a damaged or cut compressed stream raises.
BROKEN_STREAM = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError)


class Line(NamedTuple):
    """A line that is not blank. `number` counts from 1 and counts blank lines; `data` is None above the limit."""

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


def lines(file: BinaryIO, limit: int, number: int = 1, offset: int = 0) -> Iterator[Line]:
    """The lines of a file that are not blank, in memory bounded by `limit` bytes a line.

    number, offset: of the first line, when the file was opened in its middle.
    """
    while data := file.readline(limit + 2):
        length = len(data)
        whole: bytes | None = data
        blank = not data.strip()
        while not data.endswith(b"\n") and (data := file.readline(1 << 20)):
            length += len(data)
            blank = blank and not data.strip()
            whole = None
        if whole is not None and len(whole.rstrip(b"\r\n")) > limit:
            whole = None
        if not blank:
            yield Line(number, offset, length, whole)
        offset += length
        number += 1
