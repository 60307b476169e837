"""Names and values that JSON writes as they are."""

import re

PLAIN = "printable text without quotes and backslashes, and without blanks at either end"


def bare(key: str) -> str:
    """A key without its case and the marks between its words, as a model may write it."""
    return re.sub(r'[ _./"-]+', "", key).casefold()


def fits_json(text: str) -> bool:
    """Whether a JSON string needs no escape for a text, and the text has no blanks at its ends."""
    has_escaped = '"' in text or "\\" in text
    return text.isprintable() and not has_escaped and text == text.strip()
