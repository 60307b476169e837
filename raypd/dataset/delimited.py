"""Records of CSV and TSV files, for both planning and reading, by Python's csv module.

A quoted field may contain line breaks, so reading can begin only at the offsets that planning
recorded.
"""

import csv
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import dropwhile, takewhile
from typing import BinaryIO, NamedTuple

import raypd.dataset.encodings as encodings
from raypd import storage
from raypd.config import InputConfig
from raypd.dataset.jsonl import BLANK_LIMIT, BOM, line_limit, open_lines, too_many_blanks
from raypd.errors import InputError, raised_as
from raypd.run import Part
from raypd.text import counted

DELIMITERS = {"csv": ",", "tsv": "\t"}
_MARKS = ",;\t|"  # delimiters that spreadsheets write
_HEAD_BYTES = 1 << 16  # of a file, from which its line endings are detected
# Excel's own first line, which names the delimiter.
# A spreadsheet program that saved the file again may have padded the line with delimiters.
_SEPARATOR = re.compile(r"""\ufeff?"?sep=([^\w"\r\n])"?[,;\t|]*\r?[\n\r]""", re.IGNORECASE)
# A quoted field, or one whose end is not in the text.
_QUOTED = re.compile(r'"[^"]*(?:"|\Z)')
csv.field_size_limit(sys.maxsize)  # records have their own limit


class DelimitedRecord(NamedTuple):
    """A record that is not blank. Offsets and lengths count bytes of the uncompressed text."""

    offset: int  # of its first byte
    line: int  # on which it begins, from 1
    length: int  # bytes
    fields: list[str]
    error: str | None  # why its fields cannot be trusted


@dataclass
class _Dialect:
    """How a file's bytes become records."""

    encoding: str
    delimiter: str
    line_end: str = "\n"  # or \r, if no line ends in anything else
    declared: bool = False  # whether the file's first line names the delimiter


def with_encoding(part: Part, source: InputConfig) -> Part:
    """Return the part with the encoding of its file, detected if `input.encoding` is auto.

    Planning calls this once for each file, so that every reader decodes the file in the same way.

    Raises:
        InputError: No known encoding fits.
        OSError: The file cannot be read.
    """
    if source.encoding != encodings.AUTO or part.encoding is not None:
        return part
    with open_lines(part.path, part.compression, version=part.version) as file:
        return replace(part, encoding=encodings.detect(file))


def can_seek(part: Part, source: InputConfig) -> bool:
    """Return whether a record can be read without reading everything before it.

    Args:
        part: A planned part, whose encoding is known.
        source: Section `input`.
    """
    return part.compression is None and _has_byte_lines(part.encoding or source.encoding)


def _has_byte_lines(encoding: str) -> bool:
    """Return whether the byte of a line break always means a line break in this encoding, unlike in
    UTF-16 and EBCDIC.
    """
    return "\n".encode(encoding) == b"\n"


def whole(part: Part, source: InputConfig) -> tuple[list[str], Iterator[DelimitedRecord]]:
    """Return the columns of the header (empty if there is none), and all records.

    Raises InputError, here or at a later record.
    """
    return _opened(part, source)[1:]


def table(path: str) -> Iterator[tuple[DelimitedRecord, dict[str, str]]]:
    """Yield every record of a small file, and its cells by column name.

    The encoding is detected, because spreadsheet programs may save a file in a different encoding
    from the one in which they read it.

    Raises InputError, with file and line.
    """
    with raised_as(InputError, f"{path}: cannot be read", OSError, InputError):
        part = Part(
            path,
            path,
            storage.version(path),
            "",
            0,
            "tsv" if path.lower().endswith(".tsv") else "csv",
            None,
        )
        names, records = whole(part, InputConfig(path=path, encoding=encodings.AUTO))
        for record in records:
            if record.error is not None or len(record.fields) != len(names):
                counts = f"{counted(len(record.fields), 'field')}, but the header has {len(names)}"
                raise InputError(f"line {record.line}: {record.error or counts}")
            yield record, dict(zip(names, record.fields, strict=True))


def _opened(
    part: Part, source: InputConfig
) -> tuple[_Dialect, list[str], Iterator[DelimitedRecord]]:
    """Read a file's header.

    The delimiter is the one that a first line such as `sep=;` names; otherwise the usual one of the
    format if it splits the header into several columns; otherwise the first other one that does.
    Spreadsheet programs write semicolons where the comma is the decimal separator.

    Returns:
        The dialect, the column names without surrounding white space, and the records.
    """
    encoding = with_encoding(part, source).encoding or source.encoding
    usual = DELIMITERS[part.format]
    header = None
    for delimiter in (usual, *_MARKS.replace(usual, ""), usual):
        dialect = _Dialect(encoding, delimiter)
        records = _records(part, source, 0, 1, dialect)
        header = next(filter(_is_filled, records), None)
        if header is None or dialect.declared:
            break
        if header.error is None:
            has_columns = len(header.fields) > 1 or not {*header.fields[0]} & {*_MARKS}
            if has_columns:
                break
    if header is None:
        return dialect, [], records
    if header.error is not None:
        raise InputError(f"the header, line {header.line}: {header.error}")
    names = [name.strip() for name in header.fields]
    twice = [name for name in names if name and names.count(name) > 1]
    if twice:
        raise InputError(
            f"the header, line {header.line}: {twice.count(twice[0])} columns are named "
            f"{twice[0]!r}"
        )
    return dialect, names, records


def _is_filled(record: DelimitedRecord) -> bool:
    """Return whether a record contains more than blanks; blank records may precede a header."""
    return record.error is not None or any(field.strip() for field in record.fields)


def ranged(part: Part, source: InputConfig) -> tuple[list[str], Iterator[DelimitedRecord]]:
    """Return the columns of a file, and the records whose first byte is in the part's range.

    Raises as `whole` does.
    """
    dialect, names, records = _opened(part, source)
    if can_seek(part, source):
        records = _records(part, source, part.start, part.line, dialect)
    return names, dropwhile(
        lambda r: r.offset < part.start, takewhile(lambda r: r.offset < part.end, records)
    )


def _records(
    part: Part, source: InputConfig, offset: int, line: int, dialect: _Dialect
) -> Iterator[DelimitedRecord]:
    """Yield the records from an offset on.

    Args:
        part: The file.
        source: Section `input`.
        offset: Of the first record's first byte.
        line: The number of the line there, from 1.
        dialect: At offset 0, the line endings and the delimiter found in the file are set in it.
    """
    with open_lines(part.path, part.compression, offset, part.version) as file:
        if offset == 0:
            _look_at_head(file, dialect)
        text = _RecordLines(file, source, dialect, offset, line)
        if offset == 0 and dialect.declared:
            next(text, None)
        reader = csv.reader(text, delimiter=dialect.delimiter, strict=True)
        blank_bytes = 0
        while True:
            text.begin_record()
            offset, line = text.offset, text.line
            fields: list[str] = []
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if text.ended:
                    raise InputError(
                        f"line {line}: a quoted field of this record is never closed"
                    ) from None
                lines = (
                    f" (lines {line} to {text.line - 1} were read as one record)"
                    if text.line - line > 1
                    else ""
                )
                text.error = text.error or f"not {part.format.upper()}: {error}{lines}"
            if fields or text.error is not None:
                yield DelimitedRecord(offset, line, text.offset - offset, fields, text.error)
                blank_bytes = 0
            elif part.compression is not None:
                blank_bytes += text.offset - offset
                if blank_bytes > BLANK_LIMIT:
                    raise too_many_blanks(BLANK_LIMIT)


def _look_at_head(file: BinaryIO, dialect: _Dialect) -> None:
    """Set the line endings of a dialect, and its delimiter if the first line names one."""
    head = file.peek(_HEAD_BYTES)[:_HEAD_BYTES].decode(dialect.encoding, "replace")  # type: ignore[attr-defined]
    # A line break may be inside a quoted field, and the head may end between \r and \n.
    for text in (head, _QUOTED.sub("", head)):
        if "\r" in text.rstrip("\r") and "\n" not in text:
            dialect.line_end = "\r"
    separator = _SEPARATOR.match(head)
    if separator is not None:
        dialect.delimiter = separator[1]
        dialect.declared = True


class _RecordLines:
    """The lines of a file, for csv.reader, which takes as many of them as a record has."""

    def __init__(
        self, file: BinaryIO, source: InputConfig, dialect: _Dialect, offset: int, line: int
    ) -> None:
        # Of the next line.
        self.offset = offset
        self.line = line
        self.ended = False
        self.error: str | None = None  # what is wrong with the record's bytes
        self._file = file
        self._file_encoding = dialect.encoding
        self._encoding = dialect.encoding  # of the lines' bytes
        self._document_limit = source.max_document_bytes
        self._limit = line_limit(source.max_document_bytes)
        self._text: io.TextIOWrapper | None = None
        # Lines that cannot be split as bytes are split as text, and are encoded again in the
        # encoding `_text_bytes`.
        self._text_bytes = "utf-8"
        if not _has_byte_lines(dialect.encoding):
            self._text = io.TextIOWrapper(file, dialect.encoding, newline=dialect.line_end)
            self._encoding = "utf-8"
        elif dialect.line_end != "\n":
            # Latin-1 maps every byte to one character, so no byte changes.
            self._text = io.TextIOWrapper(file, "latin-1", newline=dialect.line_end)
            self._text_bytes = "latin-1"
        self.begin_record()

    def begin_record(self) -> None:
        # Bytes that the record may still have.
        self._room = self._limit
        self.error = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        data = self._next_line()
        if not data:
            self.ended = True
            raise StopIteration
        first = self.offset == 0
        self.offset += len(data)
        self.line += 1
        self._room -= len(data)
        if self._room < 0:
            raise InputError(
                f"line {self.line - 1}: its record has more than {self._limit} bytes so "
                "far: either a quoted field "
                f"is never closed, or input.max_document_bytes, {self._document_limit}, is too "
                "small for this file"
            )
        if first:
            data = data.removeprefix(BOM)
        try:
            return data.decode(self._encoding)
        except UnicodeDecodeError as error:
            advice = "set input.encoding to another, such as cp1252, or to auto to detect it"
            self.error = self.error or (
                f"not {self._encoding.upper()}: {error.reason} at byte {error.start} of line "
                f"{self.line - 1}; {advice}"
            )
            return data.decode(self._encoding, "replace")

    def _next_line(self) -> bytes:
        if self._text is None:
            return self._file.readline(self._room + 1)
        try:
            return self._text.readline(self._room + 1).encode(self._text_bytes)
        except UnicodeError as error:
            raise InputError(
                f"not {self._file_encoding.upper()} after line {self.line - 1}: {error}"
            ) from None
