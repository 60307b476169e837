"""Optical character recognition: the text of a picture or of a page of a PDF, with its boxes."""

import io
import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import mean, median
from typing import Any, NamedTuple, TypedDict

_DPI = 200  # of a page of a PDF
_POINTS = 72  # per inch, the unit of a PDF
_MAX_PIXELS = 24_000_000  # of a picture that is recognized: A4 at 400 dpi is smaller
_MAX_OPENED_PIXELS = 200_000_000  # of a picture that may be opened
_MIN_SCORE = 0.5  # a line with a lower score is a stain
# A page with a lower average score may be upside down.
_UPRIGHT_SCORE = 0.8
# A text that is taller than it is wide by this factor is sideways.
_TALL = 1.5
# Two texts are on one line if they overlap by this share of the smaller height.
_SAME_LINE = 0.5
# Texts side by side in at least this many rows, with at least this many characters on average, are
# columns of prose and not cells of a table.
_PROSE_ROWS = 3
_PROSE_CHARACTERS = 25


class TextLine(TypedDict):
    """A text on a page."""

    text: str
    # Left, top, right and bottom as fractions of the page's width and height, from its upper left.
    box: list[float]


class RecognizedPage(TypedDict):
    """The recognized text of one page."""

    # Each item of the outer list is one row of the page, with its texts in order.
    rows: list[list[TextLine]]
    # The pages of the file.
    pages: int


class _RecognizedText(NamedTuple):
    """A recognized text with its four corners (pixels), starting from its upper left."""

    text: str
    corners: list[list[float]]
    score: float


class _UprightText(NamedTuple):
    """A text with its corners (pixels), and its position as if the page were not tilted."""

    text: str
    corners: list[list[float]]
    left: float
    right: float
    top: float
    bottom: float


def recognized_page(data: bytes, number: int) -> RecognizedPage:
    """Recognize the text of one page.

    Args:
        data: A PDF, or a picture, which may have several pages.
        number: The page, from 0.

    Raises:
        ValueError: The page cannot be drawn; the text says why.
    """
    try:
        picture, pages = _picture(data, number)
    except MemoryError:
        raise
    except Exception as error:  # from pypdfium2 and Pillow, which raise many kinds
        raise ValueError(f"a page cannot be drawn: {error or type(error).__name__}") from None
    texts, turns = _recognized_upright(picture)
    height, width = picture.shape[:2]
    rows = []
    for row in _in_reading_order(_rows(_upright(texts))):
        rows.append([_line(piece, width, height, turns) for piece in row])
    return {"rows": rows, "pages": pages}


def _recognized_upright(picture: Any) -> tuple[list[_RecognizedText], int]:
    """Recognize a picture, and rotate it if it looks upside down or sideways.

    Returns:
        The texts, and how many times the picture was rotated left by 90 degrees to read them.
    """
    import numpy

    texts = _recognized(picture)
    turns_to_try = []
    if texts and mean(text.score for text in texts) < _UPRIGHT_SCORE:
        turns_to_try = [2]
    if sum(_is_tall(text) for text in texts) > len(texts) / 2:
        turns_to_try = [1, 3]
    best = (texts, 0)
    for turns in turns_to_try:
        turned = _recognized(numpy.ascontiguousarray(numpy.rot90(picture, turns)))
        if _sureness(turned) > _sureness(best[0]) or (turns == 1 and turned):
            best = (turned, turns)
    return [text for text in best[0] if text.score >= _MIN_SCORE], best[1]


def _recognized(picture: Any) -> list[_RecognizedText]:
    # The library's own check for upside-down lines also rotates some lines that are upright.
    recognition = _engine()(picture, use_cls=False)
    if recognition.boxes is None:
        return []
    return [
        _RecognizedText(text, box.tolist(), float(score))
        for text, box, score in zip(
            recognition.txts, recognition.boxes, recognition.scores, strict=True
        )
        if text.strip()
    ]


def _is_tall(text: _RecognizedText) -> bool:
    lefts = [x for x, _ in text.corners]
    tops = [y for _, y in text.corners]
    return max(tops) - min(tops) > _TALL * (max(lefts) - min(lefts))


def _sureness(texts: Sequence[_RecognizedText]) -> float:
    """Return the sum of the scores of all characters."""
    return sum(text.score * len(text.text) for text in texts)


@lru_cache(maxsize=1)
def _engine() -> Any:
    """Return the recognizer, whose models come with its package; it uses one core."""
    import cv2
    import rapidocr

    cv2.setNumThreads(1)
    settings = {
        "Global.log_level": "critical",
        "EngineConfig.onnxruntime.intra_op_num_threads": 1,
        "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        # Lines are located in a smaller picture (pixels), which takes a quarter of the time, and
        # read in the full one. With the library's own margin, some lines of dense pages are cut
        # off.
        "Det.limit_type": "max",
        "Det.limit_side_len": 1280,
        "Det.unclip_ratio": 2.0,
    }
    return rapidocr.RapidOCR(params=settings)


def _picture(data: bytes, number: int) -> tuple[Any, int]:
    """Return a page as an array (height, width, 3) of blue, green and red, and the page count."""
    import numpy
    from PIL import Image, ImageOps

    if data.lstrip()[:5] == b"%PDF-":
        return _drawn_page(data, number)
    Image.MAX_IMAGE_PIXELS = _MAX_OPENED_PIXELS // 2  # Pillow refuses more than twice this limit
    with Image.open(io.BytesIO(data)) as file:
        pages = getattr(file, "n_frames", 1)
        file.seek(number)
        width, height = file.size
        scale = min(1.0, math.sqrt(_MAX_PIXELS / (width * height)))
        if scale < 1.0:
            file.thumbnail((int(width * scale), int(height * scale)))
        upright = ImageOps.exif_transpose(file)
        if upright.mode in ("RGBA", "LA", "PA", "P"):
            # Transparent pixels become white, like paper.
            upright = upright.convert("RGBA")
            paper = Image.new("RGBA", upright.size, "white")
            upright = Image.alpha_composite(paper, upright)
        array = numpy.asarray(upright.convert("RGB"))
    return numpy.ascontiguousarray(array[:, :, ::-1]), pages


def _drawn_page(data: bytes, number: int) -> tuple[Any, int]:
    import numpy
    import pypdfium2

    with pypdfium2.PdfDocument(data) as document:
        pages = len(document)
        page = document[number]
        width, height = page.get_size()
        largest = math.sqrt(_MAX_PIXELS / max(1.0, width * height))
        bitmap = page.render(scale=min(_DPI / _POINTS, largest), rev_byteorder=False)
        array = bitmap.to_numpy()[:, :, :3]
        # A copy, because the bitmap's memory is freed with the document.
        return numpy.array(array, order="C"), pages


def _upright(texts: Sequence[_RecognizedText]) -> list[_UprightText]:
    """Return texts with their positions as if the page were not tilted."""
    slopes = []
    for _, (top_left, top_right, *_), _ in texts:
        width = top_right[0] - top_left[0]
        height = top_right[1] - top_left[1]
        # A short text says little about the tilt of the page, and a vertical one says nothing.
        if width > 100 and abs(height) < width / 4:
            slopes.append(height / width)
    slope = median(slopes) if slopes else 0.0
    cosine = 1 / math.hypot(1, slope)
    sine = slope * cosine
    pieces = []
    for text, corners, _ in texts:
        lefts = [x * cosine + y * sine for x, y in corners]
        tops = [y * cosine - x * sine for x, y in corners]
        pieces.append(_UprightText(text, corners, min(lefts), max(lefts), min(tops), max(tops)))
    return pieces


def _rows(pieces: Sequence[_UprightText]) -> list[list[_UprightText]]:
    """Return texts row by row from the top, each row from the left."""
    rows: list[list[_UprightText]] = []
    for piece in sorted(pieces, key=lambda piece: piece.top + piece.bottom):
        if rows and _on_one_line(rows[-1][-1], piece):
            rows[-1].append(piece)
        else:
            rows.append([piece])
    for row in rows:
        row.sort(key=lambda piece: piece.left)
    return rows


def _on_one_line(first: _UprightText, second: _UprightText) -> bool:
    overlap = min(first.bottom, second.bottom) - max(first.top, second.top)
    height = min(first.bottom - first.top, second.bottom - second.top)
    return overlap > _SAME_LINE * height


def _in_reading_order(rows: Sequence[list[_UprightText]]) -> list[list[_UprightText]]:
    """Return rows with two columns of prose put one after the other; tables are unchanged."""
    ordered: list[list[_UprightText]] = []
    block: list[list[_UprightText]] = []
    for row in rows:
        if block and _continues(block, row):
            block.append(row)
            continue
        ordered += _columns_apart(block)
        block = []
        if len(row) == 2:
            block.append(row)
        else:
            ordered.append(row)
    return ordered + _columns_apart(block)


def _continues(block: Sequence[list[_UprightText]], row: list[_UprightText]) -> bool:
    """Return whether a row fits the two columns of a block, or one of them."""
    right_column = block[0][1].left
    tolerance = row[0].bottom - row[0].top
    if len(row) == 2:
        return row[0].right < right_column and abs(row[1].left - right_column) < tolerance
    is_right = abs(row[0].left - right_column) < tolerance
    return len(row) == 1 and (is_right or row[0].right < right_column)


def _columns_apart(block: Sequence[list[_UprightText]]) -> list[list[_UprightText]]:
    pairs = [row for row in block if len(row) == 2]
    if len(pairs) < _PROSE_ROWS:
        return list(block)
    for side in (0, 1):
        if mean(len(row[side].text) for row in pairs) < _PROSE_CHARACTERS:
            return list(block)
    right_column = pairs[0][1].left
    pieces = [piece for row in block for piece in row]
    left = [[piece] for piece in pieces if piece.right < right_column]
    right = [[piece] for piece in pieces if piece.right >= right_column]
    return left + right


def _line(piece: _UprightText, width: int, height: int, turns: int) -> TextLine:
    """Return a text with its box on the page before rotation.

    Args:
        piece: The text, with its corners on the rotated page.
        width: The width of the page before rotation, in pixels.
        height: The height of the page before rotation, in pixels.
        turns: How many times the page was rotated left by 90 degrees.
    """
    lefts = []
    tops = []
    for x, y in piece.corners:
        left, top = _turned_back(x, y, width, height, turns)
        lefts.append(left / width)
        tops.append(top / height)
    box = [min(lefts), min(tops), max(lefts), max(tops)]
    return {"text": piece.text, "box": [round(min(1.0, max(0.0, side)), 4) for side in box]}


def _turned_back(x: float, y: float, width: int, height: int, turns: int) -> tuple[float, float]:
    if turns == 1:
        return width - y, x
    if turns == 2:
        return width - x, height - y
    if turns == 3:
        return y, height - x
    return x, y
