"""From decoded text to typed, checked values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from raypd.config import Attribute

Status = Literal["ok", "null", "truncated", "invalid"]
_DECODER = json.JSONDecoder(strict=False)
_ZEROS = re.compile(r"^(-?)0+(?=\d)")  # 007 is no JSON, and would be read as 0
_NULLS = {"", "null", "none", "n/a"}


@dataclass
class Checked:
    """One value: `value` typed by its attribute, None unless `status` is ok or truncated; `raw` is what was decoded."""

    status: Status
    value: str | float | int | bool | None
    raw: str


def read_json(text: str, closed: bool = True) -> tuple[object, Status]:
    """The JSON scalar that `text` begins with; a string may end at a newline or, not `closed`, where it was cut."""
    text = text.lstrip()
    if not text.startswith('"'):
        try:
            value, _ = _DECODER.raw_decode(_ZEROS.sub(r"\1", text))
        except ValueError:
            return None, "invalid"
        if isinstance(value, (dict, list)):
            return None, "invalid"
        return value, "null" if value is None else "ok"
    end = _string_end(text)
    if end is not None and text[end] == '"':
        try:
            return json.loads(text[: end + 1], strict=False), "ok"
        except ValueError:  # an escape that JSON does not know, such as \d
            return text[1:end], "ok"
    body = text[1:end]
    return body.rstrip(), "ok" if closed else "truncated"


def _string_end(text: str) -> int | None:
    """Index of the closing quote or newline of a string that begins at 0."""
    at = 1
    while at < len(text):
        if text[at] == "\\":
            at += 2
            continue
        if text[at] in '"\n':
            return at
        at += 1
    return None


def check(attribute: Attribute, text: str, closed: bool = True) -> Checked:
    """A decoded value by its attribute's type."""
    value, status = read_json(text, closed)
    if status == "invalid":
        return Checked("invalid", None, text)
    if value is None or (isinstance(value, str) and value.strip().casefold() in _NULLS):
        return Checked("null", None, text)
    typed = _typed(attribute, value)
    if typed is None:
        return Checked("invalid", None, text)
    return Checked(status, typed, text)


def _typed(attribute: Attribute, value: object) -> str | float | int | bool | None:
    word = value if isinstance(value, str) else json.dumps(value)
    word = word.strip()
    if attribute.type == "number":
        if isinstance(value, bool) or not re.fullmatch(r"[-+]?\d+(\.\d*)?|[-+]?\.\d+", word):
            return None
        number = float(word)
        if not math.isfinite(number):
            return None
        return int(word) if re.fullmatch(r"[-+]?\d{1,15}", word) else number
    if attribute.type == "boolean":
        return {"true": True, "false": False, "yes": True, "no": False}.get(word.casefold())
    if attribute.type == "enum":
        return next((v for v in attribute.values if v.casefold() == word.casefold()), None)
    return word


def find_value(text: str, name: str) -> tuple[int, int, bool] | None:
    """Where in an autoregressive answer the value of key `name` stands: (start, end, closed); None if it does not."""
    key = re.search(re.escape(json.dumps(name, ensure_ascii=False)) + r"\s*:\s*", text)
    if key is None:
        # a model may write Model name as model_name
        words = r"[ _./-]*".join(map(re.escape, re.split(r"[ _./-]+", name)))
        key = re.search(rf'"{words}"\s*:\s*', text, re.IGNORECASE)
    if key is None:
        return None
    start = key.end()
    if text[start : start + 1] == '"':
        end = _string_end(text[start:])
        return (start, len(text), False) if end is None else (start, start + end + 1, True)
    end = start + len(re.match(r"[^,}\n]*", text[start:]).group())  # type: ignore[union-attr]
    return start, end, end < len(text)


class JsonObjectEnd:
    """Tells when an answer that begins inside a JSON object needs no more tokens; reads each token's text once.

    That is at its closing brace, at an end token, when every wanted key has its value, and when a key comes a second
    time (the first one counts; a small model may go round in circles). Call with all tokens so far, after each token.
    """

    def __init__(self, texts: Sequence[str], end_tokens: frozenset[int], wanted: Sequence[str]) -> None:
        self._texts, self._ends = texts, end_tokens
        self._wanted = {_bare(name) for name in wanted}
        self._keys: set[str] = set()
        self._read = 0
        self._depth = 1
        self._inside = self._escaped = self._after_colon = self._over = False
        self._word = ""

    def __call__(self, tokens: Sequence[int]) -> bool:
        for token in tokens[self._read :]:
            if token in self._ends:
                return True
            for char in self._texts[token]:
                self._next(char)
        self._read = len(tokens)
        return self._over

    def _next(self, char: str) -> None:
        if self._inside:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char in '"\n':
                self._inside = False
                self._after_colon &= char == '"' or self._depth > 1  # a string that was cut by the line is a value
            self._word += char
        elif char == '"':
            self._inside, self._word = True, ""
        elif char == ":" and self._depth == 1 and not self._after_colon:
            key = _bare(self._word)
            self._over |= key in self._keys
            self._keys.add(key)
            self._after_colon = True
        elif char in "{}":
            self._depth += 1 if char == "{" else -1
            self._over |= self._depth <= 0
        elif char in ",\n" and self._depth == 1 and self._after_colon:
            self._after_colon = False
            self._over |= self._wanted <= self._keys


def _bare(key: str) -> str:
    """A key without its case and what stands between its words."""
    return re.sub(r'[ _./"-]+', "", key).casefold()
