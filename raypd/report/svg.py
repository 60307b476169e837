"""A matplotlib figure as a small inline SVG.

Colours become class names (`f-busy`, `s-grid`), so that the page's CSS paints them in the light, in
the dark and on paper; there are no inline styles, so that the page can forbid them.
"""

import io
import re
import warnings
from xml.etree import ElementTree

from matplotlib.figure import Figure

# The values only have to differ: the page's CSS says what the colour of a role looks like.
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
_LONG = re.compile(r"(-?\d+\.\d)\d+")  # more than a tenth of a pixel


def inline(figure: Figure, name: str, title: str, description: str) -> str:
    """The figure as an <svg> element whose size is its viewBox; one unit is one CSS pixel at full
    width. name: unique on the page, of letters, digits and dashes. title, description: what a
    screen reader says.
    """
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # Glyphs that matplotlib's own font lacks: the page's fonts draw the text.
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
    defined = {shape for defs in drawn.iter("defs") for shape in defs.iter()}
    for shape in drawn.iter():
        if shape.tag in ("path", "text", "rect") and shape not in defined:
            _append(out, shape)
    return ElementTree.tostring(out, encoding="unicode")


def _append(out: ElementTree.Element, shape: ElementTree.Element) -> None:
    pairs = (part.split(":", 1) for part in shape.get("style", "").split(";") if ":" in part)
    style = {key.strip(): value.strip() for key, value in pairs}
    classes = [
        f"{key[0]}-{_CLASS[style[key]]}" for key in ("fill", "stroke") if style.get(key) in _CLASS
    ]
    if shape.tag == "text":
        font = " ".join(style.get(key, "") for key in ("font", "font-size", "font-weight"))
        size = re.search(r"([\d.]+)px", font)
        attributes = {"font-size": size and size[1], "text-anchor": style.get("text-anchor")}
        attributes |= {key: shape.get(key) for key in ("x", "y", "transform")}
        classes = (classes or ["f-ink"]) + (
            ["strong"] if re.search(r"\b(bold|600|700)\b", font) else []
        )
    elif classes:
        attributes = {"d": " ".join((shape.get("d") or "").split())}
        if style.get("fill", "none") == "none":
            attributes["fill"] = "none"
        if any(name.startswith("s-") for name in classes):
            attributes |= {key: style.get(key) for key in ("stroke-width", "stroke-dasharray")}
    else:
        return  # the background, and what has no colour
    shown = {key: _LONG.sub(r"\1", value) for key, value in attributes.items() if value}
    child = ElementTree.SubElement(out, shape.tag, {**shown, "class": " ".join(classes)})
    if shape.tag == "text":
        child.text = "".join(shape.itertext())
