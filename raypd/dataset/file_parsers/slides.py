"""Presentations: the text of the slides."""

import io
from collections.abc import Iterable, Iterator
from typing import Any

from raypd.dataset.file_parsers.archive import check_unpacked
from raypd.dataset.file_parsers.html import in_lines

_NO_PRESENTATION = "not a PowerPoint file, or one with a password"


def slide_texts(data: bytes, limit: int) -> list[str]:
    """Return the text of each slide: its shapes and rows of tables, then the speaker's notes.

    Args:
        data: The file (.pptx).
        limit: Bytes that the file may have when unpacked.

    Raises:
        ValueError: The file cannot be read; the text says why.
    """
    import pptx  # imported here because most runs do not need it

    check_unpacked(data, limit, "a PowerPoint file", _NO_PRESENTATION)
    try:
        return [
            in_lines(_slide_lines(slide)) for slide in pptx.Presentation(io.BytesIO(data)).slides
        ]
    except MemoryError:
        raise
    except Exception as error:  # from zipfile, lxml or python-pptx
        raise ValueError(f"{_NO_PRESENTATION}: {error or type(error).__name__}") from None


def _slide_lines(slide: Any) -> Iterator[str]:
    yield from _shape_lines(slide.shapes)
    if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
        yield from slide.notes_slide.notes_text_frame.text.splitlines()


def _shape_lines(shapes: Iterable[Any]) -> Iterator[str]:
    for shape in shapes:
        if hasattr(shape, "shapes"):  # a group
            yield from _shape_lines(shape.shapes)
        elif getattr(shape, "has_table", False):
            for row in shape.table.rows:
                yield " ".join(cell.text for cell in row.cells)
        elif shape.has_text_frame:
            yield from shape.text_frame.text.splitlines()
