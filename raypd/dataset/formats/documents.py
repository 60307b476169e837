"""Files that are one document each; plain text and Markdown are read here."""

import io
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from functools import partial
from typing import ClassVar

import raypd.dataset.encodings as encodings
from raypd.config import InputConfig
from raypd.dataset.formats.base import Columns, Fields, RowFormat, SeenColumns, SourceRow
from raypd.dataset.formats.ranges import RowGroups
from raypd.dataset.jsonl import open_lines
from raypd.errors import InputError, raised_as
from raypd.run import Part

# The columns of the only row of such a file: its name and its text.
ID = "id"
TEXT = "text"
# The field of a row with the boxes of its text (a list of `TextBox`); it is not a column.
BOXES = "\0boxes"
# Bytes that a file may have for each byte of its text, because of tags or of pictures in a PDF.
MARKUP = 16


class DocumentFormat(RowFormat):
    """A format in which each file is one document with the columns `id` and `text`."""

    setting = "files"
    reads_as = "a document"
    is_document = True
    # Bytes that a file may have for each byte of its text.
    markup: ClassVar[int] = MARKUP
    # Names of the format in mails and on the web.
    media_types: ClassVar[tuple[str, ...]] = ()
    # Whether files of this format can be read only by recognition (OCR).
    needs_ocr: ClassVar[bool] = False

    @abstractmethod
    def text(self, data: bytes, part: Part, source: InputConfig) -> str:
        """Return the text of a file.

        Raises:
            ValueError: The file cannot be read; the text says why.
        """

    def count(
        self, part: Part, source: InputConfig, columns: Columns
    ) -> tuple[RowGroups, SeenColumns]:
        return [(1, part.size)], SeenColumns([ID, TEXT], is_schema=True)

    def read(self, part: Part, source: InputConfig, columns: Columns) -> Iterator[SourceRow]:
        """Yield the only row; errors of the file are raised when its fields are read."""
        yield SourceRow(0, "", partial(self._fields, self._data(part, source), part, source))

    def _data(self, part: Part, source: InputConfig) -> bytes:
        """Return the file, or enough of it for `check_size` to refuse it."""
        limit = source.max_document_bytes * self.markup
        with open_lines(part.path, part.compression, version=part.version) as file:
            return file.read(limit + 1)

    def _fields(self, data: bytes, part: Part, source: InputConfig) -> Fields:
        self.check_size(data, source)
        return {ID: part.name, **self.content(data, part, source)}

    def content(self, data: bytes, part: Part, source: InputConfig) -> Fields:
        """Return the text of a file as a field, and the boxes of a text that was recognized.

        Raises:
            ValueError: The file cannot be read; the text says why.
        """
        return {TEXT: self.text(data, part, source)}

    def check_size(self, data: bytes, source: InputConfig) -> None:
        """Refuse a file that is too large.

        Raises:
            ValueError: The file is too large; the text says so.
        """
        limit = source.max_document_bytes * self.markup
        if len(data) > limit:
            raise ValueError(
                f"the file has more than {limit} bytes; input.max_document_bytes is "
                f"{source.max_document_bytes}"
            )

    def unpacked_limit(self, source: InputConfig) -> int:
        """Return the bytes that a zipped file may have when unpacked."""
        # The file may be `markup` times as large as its text, and its unpacked content as many
        # times as large as the file.
        return source.max_document_bytes * self.markup * self.markup


def in_pages(pages: Iterable[str]) -> str:
    """Return the texts of pages as one; `span.page` counts the form feeds between them."""
    # Each page ends as in the output of pdftotext.
    return "".join(f"{page}\n\f" for page in pages)


class Text(DocumentFormat):
    """Plain text and Markdown."""

    media_types = ("text/plain", "text/markdown")
    markup = 1

    def text(self, data: bytes, part: Part, source: InputConfig) -> str:
        encoding = source.encoding
        if encoding == encodings.AUTO:
            encoding = detected_encoding(data)
        return decode(data, encoding)


def detected_encoding(data: bytes) -> str:
    """Return the encoding of a file; raises ValueError if no known one fits."""
    with raised_as(ValueError, "the text cannot be read", InputError):
        return encodings.detect(io.BytesIO(data))


def decode(data: bytes, encoding: str, errors: str = "strict") -> str:
    """Return the text of a file, without a UTF-8 byte order mark.

    Args:
        data: The file.
        encoding: The encoding, by its name in Python.
        errors: How bytes that do not fit are handled, as `bytes.decode` takes it.

    Raises:
        ValueError: The file has another encoding, or Python does not know this one.
    """
    codec = "utf-8-sig" if encoding.lower() == "utf-8" else encoding
    try:
        return data.decode(codec, errors)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not {encoding.upper()}: {error.reason} at byte {error.start}; set "
            "input.encoding to another, such as cp1252, or to auto to detect it"
        ) from None
    except LookupError:
        raise unknown_charset(encoding) from None


def unknown_charset(encoding: str) -> ValueError:
    return ValueError(f"its charset {encoding!r} is unknown to Python; set input.encoding")
