"""Records of CSV and TSV files, for planning and reading alike, by Python's csv module.

A quoted field may hold line breaks, so reading can begin only at the places that planning has
noted.
"""

import csv
import io
import sys
from collections.abc import Iterator
from itertools import dropwhile, takewhile
from typing import BinaryIO, NamedTuple

from raypd import storage
from raypd.config import InputConfig
from raypd.dataset.jsonl import BOM, line_limit, open_lines
from raypd.errors import InputError, raised_as
from raypd.run.text import counted
from raypd.run.unit import Part

DELIMITERS = {"csv": ",", "tsv": "\t"}
_MARKS = ",;\t|"  # delimiters that spreadsheets write
csv.field_size_limit(sys.maxsize)  # a record has a limit of its own


class DelimitedRecord(NamedTuple):
    """A record that is not blank. Bytes are those of the (uncompressed) text."""

    offset: int  # of its first byte
    line: int  # on which it begins, from 1
    length: int  # bytes
    fields: list[str]
    error: str | None  # why its fields cannot be trusted


def can_seek(part: Part, source: InputConfig) -> bool:
    """Whether a record can be read without all that stands before it."""
    return part.compression is None and _has_byte_lines(source.encoding)


def _has_byte_lines(encoding: str) -> bool:
    """Whether a line break's byte is one in this encoding, and nothing else is (not so: UTF-16,
    EBCDIC).
    """
    return "\n".encode(encoding) == b"\n"


def whole(part: Part, source: InputConfig) -> tuple[list[str], Iterator[DelimitedRecord]]:
    """The columns of the header (none: empty), and all records.

    Raises InputError, here or at a later record.
    """
    return _opened(part, source)[1:]


def table(path: str) -> Iterator[tuple[DelimitedRecord, dict[str, str]]]:
    """Every record of a small file, and its cells by the header.

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
        names, records = whole(part, InputConfig(path=path))
        for record in records:
            if record.error is not None or len(record.fields) != len(names):
                counts = f"{counted(len(record.fields), 'field')} where the header has {len(names)}"
                raise InputError(f"line {record.line}: {record.error or counts}")
            yield record, dict(zip(names, record.fields, strict=True))


def _opened(part: Part, source: InputConfig) -> tuple[str, list[str], Iterator[DelimitedRecord]]:
    """As `whole`, behind the delimiter: that of the format, or else the first by which the header
    has several columns; spreadsheets write semicolons where the comma is decimal.
    """
    usual, header = DELIMITERS[part.format], None
    for delimiter in (usual, *_MARKS.replace(usual, ""), usual):
        records = _records(part, source, 0, 1, delimiter)
        header = next(records, None)
        if header is None or (
            header.error is None and (len(header.fields) > 1 or not {*header.fields[0]} & {*_MARKS})
        ):
            break
    if header is None:
        return usual, [], records
    if header.error is not None:
        raise InputError(f"the header, line {header.line}: {header.error}")
    twice = [name for name in header.fields if name and header.fields.count(name) > 1]
    if twice:
        raise InputError(
            f"the header, line {header.line}: {twice.count(twice[0])} columns are called "
            f"{twice[0]!r}"
        )
    return delimiter, header.fields, records


def ranged(part: Part, source: InputConfig) -> tuple[list[str], Iterator[DelimitedRecord]]:
    """The columns of a file, and the records whose first byte lies in the part's range.

    Raises as `whole` does.
    """
    delimiter, names, records = _opened(part, source)
    if can_seek(part, source):
        records = _records(part, source, part.start, part.line, delimiter)
    return names, dropwhile(
        lambda r: r.offset < part.start, takewhile(lambda r: r.offset < part.end, records)
    )


def _records(
    part: Part, source: InputConfig, offset: int, line: int, delimiter: str
) -> Iterator[DelimitedRecord]:
    with open_lines(part.path, part.compression, offset, part.version) as file:
        text = _Text(file, source, offset, line)
        reader = csv.reader(text, delimiter=delimiter, strict=True)
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
                        f"line {line}: a quoted field of this record never ends"
                    ) from None
                lines = (
                    f" (lines {line} to {text.line - 1} were read as one record)"
                    if text.line - line > 1
                    else ""
                )
                text.error = text.error or f"not {part.format.upper()}: {error}{lines}"
            if fields or text.error is not None:
                yield DelimitedRecord(offset, line, text.offset - offset, fields, text.error)


class _Text:
    """The lines of a file, for csv.reader, which takes as many of them as a record has."""

    def __init__(self, file: BinaryIO, source: InputConfig, offset: int, line: int) -> None:
        self.offset, self.line = offset, line  # of the next one
        self.ended = False
        self.error: str | None = None  # what is wrong with the record's bytes
        self._file, self._encoding, self._document_limit = (
            file,
            source.encoding,
            source.max_document_bytes,
        )
        self._limit = line_limit(source.max_document_bytes)
        self._text: io.TextIOWrapper | None = None
        if not _has_byte_lines(source.encoding):
            self._text = io.TextIOWrapper(file, source.encoding, newline="\n")
        self.begin_record()

    def begin_record(self) -> None:
        self._room, self.error = self._limit, None  # bytes that the record may still have

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        data = self._next_line()
        if not data:
            self.ended = True
            raise StopIteration
        first, self.offset = self.offset == 0, self.offset + len(data)
        self.line += 1
        self._room -= len(data)
        if self._room < 0:
            raise InputError(
                f"line {self.line - 1}: its record has more than {self._limit} bytes so "
                "far: either a quoted field "
                f"never ends, or input.max_document_bytes, {self._document_limit}, is too "
                "small for this file"
            )
        data = data.removeprefix(BOM) if first else data
        encoding = self._encoding if self._text is None else "utf-8"
        try:
            return data.decode(encoding)
        except UnicodeDecodeError as error:
            place = (
                f"byte {error.start} of line {self.line - 1}; input.encoding can be another, "
                "such as cp1252"
            )
            self.error = self.error or f"not {encoding.upper()}: {error.reason} at {place}"
            return data.decode(encoding, "replace")

    def _next_line(self) -> bytes:
        if self._text is None:
            return self._file.readline(self._room + 1)
        try:
            return self._text.readline(self._room + 1).encode()
        except UnicodeError as error:
            raise InputError(
                f"not {self._encoding.upper()} after line {self.line - 1}: {error}"
            ) from None
