"""Turns a matplotlib figure into a small inline SVG.

Colors become class names (`f-busy`, `s-grid`), so the page's CSS can paint them in light mode, in
dark mode and on paper. There are no inline styles, so the page can forbid them.
"""

import io
import re
import warnings
from xml.etree import ElementTree

from matplotlib.figure import Figure

# The roles of colors. Their values only need to differ; the page's CSS defines the real colors.
_NAMES = (
    "ink",
    "muted",
    "grid",
    "accent",
    "wash",
    "busy",
    "startup",
    "idle",
    "lost",
    "budget",
    "surface",
)
ROLES = {name: f"#{number:02x}{number:02x}{number:02x}" for number, name in enumerate(_NAMES, 1)}
_CLASS = {color: role for role, color in ROLES.items()}
_NAMESPACE = 'xmlns="http://www.w3.org/2000/svg"'
# A number with more than one decimal. The further decimals are less than a tenth of a pixel.
_LONG = re.compile(r"(-?\d+\.\d)\d+")
_BOLD = re.compile(r"\b(bold|600|700)\b")


def inline(figure: Figure, name: str, title: str, description: str) -> str:
    """Return a figure as an <svg> element.

    Its size is its viewBox; one unit is one CSS pixel at full width.

    Args:
        figure: The figure.
        name: A unique name on the page, of letters, digits and dashes.
        title: The title that a screen reader reads.
        description: The description that a screen reader reads.
    """
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # matplotlib warns about glyphs that its own font lacks, but the page's fonts draw the text.
        warnings.simplefilter("ignore")
        figure.savefig(
            buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True
        )
    drawn = ElementTree.fromstring(buffer.getvalue().replace(_NAMESPACE, ""))
    attributes = {
        "viewBox": drawn.get("viewBox", ""),
        "role": "img",
        "aria-labelledby": f"{name}-t {name}-d",
    }
    out = ElementTree.Element("svg", attributes)
    for tag, text in (("title", title), ("desc", description)):
        ElementTree.SubElement(out, tag, id=f"{name}-{tag[0]}").text = text
    # Shapes within <defs> are not drawn.
    defined = {shape for defs in drawn.iter("defs") for shape in defs.iter()}
    for shape in drawn.iter():
        if shape.tag in ("path", "text", "rect") and shape not in defined:
            _append(out, shape)
    return ElementTree.tostring(out, encoding="unicode")


def _append(out: ElementTree.Element, shape: ElementTree.Element) -> None:
    """Append a shape, except the background and shapes without a color."""
    style = _style(shape)
    classes = []
    for key in ("fill", "stroke"):
        role = _CLASS.get(style.get(key, ""))
        if role is not None:
            classes.append(f"{key[0]}-{role}")
    attributes: dict[str, str | None]
    if shape.tag == "text":
        font = " ".join(style.get(key, "") for key in ("font", "font-size", "font-weight"))
        attributes = _text_attributes(shape, style, font)
        if not classes:
            classes.append("f-ink")
        if _BOLD.search(font):
            classes.append("strong")
    elif classes:
        attributes = _path_attributes(shape, style, classes)
    else:
        return
    shown = {key: _LONG.sub(r"\1", value) for key, value in attributes.items() if value}
    child = ElementTree.SubElement(out, shape.tag, {**shown, "class": " ".join(classes)})
    if shape.tag == "text":
        child.text = "".join(shape.itertext())


def _style(shape: ElementTree.Element) -> dict[str, str]:
    """Return the inline style of a shape."""
    style = {}
    for part in shape.get("style", "").split(";"):
        key, colon, value = part.partition(":")
        if colon:
            style[key.strip()] = value.strip()
    return style


def _text_attributes(
    shape: ElementTree.Element, style: dict[str, str], font: str
) -> dict[str, str | None]:
    """Return the attributes of a text."""
    attributes = {
        "text-anchor": style.get("text-anchor"),
        "x": shape.get("x"),
        "y": shape.get("y"),
        "transform": shape.get("transform"),
    }
    size = re.search(r"([\d.]+)px", font)
    if size:
        attributes["font-size"] = size[1]
    return attributes


def _path_attributes(
    shape: ElementTree.Element, style: dict[str, str], classes: list[str]
) -> dict[str, str | None]:
    """Return the attributes of a path."""
    attributes: dict[str, str | None] = {"d": " ".join((shape.get("d") or "").split())}
    if style.get("fill", "none") == "none":
        attributes["fill"] = "none"
    if any(name.startswith("s-") for name in classes):
        attributes["stroke-width"] = style.get("stroke-width")
        attributes["stroke-dasharray"] = style.get("stroke-dasharray")
    return attributes
