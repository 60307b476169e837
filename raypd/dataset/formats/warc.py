"""WARC, as crawlers archive the web: a document for each response."""

import codecs
import io
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

import zstandard
from warcio.archiveiterator import ArchiveIterator
from warcio.bufferedreaders import BufferedReader, DecompressingBufferedReader
from warcio.exceptions import ArchiveLoadFailed

from raypd import storage
from raypd.config import ClusterConfig, InputConfig
from raypd.dataset.formats.base import Columns, Fields, Format, SeenColumns, SourceRow, Split
from raypd.dataset.formats.documents import ID, MARKUP, TEXT, DocumentFormat, Text, decode
from raypd.dataset.formats.html import Html, visible_text
from raypd.dataset.formats.ranges import cut_rows, even_boundaries, parts_between
from raypd.dataset.jsonl import BLANK_LIMIT
from raypd.errors import InputError
from raypd.run import Part

# Returns the format of a media type such as "text/html"; None if it is not a document.
FormatOfType = Callable[[str], DocumentFormat | None]
_COLUMNS = [ID, TEXT, "url", "date", "status", "content_type"]
# A revisit repeats an earlier response; requests and metadata are not documents.
_DOCUMENT_TYPES = ("response", "resource", "conversion")
_MAX_HEADER_BYTES = 1 << 20
# Characters of a warcio error that a message shows.
_MAX_REASON = 300
# Bytes of a body that show whether it is text.
_TEXT_BYTES = 1024
_ZSTD = "zstd"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_CHARSET = re.compile(r"""charset\s*=\s*["']?([\w.:-]+)""", re.IGNORECASE)


class Warc(Format):
    """WARC, plain or with a gzip member for each record.

    The range of a part is in stored bytes, and the part has the records that begin in it.

    Args:
        format_of: Finds the format of a response by its media type.
    """

    reads_as = "a document for each response"
    title = "WARC"
    is_document = True

    def __init__(self, format_of: FormatOfType) -> None:
        self._format_of = format_of

    def split(
        self, part: Part, source: InputConfig, cluster: ClusterConfig, columns: Columns
    ) -> Split:
        offsets = [offset for offset, _ in _documents(part, 0)]
        ends = [*offsets[1:], part.size]
        sizes = [(1, end - offset) for offset, end in zip(offsets, ends, strict=False)]
        bounds = cut_rows(sizes, cluster.unit_documents, cluster.unit_bytes)
        return Split(_parts(part, offsets, bounds), SeenColumns(_COLUMNS, is_schema=True))

    def read(self, part: Part, source: InputConfig, columns: Columns) -> Iterator[SourceRow]:
        limit = source.max_document_bytes * MARKUP
        for offset, record in _documents(part, part.start):
            if offset >= part.end:
                return
            headers = record.rec_headers
            fields: Fields = {
                ID: headers.get_header("WARC-Target-URI") or headers.get_header("WARC-Record-ID"),
                "url": headers.get_header("WARC-Target-URI"),
                "date": headers.get_header("WARC-Date"),
                "status": _status(record),
                "content_type": _content_type(record),
            }
            payload: bytes | ValueError
            try:
                payload = _payload(record, limit)
            except ValueError as error:
                payload = error
            except Exception as error:  # whatever the decoders of a damaged response raise
                payload = ValueError(f"the response cannot be decoded: {error}")
            read_fields = partial(self._fields, fields, payload, part, source)
            yield SourceRow(offset, f"record at byte {offset}", read_fields)

    def can_enter(self, part: Part) -> bool:
        # Each part begins at a record, which has its own gzip member.
        return True

    def cut(self, part: Part, source: InputConfig, pieces: int) -> list[Part]:
        offsets = []
        for offset, _ in _documents(part, part.start):
            if offset >= part.end:
                break
            offsets.append(offset)
        boundaries = even_boundaries(part, pieces)
        for number in range(1, pieces):
            offset = offsets[boundaries[number].documents]
            boundaries[number] = boundaries[number]._replace(start=offset)
        return parts_between(part, boundaries)

    def _fields(
        self, fields: Fields, payload: bytes | ValueError, part: Part, source: InputConfig
    ) -> Fields:
        """Return the fields of a response with its text.

        Raises:
            ValueError: It has no text that can be read; the text says why.
        """
        if isinstance(payload, ValueError):
            raise payload
        status = fields["status"]
        if status is not None and not 200 <= status < 300:
            raise ValueError(f"the server answered with HTTP status {status}")
        limit = source.max_document_bytes * MARKUP
        if len(payload) > limit:
            raise ValueError(
                f"the response has more than {limit} bytes; input.max_document_bytes is "
                f"{source.max_document_bytes}"
            )
        media_type, _, parameters = (fields["content_type"] or "").partition(";")
        format = self._format_of(media_type.strip().lower())
        if format is None:
            raise ValueError(
                f"a response of type {media_type.strip() or 'unknown'} is not a document"
            )
        charset = _charset(parameters)
        text: str
        if charset is not None and isinstance(format, Html):
            text = visible_text(decode(payload, charset, "replace"))
        elif charset is not None and isinstance(format, Text):
            text = decode(payload, charset, "replace")
        else:
            return {**fields, **format.content(payload, part, source)}
        return {**fields, TEXT: text}


def _parts(part: Part, offsets: list[int], bounds: Iterable[tuple[int, int]]) -> Iterator[Part]:
    """Yield a part for each range of documents.

    Args:
        part: The whole file.
        offsets: The first byte of each document's record.
        bounds: Ranges of the documents' numbers.
    """
    for first, end in bounds:
        start_byte = offsets[first]
        end_byte = offsets[end] if end < len(offsets) else part.size
        yield replace(
            part, start=start_byte, end=end_byte, expected=end - first, bytes=end_byte - start_byte
        )


def _documents(part: Part, offset: int) -> Iterator[tuple[int, Any]]:
    """Yield the records that are documents, each with the offset of its first stored byte.

    Args:
        part: The file.
        offset: The offset to start from, at which a record begins.

    Raises:
        InputError: The file is not a WARC file, or is damaged.
        OSError: The file cannot be read.
    """
    if part.compression == "zst":
        raise InputError(
            "WARC in zstd is not supported: unpack it, then compress it with `warcio recompress`"
        )
    with storage.open_read(part.path, offset, part.version) as raw:
        iterator = ArchiveIterator(_StoredBytes(raw, offset))
        iterator.reader = _BoundedHeaders(iterator.fh)
        try:
            for record in iterator:
                if record.rec_type in _DOCUMENT_TYPES:
                    yield iterator.offset, record
        except (OSError, MemoryError):
            raise
        except Exception as error:  # a damaged file makes warcio fail in many ways
            # Some messages are whole pages that begin with an empty line.
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            if len(reason) > _MAX_REASON:
                reason = f"{reason[:_MAX_REASON]}..."
            raise InputError(
                f"not a WARC, or damaged at byte {max(0, iterator.offset)}: {reason}"
            ) from None


class _StoredBytes(io.RawIOBase):
    """The bytes of a file from an offset on; `tell` counts from the beginning of the file."""

    def __init__(self, raw: BinaryIO, offset: int) -> None:
        self._raw = raw
        self._offset = offset

    def read(self, size: int = -1) -> bytes:
        data = self._raw.read(size)
        self._offset += len(data)
        return data

    def tell(self) -> int:
        return self._offset


class _BoundedHeaders(DecompressingBufferedReader):
    """Refuses endless headers, which a compressed file can store in a thousandth of their size."""

    def __init__(self, stream: io.RawIOBase) -> None:
        super().__init__(stream)
        # Bytes since the last blank line, and bytes of blank lines in a row.
        self._header_bytes = 0
        self._blank_bytes = 0

    def readline(self, length: int | None = None) -> bytes:
        line: bytes = super().readline(length or _MAX_HEADER_BYTES)
        if line.strip():
            self._header_bytes += len(line)
            self._blank_bytes = 0
        else:
            self._header_bytes = 0
            self._blank_bytes += len(line)
        if self._header_bytes > _MAX_HEADER_BYTES:
            raise ArchiveLoadFailed(f"headers of more than {_MAX_HEADER_BYTES} bytes")
        if self._blank_bytes > BLANK_LIMIT:
            raise ArchiveLoadFailed(f"more than {BLANK_LIMIT} bytes of blank lines in a row")
        return line


def _payload(record: Any, limit: int) -> bytes:
    """Return the body of a response as a browser would decode it, up to a byte above the limit.

    Raises:
        ValueError: Its Content-Encoding is not supported, or the file ends within it.
    """
    encodings = _content_encodings(record)
    known = [*BufferedReader.get_supported_decompressors(), _ZSTD]
    if len(encodings) > 1 or any(encoding not in known for encoding in encodings):
        payload = _raw_payload(record, limit)
        # Some crawlers unpack a body and keep the header.
        if not _is_text(payload):
            raise ValueError(
                f"the response has the Content-Encoding {', '.join(encodings)}, which is not read"
            )
    elif encodings == [_ZSTD]:
        payload = _raw_payload(record, limit)
        if payload.startswith(_ZSTD_MAGIC):
            with zstandard.ZstdDecompressor().stream_reader(payload) as stream:
                payload = stream.read(limit + 1)
    else:
        payload = bytes(record.content_stream().read(limit + 1))
    if len(payload) <= limit:
        # Decoders do not read everything: bytes after a gzip member are left, for instance.
        while record.raw_stream.read(_TEXT_BYTES):
            pass
        missing = getattr(record.raw_stream, "limit", 0)
        if missing > 0:
            raise ValueError(f"the file ends within the record: {missing} of its bytes are missing")
    return payload


def _content_encodings(record: Any) -> list[str]:
    """Return the encodings of a response in lower case, and rewrite its headers in the
    form that warcio reads.
    """
    headers = record.http_headers
    if headers is None:
        return []
    transfer = headers.get_header("Transfer-Encoding")
    if transfer:
        headers.replace_header("Transfer-Encoding", transfer.strip().lower())
    written = headers.get_header("Content-Encoding") or ""
    encodings = []
    for name in written.lower().split(","):
        encoding = name.strip().removeprefix("x-")
        if encoding not in ("", "identity"):
            encodings.append(encoding)
    if len(encodings) == 1:
        headers.replace_header("Content-Encoding", encodings[0])
    return encodings


def _raw_payload(record: Any, limit: int) -> bytes:
    """Return the body of a response as it was sent, without its chunks."""
    record.http_headers.remove_header("Content-Encoding")
    return bytes(record.content_stream().read(limit + 1))


def _is_text(data: bytes) -> bool:
    """Return whether bytes are text in UTF-8, which compressed data never is."""
    head = data[:_TEXT_BYTES].decode("utf-8", "ignore")
    # A character may be cut at the end of the head.
    is_utf8 = len(head.encode()) >= len(data[:_TEXT_BYTES]) - 3
    return is_utf8 and all(char.isprintable() or char.isspace() for char in head)


def _status(record: Any) -> int | None:
    if record.http_headers is None:
        return None
    code = record.http_headers.get_statuscode()
    return int(code) if code.isdecimal() else None


def _content_type(record: Any) -> str | None:
    headers = record.http_headers or record.rec_headers
    content_type: str | None = headers.get_header("Content-Type")
    return content_type


def _charset(parameters: str) -> str | None:
    """Return the charset that the parameters of a media type name, if Python knows it."""
    match = _CHARSET.search(parameters)
    if match is None:
        return None
    try:
        return codecs.lookup(match[1]).name
    except LookupError:
        return None
