"""The text of a value as JSON, from what was decoded of it.

The last token of a value often contains more than the value (`",`), and a value that was cut lacks
its end.
"""

import contextlib
import json
import re

from raypd.decoding.automata import DEAD, Automaton

# Up to the closing quote, a newline, or where the text was cut.
_STRING = re.compile(r' ?"(?:[^"\\\n]|\\.)*', re.DOTALL)
# Up to a comma that is not within a number, a brace or a newline. A dash may mean no cents, as in
# 1.299,-. Texts are bytes here, so that an en or em dash begins with E2.
_BARE = re.compile(r"(?:[^,}\n]|(?<=\d),(?=[\d\-=\xe2]))*")


def value_text(decoded: str, completion: str | None, automaton: Automaton) -> str:
    """Return the value in a decoded text, closed if it was cut.

    Args:
        decoded: The text of all tokens of the value.
        completion: The value, if it was determined before it was completely written.
        automaton: Reads the value; only a list needs it.
    """
    if completion is not None:
        return " " + completion if decoded.startswith(" ") else completion
    if decoded.lstrip(" ").startswith("["):
        return _list_text(decoded, automaton)
    string = _STRING.match(decoded)
    if string is not None:
        cut_within_escape = decoded[string.end() :] == "\\"
        return string.group() + ('\\\\"' if cut_within_escape else '"')
    bare = _BARE.match(decoded)
    assert bare is not None  # the pattern also matches an empty text
    return bare.group()


def _list_text(decoded: str, automaton: Automaton) -> str:
    """Return a JSON list up to its end; a list that was cut is closed after its last whole part."""
    state = 0
    end = 0
    while end < len(decoded) and not automaton.ended(state):
        state = automaton.next(state, decoded[end])
        if state == DEAD:
            break
        end += 1
    if state != DEAD and automaton.ended(state):
        return decoded[:end]
    for cut in range(end, 0, -1):
        for closing in ('"]', "]"):
            closed = decoded[:cut] + closing
            with contextlib.suppress(ValueError):
                json.loads(closed, strict=False)
                return closed
    return "[]"
