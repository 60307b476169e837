"""A matplotlib figure as a small inline SVG that takes its colours and its font from the page.

matplotlib writes colours and fonts into every element. Here colours become class names (`f-busy`, `s-grid`), so that
the page's CSS paints them in the light, in the dark and on paper, and inline styles go, so that the page's
Content-Security-Policy can forbid them.
"""

from __future__ import annotations

import io
import re
import warnings
from xml.etree import ElementTree

from matplotlib.figure import Figure

# The values only have to differ: the page's CSS says what the colour of a role looks like.
_NAMES = ("ink", "muted", "grid", "accent", "wash", "busy", "startup", "idle", "lost", "budget", "surface")
ROLES = {name: f"#{number:02x}{number:02x}{number:02x}" for number, name in enumerate(_NAMES, 1)}
_CLASS = {color: role for role, color in ROLES.items()}
_SVG = "http://www.w3.org/2000/svg"
_LONG = re.compile(r"(-?\d+\.\d)\d+")


def inline(figure: Figure, name: str, title: str, description: str) -> str:
    """The figure as an <svg> element whose size is its viewBox; one unit of it is one CSS pixel at full width.

    name: unique on the page, with letters, digits and dashes. title, description: what a screen reader says.
    """
    buffer = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # glyphs that matplotlib's own font lacks: the page's fonts draw the text
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    drawn = ElementTree.fromstring(buffer.getvalue())
    ElementTree.register_namespace("", _SVG)
    attributes = {"viewBox": drawn.get("viewBox", ""), "role": "img", "aria-labelledby": f"{name}-t {name}-d"}
    out = ElementTree.Element(f"{{{_SVG}}}svg", attributes)
    for tag, text in (("title", title), ("desc", description)):
        ElementTree.SubElement(out, f"{{{_SVG}}}{tag}", id=f"{name}-{tag[0]}").text = text
    defined = {shape for defs in drawn.iter(f"{{{_SVG}}}defs") for shape in defs.iter()}
    for shape in drawn.iter():
        kind = shape.tag.removeprefix(f"{{{_SVG}}}")
        if kind in ("path", "text", "rect") and shape not in defined:
            _append(out, shape, kind)
    return ElementTree.tostring(out, encoding="unicode")


def _append(out: ElementTree.Element, shape: ElementTree.Element, kind: str) -> None:
    style = dict(part.split(":", 1) for part in shape.get("style", "").split(";") if ":" in part)
    style = {key.strip(): value.strip() for key, value in style.items()}
    classes = [
        f"{short}-{_CLASS[style[key]]}" for key, short in (("fill", "f"), ("stroke", "s")) if style.get(key) in _CLASS
    ]
    if kind != "text" and not classes:
        return  # the background, and what has no colour
    child = ElementTree.SubElement(out, f"{{{_SVG}}}{kind}")
    if kind == "text":
        classes = classes or ["f-ink"]
        _text(child, shape, style, classes)
    else:
        child.set("d", _short(" ".join((shape.get("d") or "").split())))
        if style.get("fill", "none") == "none":
            child.set("fill", "none")
        for key in ("stroke-width", "stroke-dasharray"):
            if key in style and any(c.startswith("s-") for c in classes):
                child.set(key, _short(style[key]))
    child.set("class", " ".join(classes))


def _text(child: ElementTree.Element, shape: ElementTree.Element, style: dict[str, str], classes: list[str]) -> None:
    font = " ".join(style.get(key, "") for key in ("font", "font-size", "font-weight"))
    if size := re.search(r"([\d.]+)px", font):
        child.set("font-size", size.group(1))
    if re.search(r"\b(bold|600|700)\b", font):
        classes.append("strong")
    if "text-anchor" in style:
        child.set("text-anchor", style["text-anchor"])
    for key in ("x", "y", "transform"):
        value = shape.get(key)
        if value and not value.startswith("rotate(-0 "):
            child.set(key, _short(value))
    child.text = "".join(shape.itertext())


def _short(numbers: str) -> str:
    """With one digit behind the point, which is a tenth of a pixel."""
    return _LONG.sub(r"\1", numbers)
