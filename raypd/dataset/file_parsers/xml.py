"""XML: an outline of the elements and their text."""

from collections.abc import Iterator
from typing import Any

import lxml.etree

from raypd.dataset.file_parsers.html import in_lines

_MAX_INDENT = 16  # levels; a line of a deeper element is indented no further


def xml_text(data: bytes) -> str:
    """Return a line for each element that has text or attributes, indented by its depth.

    An element with text becomes `name: text`, or with attributes `name (key=value): text`. Markup
    inside a sentence is part of the sentence. Names have no namespaces.

    Raises:
        ValueError: The file cannot be read; the text says why.
    """
    parser = lxml.etree.XMLParser(
        resolve_entities="internal",
        no_network=True,
        load_dtd=False,
        remove_comments=True,
        remove_pis=True,
    )
    try:
        # Some programs write blanks before the declaration, which no parser allows.
        root = lxml.etree.fromstring(data.lstrip(b" \t\r\n"), parser)
    except (lxml.etree.LxmlError, ValueError) as error:
        raise ValueError(f"the XML cannot be read: {error}") from None
    return "\n".join(_outline(root))


def _outline(root: Any) -> Iterator[str]:
    """Yield the lines of a tree, without recursion."""
    depth = 0
    walk: Any = lxml.etree.iterwalk(root, ("start", "end"))
    for event, element in walk:
        if event == "end":
            depth -= 1
            continue
        indent = "  " * min(depth, _MAX_INDENT)
        depth += 1
        label = _label(element)
        if len(element) == 0 or _is_sentence(element):
            text = in_lines([" ".join("".join(element.itertext()).split())])
            walk.skip_subtree()
            if text:
                yield f"{indent}{label}: {text}"
            elif element.attrib:
                yield f"{indent}{label}"
        else:
            yield f"{indent}{label}:"


def _is_sentence(element: Any) -> bool:
    """Return whether text and elements alternate in an element, as in a paragraph with markup."""
    if (element.text or "").strip():
        return True
    return any((child.tail or "").strip() for child in element)


def _label(element: Any) -> str:
    """Return an element's name and attributes, without those of XML Schema."""
    attributes = []
    for name, value in element.attrib.items():
        qualified = lxml.etree.QName(name)
        if qualified.namespace != "http://www.w3.org/2001/XMLSchema-instance":
            attributes.append(f"{qualified.localname}={value}")
    name = lxml.etree.QName(element).localname
    if attributes:
        return f"{name} ({', '.join(attributes)})"
    return name
