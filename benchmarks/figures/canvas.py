"""A small SVG canvas: boxes of text, lines and labels, in colours for light and dark pages."""

from dataclasses import dataclass
from html import escape

WIDTH = 860
MARGIN = 20
BOX_HEIGHT = 28
ROW_HEIGHT = 36
GAP = 6
# The width of a character of the monospaced font, in pixels at the font size of 13.
_CHARACTER = 7.85
_PADDING = 8

# Each kind of box: fill and stroke on a light page, then on a dark one.
_KINDS = {
    "prompt": ("#f6f8fa", "#d0d7de", "#21262d", "#484f58"),
    "key": ("#ddf4ff", "#54aeff", "#0c2d6b", "#388bfd"),
    "value": ("#dafbe1", "#2da44e", "#0f3d20", "#3fb950"),
    "second": ("#fbefff", "#c297ff", "#3c1e70", "#a371f7"),
    "third": ("#fff1e5", "#fb8f44", "#5a1e02", "#db6d28"),
    "control": ("#fff8c5", "#d4a72c", "#3b2300", "#bb8009"),
    "rejected": ("#ffebe9", "#ff8182", "#4b1113", "#f85149"),
}
_PAGE = ("#ffffff", "#0d1117")
_TEXT = ("#1f2328", "#e6edf3")
_QUIET = ("#59636e", "#9198a1")
_LINE = ("#818b98", "#656c76")
_HIDDEN = ("#d0d7de", "#30363d")


def _style(theme: int) -> str:
    """Return the rules of a theme: 0 is light, 1 is dark."""
    rules = [
        f".page {{ fill: {_PAGE[theme]}; }}",
        f"text {{ fill: {_TEXT[theme]}; }}",
        f".quiet {{ fill: {_QUIET[theme]}; }}",
        f".line {{ stroke: {_LINE[theme]}; }}",
        f".head {{ fill: {_LINE[theme]}; }}",
        f".empty {{ fill: none; stroke: {_LINE[theme]}; }}",
        f".hidden {{ fill: none; stroke: {_HIDDEN[theme]}; }}",
    ]
    for kind, colours in _KINDS.items():
        fill = colours[2 * theme]
        stroke = colours[2 * theme + 1]
        rules.append(f".{kind} {{ fill: {fill}; stroke: {stroke}; }}")
    return " ".join(rules)


def text_width(text: str) -> float:
    """Return the width of a text in a box, without padding."""
    return round(len(text) * _CHARACTER, 1)


def box_width(text: str) -> float:
    """Return the width of the box around a text."""
    return text_width(text) + 2 * _PADDING


def _number(value: float) -> str:
    return f"{value:g}"


@dataclass(frozen=True)
class Box:
    """A box that was drawn."""

    x: float
    y: float
    width: float
    height: float = BOX_HEIGHT

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


class Canvas:
    """Collects the elements of a figure."""

    def __init__(self, title: str) -> None:
        """
        Args:
            title: What the figure shows, for readers who cannot see it.
        """
        self._title = title
        self._elements: list[str] = []

    def box(self, x: float, y: float, text: str, kind: str, width: float | None = None) -> Box:
        """Draw a token; without a width, the box is as wide as its text needs."""
        box = Box(x, y, box_width(text) if width is None else width)
        self.rectangle(box, kind)
        baseline = y + box.height / 2 + 4.5
        self._elements.append(
            f'<text class="mono" x="{_number(box.middle)}" y="{_number(baseline)}" '
            f'text-anchor="middle">{escape(text)}</text>'
        )
        return box

    def rectangle(self, box: Box, kind: str, dashed: bool = False, radius: int = 4) -> None:
        """Draw a rectangle without text."""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._elements.append(
            f'<rect class="{kind}" x="{_number(box.x)}" y="{_number(box.y)}" '
            f'width="{_number(box.width)}" height="{_number(box.height)}" rx="{radius}"{dashes}/>'
        )

    def panel(self, box: Box, kind: str, title: str, lines: list[str]) -> Box:
        """Draw a box with a bold title and lines below it, in its middle."""
        self.rectangle(box, kind, radius=6)
        step = 18
        y = box.y + (box.height - step * len(lines)) / 2 + 5
        self._write(box.middle, y, title, 'font-weight="600" text-anchor="middle"')
        for line in lines:
            y += step
            self._write(box.middle, y, line, 'text-anchor="middle"')
        return box

    def state(self, x: float, y: float, number: int) -> Box:
        """Draw the state of a recurrent layer: a circle as high as a box."""
        box = Box(x, y, BOX_HEIGHT)
        self.rectangle(box, "control", radius=BOX_HEIGHT // 2)
        baseline = y + box.height / 2 + 4.5
        self._write(box.middle, baseline, str(number), 'class="mono" text-anchor="middle"')
        return box

    def slot(self, x: float, y: float, width: float) -> Box:
        """Draw an empty, dashed box."""
        box = Box(x, y, width)
        self.rectangle(box, "empty", dashed=True)
        return box

    def cell(self, x: float, y: float, size: float, kind: str) -> None:
        """Draw a cell of a matrix."""
        self.rectangle(Box(x, y, size, size), kind, radius=1)

    def heading(self, x: float, y: float, text: str) -> None:
        """Write a bold line."""
        self._write(x, y, text, 'font-weight="600" font-size="15"')

    def label(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        """Write a quiet line."""
        self._write(x, y, text, f'class="quiet" text-anchor="{anchor}"')

    def small(self, x: float, y: float, text: str, anchor: str = "middle") -> None:
        """Write a quiet number or a short note."""
        self._write(x, y, text, f'class="quiet" font-size="11" text-anchor="{anchor}"')

    def _write(self, x: float, y: float, text: str, attributes: str) -> None:
        if not text:
            return
        self._elements.append(
            f'<text x="{_number(x)}" y="{_number(y)}" {attributes}>{escape(text)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, dashed: bool = False) -> None:
        """Draw a line."""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._elements.append(
            f'<line class="line" x1="{_number(x1)}" y1="{_number(y1)}" x2="{_number(x2)}" '
            f'y2="{_number(y2)}"{dashes}/>'
        )

    def arrow(self, points: list[tuple[float, float]]) -> None:
        """Draw a line through points that ends in an arrowhead."""
        path = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._elements.append(
            f'<polyline class="line" points="{path}" fill="none" marker-end="url(#head)"/>'
        )

    def strike(self, box: Box) -> None:
        """Strike a box out."""
        middle = box.y + box.height / 2
        self.line(box.x + 3, middle, box.right - 3, middle)

    def legend(self, x: float, y: float, entries: list[tuple[str, str]]) -> None:
        """Draw a legend of (kind, text) in one line."""
        for kind, text in entries:
            swatch = Box(x, y, 14, 14)
            self.rectangle(swatch, kind, radius=3)
            self.label(x + 20, y + 11.5, text)
            x += 20 + len(text) * 7.4 + 20

    def svg(self, height: float) -> str:
        """Return the figure.

        Args:
            height: The height of the figure in pixels.
        """
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {_number(height)}" '
            'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" '
            'font-size="13" role="img">'
        )
        lines = [
            head,
            f"<title>{escape(self._title)}</title>",
            "<style>",
            ".mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }",
            _style(0),
            f"@media (prefers-color-scheme: dark) {{ {_style(1)} }}",
            "</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path class="head" d="M0,0 L8,4 L0,8 z"/></marker>'
            "</defs>",
            f'<rect class="page" width="{WIDTH}" height="{_number(height)}" rx="8"/>',
            *self._elements,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"
