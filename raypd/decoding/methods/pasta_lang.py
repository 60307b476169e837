"""PASTA-LANG, the markup that a PASTA model writes ("Learning to Keep a Promise", section 3): a
lexer that finds tags in a text that grows token by token, and what the threads wrote, put together.

    <promise topic="coordinates" tokens="20"/>   <async> ... </async>   <sync/>

A model's markup is not always well-formed: the lexer is lenient, with warnings, and every character
of the text comes out of it once, in a tag or as text. A quoted value ends at the quote behind which
the tag ends or the next attribute begins: a topic may hold ">", "<", "/>" and quotes. A known tag
that is not closed within its line, 256 characters, or (outside quotes) before the next "<" is text,
and what stands in it is read again. Text here is bytes read as latin-1, one character a byte,
because a token may hold a part of a character; `readable` turns it into text for people.
"""

import html
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from raypd.decoding.text import Decode, GeneratedText

LONGEST_TAG = 256  # characters

# (slash in front of the name, name) -> how the tag is understood
_KINDS = {
    (False, "promise"): "promise",
    (False, "sync"): "sync",
    (False, "async"): "open",
    (True, "async"): "close",
}

_BEGIN = re.compile(r"<(?P<slash>/?)(?P<name>[A-Za-z][A-Za-z0-9_-]*)?")
_KNOWN = re.compile(r"</?(promise|async|sync)(?![A-Za-z0-9_-])")
_SPACE = re.compile(r"[ \t\r]*")
_END = re.compile(r"(/?)>")
_ATTRIBUTE = re.compile(r"([A-Za-z_][A-Za-z0-9_-]*)[ \t\r]*=[ \t\r]*")
_BARE = re.compile(r"(?:(?!/?>)[^ \t\r])*")
_BEHIND_VALUE = re.compile(r"[ \t\r]*/?>|[ \t\r]+[A-Za-z_][A-Za-z0-9_-]*[ \t\r]*=")


@dataclass
class Tag:
    # Promise, sync, open, close, stray (</promise>, of no use), or cut (no markup: where a thread
    # was cut)
    kind: str
    attributes: dict[str, str] = field(default_factory=dict)

    @property
    def topic(self) -> str:
        """The topic for people, its entities resolved."""
        return html.unescape(readable(self.attributes.get("topic", "")))

    def promised_length(
        self, number: int, otherwise: int, limit: int, warn: Callable[[str], None]
    ) -> int:
        """Positions that it says promise `number` (from 1) takes (sections 3 and 6.2), its child's
        tags among them.
        """
        value = self.attributes.get("tokens")
        digits = (value or "").strip(" \t\r").removeprefix("+").lstrip("0")
        if not (digits.isascii() and digits.isdigit()):
            problem = (
                "has no tokens attribute"
                if value is None
                else f"promises {readable(value)!r} tokens"
            )
            warn(f"promise {number} {problem}: it is {otherwise}")
            return otherwise
        if int(digits) > limit:
            warn(
                f"promise {number} promises {digits} tokens: it is {limit}, as much as it may have"
            )
        return min(int(digits), limit)


@dataclass
class Piece:
    """A piece of the text: a tag, or text between tags."""

    text: str
    tag: Tag | None = None


def readable(text: str) -> str:
    """Text of the lexer (one character a byte) as Unicode; bytes that are no character become
    U+FFFD.
    """
    return text.encode("latin-1").decode("utf-8", "replace")


class Lexer:
    """Cuts a growing text into pieces; `warn` is called with every flaw."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.warn = warn
        self.begun = ""  # a tag that has begun and not ended

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are complete with `text`.

        A tag is a piece as soon as its ">" is there.
        """
        pieces: list[Piece] = []
        todo = deque(text)
        while todo:
            char = todo.popleft()
            if not self.begun and char != "<":
                _add(pieces, Piece(char))
            elif isinstance(tag := self._grow(char), Tag):
                pieces.append(Piece(self.begun, tag))
                self.begun = ""
            elif not tag:  # its "<" was text; what stood behind it is read again
                _add(pieces, Piece("<"))
                todo.extendleft(reversed(self.begun[1:]))
                self.begun = ""
        return pieces

    def close(self) -> list[Piece]:
        """The text has ended: what is left of it."""
        pieces: list[Piece] = []
        while self.begun:
            unread, self.begun = self.begun, ""
            if _KNOWN.match(unread) or unread.startswith(("<pro", "<asy", "</asy", "<sy")):
                self.warn(f"the tag {readable(unread)!r} is not closed, so it is text")
            for piece in (Piece("<"), *self.feed(unread[1:])):
                _add(pieces, piece)
        return pieces

    def _grow(self, char: str) -> Tag | bool:
        """Adds a character to what may be a tag: the tag if it ends it; else whether it can still
        be one.
        """
        before, self.begun = self.begun, self.begun + char
        begin = _BEGIN.match(self.begun)
        assert begin is not None
        if begin["name"] is None:
            return self.begun in ("<", "</")
        known_tag = _KNOWN.match(self.begun)
        if char == ">" and not known_tag and begin.end() < len(self.begun):
            self.warn(f"{readable(self.begun)} is no tag of PASTA-LANG, so it is text")
            return False
        if char == ">" and (parsed := _read(self.begun)).ended:
            return self._tag(begin["slash"] == "/", begin["name"], parsed)
        if (
            char == "\n"
            or (char == "<" and not (known_tag and _read(before).quoted))
            or len(self.begun) > LONGEST_TAG
        ):
            if known_tag:
                self.warn(f"the tag {readable(before)!r} is not closed, so it is text")
            return False
        return True

    def _tag(self, closing: bool, name: str, parsed: "_ParsedTag") -> Tag:
        kind = _KINDS.get((closing, name), "stray")
        text = readable(self.begun)
        if kind == "stray":
            self.warn(f"{text} means nothing and is left out")
        elif kind in ("promise", "sync") and not parsed.slash:
            self.warn(f"{text} is taken as <{name}/>")
        elif parsed.junk or (kind in ("open", "close") and parsed.slash):
            self.warn(f"{text} is malformed and taken as well as can be")
        return Tag(kind, parsed.attributes)


@dataclass
class _ParsedTag:
    attributes: dict[str, str]
    junk: bool = False
    ended: bool = False
    slash: bool = False
    quoted: bool = False  # its end is inside a quoted value


def _read(text: str) -> _ParsedTag:
    """Reads the attributes of a tag that has begun, from its name to the end of `text`."""
    parsed, position = _ParsedTag({}), _BEGIN.match(text).end()  # type: ignore[union-attr]
    while True:
        position = _SPACE.match(text, position).end()  # type: ignore[union-attr]
        if position == len(text):
            return parsed
        if (end := _END.match(text, position)) is not None and end.end() == len(text):
            parsed.ended, parsed.slash = True, end[1] == "/"
            return parsed
        attribute = _ATTRIBUTE.match(text, position)
        if attribute is None:
            position, parsed.junk = position + 1, True
            continue
        position = attribute.end()
        quote = text[position : position + 1]
        if quote in ('"', "'"):
            close = _closing_quote(text, position + 1, quote)
            if close is None:
                value = text[position + 1 :].rstrip(" \t\r")
                # A quote that comes last may be the closing one.
                parsed.quoted = not value.endswith(quote)
                return parsed
            value, position = text[position + 1 : close], close + 1
        else:
            value = _BARE.match(text, position)[0]  # type: ignore[index]
            position += len(value)
        parsed.attributes.setdefault(attribute[1], value)


def _closing_quote(text: str, position: int, quote: str) -> int | None:
    first = position
    while (position := text.find(quote, position)) >= 0:
        if _BEHIND_VALUE.match(text, position + 1):
            return position
        position += 1
    last = text.rfind(quote, first)  # with words of no use behind it
    return last if last >= 0 and text.endswith("/>") else None


def _add(pieces: list[Piece], piece: Piece) -> None:
    if pieces and pieces[-1].tag is None and piece.tag is None:
        pieces[-1].text += piece.text
    else:
        pieces.append(piece)


# ------------------------------------------------------------------------- the answer, with the
# counters of section 5.1
CUT = Piece("", Tag("cut"))  # stands where a thread ended that did not come to its own end


@dataclass
class PastaThread:
    topic: str | None = None  # of a child: what its promise says
    promised: int = 0  # of a child: positions that the main thread skipped for it
    tokens: list[int] = field(default_factory=list)  # tags and end token among them
    logprobs: list[float] = field(default_factory=list)
    # It came to its own end (end token, </async>); False when it was closed or cut.
    stopped: bool = False


@dataclass
class PastaAnswer:
    text: str  # every child's content behind its promise, tags left out
    raw: str  # the same with tags
    warnings: list[str]
    threads: list[PastaThread]  # the main thread, then the children in the order of their promises
    # Characters of `text` in front of the first place where a thread was cut; None: all ended.
    cut: int | None = None
    tokens: int = 0  # decoded in all threads
    steps: int = 0  # forward passes
    # Most tokens that had to be decoded one after the other, end token and tags among them.
    longest_path: int = 0
    content_tokens: int = 0  # decoded tokens that hold text, not tags alone

    @property
    def parallelism(self) -> float:
        """Theoretical parallelism (section 5.1): content tokens a token of the longest path."""
        return self.content_tokens / self.longest_path if self.longest_path else 0.0

    def generated(self, decode: Decode) -> GeneratedText:
        counters: dict[str, Any] = {"threads": len(self.threads), "steps": self.steps}
        counters |= {"longest_path": self.longest_path, "parallelism": self.parallelism}
        logprobs = [logprob for thread in self.threads for logprob in thread.logprobs]
        return GeneratedText(
            self.text, self.cut, self.tokens, logprobs, self.raw, counters, self.warnings
        )


@dataclass
class Written:
    """What a thread wrote, in pieces of text and tags, one character a byte; the children's own
    where they belong.
    """

    pieces: "list[Piece | Written]" = field(default_factory=list)
    undecoded: int = 0  # characters at the beginning that were not decoded: a child's <async>

    def ends_with_promise(self) -> bool:
        """Whether nothing but blanks stands behind the last child."""
        for piece in reversed(self.pieces):
            if isinstance(piece, Written) or piece.text.strip():
                return isinstance(piece, Written)
        return False

    def _in_order(self) -> Iterator[Piece]:
        for piece in self.pieces:
            yield from piece._in_order() if isinstance(piece, Written) else [piece]

    def text(self) -> str:
        return readable("".join(piece.text for piece in self._in_order() if piece.tag is None))

    def raw(self) -> str:
        return readable("".join(piece.text for piece in self._in_order()))

    def cut(self) -> int | None:
        """Characters of the text in front of the first CUT; None where there is none."""
        pieces = list(self._in_order())
        if CUT not in pieces:
            return None
        return len(
            readable(
                "".join(piece.text for piece in pieces[: pieces.index(CUT)] if piece.tag is None)
            )
        )

    def content_tokens(
        self, tokens: Sequence[int], texts: Sequence[bytes], ends: Collection[int]
    ) -> int:
        """How many of the thread's decoded tokens hold text and not tags alone; its children's do
        not count.
        """
        pieces = [piece for piece in self.pieces if isinstance(piece, Piece)]
        is_text = [piece.tag is None for piece in pieces for _ in piece.text]
        count, offset = 0, self.undecoded
        for token in tokens:
            size = 0 if token in ends or token >= len(texts) else len(texts[token])
            count += any(is_text[offset : offset + size])
            offset += size
        return count
