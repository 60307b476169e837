"""Names and values that need no escapes in JSON."""

import re

PLAIN = "printable text without quotes and backslashes, and without blanks at either end"


def bare(key: str) -> str:
    """Return a key in lower case and without the marks between its words, to compare spellings."""
    return re.sub(r'[ _./"-]+', "", key).casefold()


def fits_json(text: str) -> bool:
    """Return whether a text needs no escape in a JSON string and has no blanks at its ends."""
    has_escaped = '"' in text or "\\" in text
    return text.isprintable() and not has_escaped and text == text.strip()
