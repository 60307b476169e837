"""PDF: the text of the pages."""

import io
import re
from collections.abc import Sequence
from statistics import mean
from typing import Any, NamedTuple

# Texts whose baselines differ in height by less than this share of the font size are on one line.
_SAME_LINE = 0.3
# Columns with at least this many rows at the same heights are a table if the texts of one of them
# are shorter than this on average (characters); otherwise they are columns of prose.
_TABLE_ROWS = 2
_CELL_CHARACTERS = 20
_ALIGNED = 0.6  # the share of a column's rows that must be level with rows of the other


class _PositionedText(NamedTuple):
    """A text with the position where it begins (points, from the lower left) and its font size."""

    text: str
    left: float
    height: float
    size: float


def pdf_pages(data: bytes) -> list[str]:
    """Return the text of each page of a PDF; "" for a page without text.

    Raises:
        ValueError: The file cannot be read; the text says why.
    """
    import pypdf  # imported here because most runs do not need it

    try:
        pdf = pypdf.PdfReader(io.BytesIO(data))
        if pdf.is_encrypted and not pdf.decrypt(""):
            raise ValueError("it has a password")
        return [re.sub("[\0\f]", " ", _page_text(page)).strip() for page in pdf.pages]
    except MemoryError:
        raise
    # pypdf raises its own errors for some faults of a file, and any Python error for others.
    except Exception as error:
        raise ValueError(f"the PDF cannot be read: {error or type(error).__name__}") from None


def _page_text(page: Any) -> str:
    """Return the text of a page in the order of the file, but tables stored by column as rows."""
    pieces: list[_PositionedText] = []

    def note(text: str, page_matrix: Any, matrix: Any, font: Any, size: float) -> None:
        if text.strip():
            left = matrix[4] * page_matrix[0] + matrix[5] * page_matrix[2] + page_matrix[4]
            height = matrix[4] * page_matrix[1] + matrix[5] * page_matrix[3] + page_matrix[5]
            scale = abs(matrix[3] * page_matrix[3]) or 1.0
            pieces.append(_PositionedText(" ".join(text.split()), left, height, size * scale))

    text = str(page.extract_text(visitor_text=note))
    columns = _columns(pieces)
    merged: list[list[_PositionedText]] = []
    is_table = False
    for column in columns:
        if merged and _are_rows(merged[-1], column):
            merged[-1] = merged[-1] + column
            is_table = True
        else:
            merged.append(column)
    if not is_table:
        return text
    return "\n".join(line for block in merged for line in _lines(block))


def _columns(pieces: Sequence[_PositionedText]) -> list[list[_PositionedText]]:
    """Split the texts of a page wherever one is higher up than the one before it."""
    columns: list[list[_PositionedText]] = []
    for piece in pieces:
        if not columns or piece.height > columns[-1][-1].height + piece.size / 2:
            columns.append([])
        columns[-1].append(piece)
    return columns


def _are_rows(first: Sequence[_PositionedText], second: Sequence[_PositionedText]) -> bool:
    """Return whether a column and the one to its right are columns of a table."""
    if len(second) < _TABLE_ROWS or min(p.left for p in second) <= max(p.left for p in first):
        return False
    aligned = 0
    for piece in second:
        tolerance = _SAME_LINE * piece.size
        aligned += any(abs(other.height - piece.height) <= tolerance for other in first)
    if aligned < _TABLE_ROWS or aligned < _ALIGNED * len(second):
        return False
    lengths = [mean(len(piece.text) for piece in column) for column in (first, second)]
    return min(lengths) < _CELL_CHARACTERS


def _lines(pieces: Sequence[_PositionedText]) -> list[str]:
    """Return texts as lines, from top to bottom, each from left to right."""
    lines: list[list[_PositionedText]] = []
    for piece in sorted(pieces, key=lambda piece: -piece.height):
        if lines and lines[-1][0].height - piece.height <= _SAME_LINE * piece.size:
            lines[-1].append(piece)
        else:
            lines.append([piece])
    return [" ".join(p.text for p in sorted(line, key=lambda p: p.left)) for line in lines]
