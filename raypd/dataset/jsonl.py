"""Lines of JSONL files, plain or compressed: the one place that counts them, for planning and for
reading alike.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, cast

import pyarrow as pa
import zstandard

from raypd import storage
from raypd.errors import InputError

_SKIP = 1 << 20  # bytes at a time of a line that is passed over
_FRAME_HEADER_BYTES = 18  # the most that the header of a zstd frame has
LARGE_WINDOW = 1 << 27  # bytes; Arrow reads no frame with a larger window
_MAX_WINDOW = 1 << 31  # bytes: `zstd --long=31`
# Compressed bytes that are decompressed at once: few of them may stand for very many.
_COMPRESSED_BYTES = 1 << 12
# Of a file that is cut or damaged, or cannot be reached.
UNREADABLE = (EOFError, zlib.error, OSError)
BOM = b"\xef\xbb\xbf"
# Bytes of blank lines in a row in a compressed file, which stores a thousandth of them. It is not a
# limit of time, because a slow store must not make a file unreadable.
BLANK_LIMIT = 8 << 20


def line_limit(max_document_bytes: int) -> int:
    """Bytes of a line, or of a record of CSV, beyond which it is not parsed: room for escapes and
    for other columns.
    """
    return 4 * max_document_bytes + 65536


class Line(NamedTuple):
    """A line that is not blank."""

    number: int  # from 1, with the blank ones
    offset: int  # of its first byte in the (uncompressed) file
    length: int  # bytes
    data: bytes | None  # None above the limit


def open_lines(
    path: str, compression: str | None, offset: int = 0, version: str | None = None
) -> BinaryIO:
    """Uncompressed bytes of a file; `offset`: if uncompressed.

    Raises storage.Changed, OSError, also at later reads.
    """
    raw = storage.open_read(path, offset, version)
    if compression == "gz":
        return cast(BinaryIO, io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 20))
    if compression == "zst" and window_bytes(raw) > LARGE_WINDOW:
        return cast(BinaryIO, io.BufferedReader(_LargeWindowFrames(raw), 1 << 20))
    if compression == "zst":
        frames = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
        return cast(BinaryIO, io.BufferedReader(frames, 1 << 20))
    return raw


def window_bytes(raw: BinaryIO) -> int:
    """Return the memory that the zstd frame at the beginning of a file needs for its window.

    Args:
        raw: The compressed file, at its beginning, where it stays.

    Returns:
        Bytes; 0 where no frame begins there.
    """
    head = raw.peek(_FRAME_HEADER_BYTES)[:_FRAME_HEADER_BYTES]  # type: ignore[attr-defined]
    try:
        return int(zstandard.get_frame_parameters(head).window_size)
    except zstandard.ZstdError:
        return 0


class _LargeWindowFrames(io.RawIOBase):
    """The uncompressed bytes of zstd frames whose window is larger than Arrow allows."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._compressed = b""
        self._data = memoryview(b"")
        self._frame = self._new_frame()
        self._begun = False  # whether bytes were given to the frame

    @staticmethod
    def _new_frame() -> Any:
        return zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._data:
            if not self._compressed:
                self._compressed = self._raw.read(_COMPRESSED_BYTES)
            if not self._compressed:
                if self._begun:
                    raise EOFError("the file ends within a zstd frame")
                return 0
            self._decompress()
        count = min(len(buffer), len(self._data))
        buffer[:count] = self._data[:count]
        self._data = self._data[count:]
        return count

    def _decompress(self) -> None:
        try:
            data = self._frame.decompress(self._compressed)
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from None
        self._data = memoryview(data)
        self._begun = True
        self._compressed = b""
        if self._frame.eof:
            self._compressed = self._frame.unused_data
            self._frame = self._new_frame()
            self._begun = False

    def close(self) -> None:
        self._raw.close()
        super().close()


def lines_of_range(file: BinaryIO, limit: int, start: int, end: int) -> Iterator[Line]:
    """The lines whose first byte lies in [start, end); numbers count from the first.

    The file is opened at max(0, start - 1): a line begins at `start` where the byte before it ends
    one.
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
    yield from lines(file, limit, offset, end)


def packed_lines(file: BinaryIO, limit: int) -> Iterator[Line]:
    """Yield `lines` of a compressed file.

    Raises:
        InputError: More than BLANK_LIMIT bytes of blank lines follow on each other.
    """
    return lines(file, limit, blank_limit=BLANK_LIMIT)


def too_many_blanks(blank_limit: int) -> InputError:
    return InputError(f"more than {blank_limit} bytes of blank lines without a document")


def lines(
    file: BinaryIO,
    limit: int,
    offset: int = 0,
    end: int | None = None,
    blank_limit: int | None = None,
) -> Iterator[Line]:
    """Lines that are not blank and begin before byte `end`; above `limit` bytes without text, so
    memory is bounded.

    Raises:
        InputError: More than `blank_limit` bytes of blank lines follow on each other.
    """
    number = 1
    blank_bytes = 0
    while (end is None or offset < end) and (data := file.readline(limit + 2)):
        first, length = data, len(data)
        blank = not (data.removeprefix(BOM) if offset == 0 else data).strip()
        while not data.endswith(b"\n") and (data := file.readline(_SKIP)):
            length += len(data)
            blank = blank and not data.strip()
        if blank:
            blank_bytes += length
            if blank_limit is not None and blank_bytes > blank_limit:
                raise too_many_blanks(blank_limit)
        else:
            blank_bytes = 0
            complete = length == len(first) and len(first.rstrip(b"\r\n")) <= limit
            yield Line(number, offset, length, first if complete else None)
        offset += length
        number += 1
