"""Lines of files, plain or compressed. Planning and reading both use it, so they count alike."""

import gzip
import io
import shlex
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, cast

import pyarrow as pa
import zstandard

from raypd import storage
from raypd.errors import InputError
from raypd.run import Part

_SKIP = 1 << 20  # bytes of a skipped line that are read at a time
_FRAME_HEADER_BYTES = 18  # the header of a zstd frame is no longer than this
LARGE_WINDOW = 1 << 27  # bytes; Arrow reads no frame with a larger window
_MAX_WINDOW = 1 << 31  # bytes: `zstd --long=31`
# Compressed bytes that are decompressed at a time: a few of them may expand to very many.
_COMPRESSED_BYTES = 1 << 12
_BUFFER_BYTES = 1 << 20
_LARGE_WINDOW_ERROR = "too much memory"  # in zstd's own message about a window
# Raised for a file that is cut short or damaged, or cannot be reached.
UNREADABLE = (EOFError, zlib.error, OSError)
BOM = b"\xef\xbb\xbf"
# Bytes of consecutive blank lines that a compressed file may have, which it stores in a thousandth
# of their size. It is not a time limit, because slow storage must not make a file unreadable.
BLANK_LIMIT = 8 << 20


def line_limit(max_document_bytes: int) -> int:
    """Return the size in bytes above which a line, or a record of CSV, is not parsed.

    The limit leaves room for escapes and for columns that are not read.
    """
    return 4 * max_document_bytes + 65536


class Line(NamedTuple):
    """A line that is not blank."""

    number: int  # from 1, counting blank lines
    offset: int  # of its first byte in the (uncompressed) file
    length: int  # bytes
    data: bytes | None  # None above the limit


def open_lines(
    path: str, compression: str | None, offset: int = 0, version: str | None = None
) -> BinaryIO:
    """Open a file to read its uncompressed bytes.

    Args:
        path: The file.
        compression: "gz", "zst" or None.
        offset: The byte to start from; 0 for a compressed file.
        version: The only version to read; None reads any version.

    Raises:
        storage.Changed: Here or while reading, if the file is no longer that version.
        OSError: Here or while reading, if the file cannot be read.
    """
    raw = storage.open_read(path, offset, version)
    if compression is None:
        return raw
    stream: Any
    if compression == "gz":
        stream = gzip.GzipFile(fileobj=raw)
    elif window_bytes(raw) > LARGE_WINDOW:
        stream = _LargeWindowFrames(raw)
    else:
        stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
    return cast(BinaryIO, io.BufferedReader(stream, _BUFFER_BYTES))


def window_bytes(raw: BinaryIO) -> int:
    """Return the memory that the zstd frame at the beginning of a file needs for its window.

    Args:
        raw: The compressed file, at its beginning; its position does not change.

    Returns:
        Bytes; 0 if no frame begins there.
    """
    head = raw.peek(_FRAME_HEADER_BYTES)[:_FRAME_HEADER_BYTES]  # type: ignore[attr-defined]
    try:
        return int(zstandard.get_frame_parameters(head).window_size)
    except zstandard.ZstdError:
        return 0


def stream_error(error: Exception, part: Part, line: int) -> Exception:
    """Return what to raise if reading a file fails.

    Args:
        error: What the stream raised, one of UNREADABLE.
        part: The file.
        line: The last line that could be read.

    Returns:
        InputError if the compressed stream is damaged, else the error itself.
    """
    is_of_storage = isinstance(error, OSError) and (
        error.errno is not None or isinstance(error, storage.StorageError)
    )
    if part.compression is None or is_of_storage:
        return error
    reason = "it is damaged or cut short"
    if _LARGE_WINDOW_ERROR in str(error):
        reason = (
            "its window is too large: compress it again, "
            f"zstd -dc --long=31 {shlex.quote(part.path)} | zstd -o NEW.zst"
        )
    return InputError(f"cannot be read as {part.compression} after line {line}: {error}; {reason}")


class _LargeWindowFrames(io.RawIOBase):
    """The uncompressed bytes of zstd frames whose window is larger than Arrow allows."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._compressed = b""
        self._data = memoryview(b"")
        self._frame = self._new_frame()
        self._is_in_frame = False  # whether the frame has received bytes

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
                if self._is_in_frame:
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
        self._is_in_frame = True
        self._compressed = b""
        if self._frame.eof:
            self._compressed = self._frame.unused_data
            self._frame = self._new_frame()
            self._is_in_frame = False

    def close(self) -> None:
        self._raw.close()
        super().close()


def lines_of_range(file: BinaryIO, limit: int, start: int, end: int) -> Iterator[Line]:
    """Yield the lines whose first byte is in a range, numbered from the first of them.

    Args:
        file: Opened at max(0, start - 1), because a line begins at `start` if the byte before it
            ends one.
        limit: Bytes of a line beyond which its text is left out.
        start: First byte of the range.
        end: The offset after the range.
    """
    offset = start
    if start > 0:
        line_start = _next_line_start(file, start - 1, end)
        if line_start is None:
            return
        offset = line_start
    yield from lines(file, limit, offset, end)


def _next_line_start(file: BinaryIO, offset: int, end: int) -> int | None:
    """Read up to the next line break and return the offset after it; None if `end` comes first.

    Args:
        file: Opened at `offset`.
        offset: The byte to start from.
        end: The byte at which to give up.
    """
    while offset < end:
        data = file.readline(min(_SKIP, end - offset))
        if not data:
            return None
        offset += len(data)
        if data.endswith(b"\n"):
            return offset
    return None


def packed_lines(file: BinaryIO, limit: int) -> Iterator[Line]:
    """Yield `lines` of a compressed file.

    Raises:
        InputError: There are more than BLANK_LIMIT bytes of consecutive blank lines.
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
    """Yield the lines that are not blank, in bounded memory.

    Args:
        file: Opened at `offset`.
        limit: Bytes of a line beyond which its text is left out.
        offset: The byte to start from.
        end: Lines that begin here or later are not read; None reads all.
        blank_limit: Bytes of consecutive blank lines that are allowed; None for any number.

    Raises:
        InputError: There are more than `blank_limit` bytes of consecutive blank lines.
    """
    number = 1
    blank_bytes = 0
    while end is None or offset < end:
        head = file.readline(limit + 2)
        if not head:
            return
        length = len(head)
        text = head.removeprefix(BOM) if offset == 0 else head
        is_blank = not text.strip()
        chunk = head
        while not chunk.endswith(b"\n"):
            chunk = file.readline(_SKIP)
            if not chunk:
                break
            length += len(chunk)
            is_blank = is_blank and not chunk.strip()
        if is_blank:
            blank_bytes += length
            if blank_limit is not None and blank_bytes > blank_limit:
                raise too_many_blanks(blank_limit)
        else:
            blank_bytes = 0
            is_complete = length == len(head) and len(head.rstrip(b"\r\n")) <= limit
            yield Line(number, offset, length, head if is_complete else None)
        offset += length
        number += 1
