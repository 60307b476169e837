"""The input formats.

To add a format, write a subclass of `Format` in a file of this folder and add its line to
`INPUT_FORMATS` (`raypd/config/input_formats.py`), from which `FORMATS` is built.
"""

import os
import re
from importlib import import_module
from typing import Any

from raypd.config import INPUT_FORMATS, TABLES
from raypd.dataset.formats.base import (
    Columns,
    Fields,
    Format,
    RowFormat,
    SeenColumns,
    SourceRow,
    Split,
)
from raypd.dataset.formats.custom_reader import CustomReader
from raypd.dataset.formats.documents import DocumentFormat
from raypd.dataset.formats.parquet import Parquet

__all__ = [
    "FORMATS",
    "Columns",
    "CustomReader",
    "Detector",
    "Fields",
    "Format",
    "Parquet",
    "RowFormat",
    "SeenColumns",
    "SourceRow",
    "Split",
    "endings_of",
    "row_in_words",
    "settings_by_ending",
    "what_is_read",
]


def _document_format(name: str) -> DocumentFormat | None:
    """Return the format of a file inside another one, by its name; None if it is not a document."""
    ending = os.path.splitext(name.lower())[1]
    for format in FORMATS.values():
        if isinstance(format, DocumentFormat) and ending in format.endings:
            return format
    return None


def _format_of_type(media_type: str) -> DocumentFormat | None:
    """Return the format of a media type such as "text/html"; None if it is not a document."""
    for format in FORMATS.values():
        if isinstance(format, DocumentFormat) and media_type in format.media_types:
            return format
    return None


# Functions that find the formats of documents inside files of these formats.
_FINDERS = {"eml": _document_format, "msg": _document_format, "warc": _format_of_type}


def _format(name: str) -> Format:
    """Return the format of a line of the registry."""
    entry = INPUT_FORMATS[name]
    module, class_name = entry.reader.split(":")
    kind: Any = getattr(import_module(f"raypd.dataset.formats.{module}"), class_name)
    kind.name = name
    kind.endings = entry.endings
    kind.setting = entry.setting
    made: Format = kind(_FINDERS[name]) if name in _FINDERS else kind()
    return made


# By name. The user's own reader is also one, but `input.format` cannot name it.
FORMATS: dict[str, Format] = {
    **{name: _format(name) for name in INPUT_FORMATS},
    CustomReader.name: CustomReader(),
}

_COMPRESSIONS = {".gz": "gz", ".zst": "zst"}


class Detector:
    """Recognizes the format of files by their names, under one setting.

    Args:
        setting: `input.format`, or "reader" if `input.reader` reads every file.
        ocr: Whether files that need recognition are accepted, too.
    """

    def __init__(self, setting: str, ocr: bool = True) -> None:
        self._by_ending: dict[str, Format] = {}
        for format in FORMATS.values():
            needs_ocr = isinstance(format, DocumentFormat) and format.needs_ocr
            if format.setting == setting and (ocr or not needs_ocr):
                self._by_ending.update(dict.fromkeys(format.endings, format))
        # If the setting names one format, every file is read in that format.
        self._only: Format | None = None
        if not self._by_ending:
            self._only = FORMATS[Parquet.name if setting in TABLES else setting]

    def detect(self, name: str) -> tuple[Format | None, str | None]:
        """Return the format of a file and its compression ("gz", "zst" or None).

        Args:
            name: The file's name or path.

        Returns:
            (None, None) if no format reads a file of this name.
        """
        stem, suffix = os.path.splitext(name.lower())
        compression = _COMPRESSIONS.get(suffix)
        format = self._only
        if format is not None:
            return format, compression if format.compressible else None
        ending = os.path.splitext(stem)[1] if compression else suffix
        format = self._by_ending.get(ending)
        if format is None or (compression is not None and not format.compressible):
            return None, None
        return format, compression


def settings_by_ending() -> list[str]:
    """Return the values of `input.format` besides auto that select files by their names."""
    settings: dict[str, None] = {}
    for format in FORMATS.values():
        if format.endings and format.setting != "auto":
            settings[format.setting] = None
    return list(settings)


def endings_of(setting: str) -> list[str]:
    """Return the file extensions that a value of `input.format` accepts."""
    endings: list[str] = []
    for format in FORMATS.values():
        if format.setting == setting:
            endings += format.endings
    return endings


def what_is_read(setting: str) -> str:
    """Return a description of the files that a value of `input.format` accepts, for a message."""
    formats = [format for format in FORMATS.values() if format.setting == setting]
    if setting in settings_by_ending():
        endings = ", ".join(endings_of(setting))
        return f"input.format={setting} reads each file ({endings}) as {formats[0].reads_as}"
    by_default = [format for format in FORMATS.values() if format.setting == "auto"]
    packed = [format.endings[0] for format in by_default if format.compressible]
    plain = [format.endings[0] for format in by_default if not format.compressible]
    return f"raypd reads {_listed(packed)} (also with .gz or .zst), {_listed(plain)}"


def row_in_words(name: str, offset: int, setting: str) -> str:
    """Return a description of the row of a document in its file, such as "row 12".

    Args:
        name: The document's `source`.
        offset: Its `row`.
        setting: `input.format`, or "reader" if `input.reader` reads every file.

    Returns:
        "" if the whole file is the document, or if rows are known only by their first byte.
    """
    known_settings = {format.setting for format in FORMATS.values()}
    if setting not in {*known_settings, *FORMATS, *TABLES}:
        # The run is of another version, and its record is only displayed.
        return ""
    # Names from the second entry of `input.path` on end in #2, #3, ...
    file_name = re.sub(r"#[0-9]+$", "", name)
    format, _ = Detector(setting).detect(file_name)
    if not isinstance(format, RowFormat) or format.is_document:
        return ""
    return f"row {offset}"


def _listed(words: list[str]) -> str:
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} and {words[-1]}"
