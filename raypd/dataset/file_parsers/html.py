"""HTML: the visible text."""

import re
from collections.abc import Iterable
from typing import Any

import lxml.etree
import lxml.html

# Elements of HTML whose text is not visible.
_INVISIBLE = ("title", "script", "style", "noscript", "template", "svg")
_LINES = re.findall(  # elements that begin a line
    r"\w+",
    "address article aside blockquote br dd div dl dt fieldset figcaption figure footer "
    "form h1 h2 h3 h4 h5 h6 header "
    "hr li main nav ol option p pre section table title tr ul",
)


def visible_text(text: str) -> str:
    """Return the visible text of an HTML page or fragment.

    Raises:
        ValueError: The HTML cannot be read; the text says why.
    """
    # libxml2 drops everything after these tags.
    text = re.sub(r"(?i)</(?:body|html)\s*>", "", text)
    parser = lxml.html.HTMLParser(
        remove_comments=True, remove_pis=True, huge_tree=True, encoding="utf-8"
    )
    try:
        page = lxml.etree.fromstring(text.encode(), parser)
    except lxml.etree.LxmlError as error:
        raise ValueError(f"the HTML cannot be read: {error}") from None
    if any(entry.type_name == "ERR_RESOURCE_LIMIT" for entry in parser.error_log):
        raise ValueError("the HTML cannot be read: its elements are nested more than 2048 deep")
    if page is None:
        return ""
    # The tree is not modified, because lxml does not accept control characters in new text.
    pieces = []
    walk: Any = lxml.etree.iterwalk(page, ("start", "end"))
    for event, element in walk:
        if element.tag in _LINES:
            pieces.append("\n")
        if event == "end":
            if element.tag in ("td", "th"):
                pieces.append(" ")
            pieces.append(element.tail or "")
        elif element.tag in _INVISIBLE:
            walk.skip_subtree()
        else:
            pieces.append(element.text or "")
    return in_lines("".join(pieces).splitlines())


def in_lines(texts: Iterable[str]) -> str:
    """Join texts as lines, without empty ones and with single spaces."""
    lines = (" ".join(text.split()) for text in texts)
    return "\n".join(line for line in lines if line)
