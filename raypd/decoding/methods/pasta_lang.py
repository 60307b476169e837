"""PASTA-LANG, the markup that a PASTA model writes ("Learning to Keep a Promise", section 3).

A lexer finds the tags in a text that grows token by token; `Written` combines what the threads
wrote.

    <promise topic="coordinates" tokens="20"/>   <async> ... </async>   <sync/>

A model's markup is not always well-formed. The lexer is lenient but warns, and it returns every
character of the text exactly once, in a tag or as text. A quoted value ends at the quote after
which the tag ends or the next attribute begins, so a topic may contain ">", "<", "/>" and quotes. A
known tag that is not closed within its line, within 256 characters, or (outside quotes) before the
next "<" is treated as text, and its characters after the "<" are read again. Text here is bytes
read as latin-1, one character per byte, because a token may contain only part of a character;
`readable` turns it into readable text.
"""

import html
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from raypd.decoding.text import Decode, GeneratedText

LONGEST_TAG = 256  # characters

# (slash before the name, name) -> the kind of the tag
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
    """A tag.

    Attributes:
        kind: promise, sync, open, close, stray (such as </promise>, which has no meaning), or cut,
            which is not markup but marks where a thread was cut.
        attributes: The values of the attributes, as written.
    """

    kind: str
    attributes: dict[str, str] = field(default_factory=dict)

    @property
    def topic(self) -> str:
        """The topic as readable text, with entities resolved."""
        return html.unescape(readable(self.attributes.get("topic", "")))

    def promised_length(
        self, number: int, otherwise: int, limit: int, warn: Callable[[str], None]
    ) -> int:
        """Return the positions that a promise announces (sections 3 and 6.2).

        They include its child's tags.

        Args:
            number: The number of the promise, from 1, for warnings.
            otherwise: The length if the promise gives none.
            limit: The maximum length.
            warn: Called with each flaw.
        """
        value = self.attributes.get("tokens")
        if value is None:
            warn(f"promise {number} has no tokens attribute: it is {otherwise}")
            return otherwise
        digits = value.strip(" \t\r").removeprefix("+").lstrip("0")
        if not (digits.isascii() and digits.isdigit()):
            warn(f"promise {number} promises {readable(value)!r} tokens: it is {otherwise}")
            return otherwise
        if int(digits) > limit:
            warn(
                f"promise {number} promises {digits} tokens: it is {limit}, as much as it may have"
            )
        return min(int(digits), limit)


@dataclass
class MarkupPiece:
    """A piece of the text: a tag, or text between tags."""

    text: str
    tag: Tag | None = None


def readable(text: str) -> str:
    """Return text from the lexer as Unicode; bytes that form no character become U+FFFD."""
    return text.encode("latin-1").decode("utf-8", "replace")


class Lexer:
    """Cuts a growing text into pieces.

    Attributes:
        warn: Called with every flaw of the markup.
        begun: A tag that has begun and not ended.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.warn = warn
        self.begun = ""

    def feed(self, text: str) -> list[MarkupPiece]:
        """Return the pieces that are complete with `text`.

        A tag is complete as soon as its ">" has been read.
        """
        pieces: list[MarkupPiece] = []
        unread = deque(text)
        while unread:
            char = unread.popleft()
            if not self.begun and char != "<":
                _append(pieces, MarkupPiece(char))
                continue
            self.begun += char
            tag = self._finished_tag()
            if tag is not None:
                pieces.append(MarkupPiece(self.begun, tag))
                self.begun = ""
            elif not self._may_be_tag():
                # Its "<" is text, and the characters after it are read again.
                _append(pieces, MarkupPiece("<"))
                unread.extendleft(reversed(self.begun[1:]))
                self.begun = ""
        return pieces

    def close(self) -> list[MarkupPiece]:
        """End the text and return what is left of it."""
        pieces: list[MarkupPiece] = []
        while self.begun:
            unread = self.begun
            self.begun = ""
            if _KNOWN.match(unread) or unread.startswith(("<pro", "<asy", "</asy", "<sy")):
                self.warn(f"the tag {readable(unread)!r} is not closed, so it is text")
            _append(pieces, MarkupPiece("<"))
            for piece in self.feed(unread[1:]):
                _append(pieces, piece)
        return pieces

    def _finished_tag(self) -> Tag | None:
        """Return the tag that the last character ended, or None."""
        if not self.begun.endswith(">"):
            return None
        begin = _BEGIN.match(self.begun)
        assert begin is not None
        if begin["name"] is None or self._is_unknown(begin):
            return None
        parsed = _parse(self.begun)
        if not parsed.ended:
            return None
        return self._tag(begin["slash"] == "/", begin["name"], parsed)

    def _is_unknown(self, begin: re.Match[str]) -> bool:
        """Return whether the name of the tag is complete and not one of PASTA-LANG."""
        return begin.end() < len(self.begun) and not _KNOWN.match(self.begun)

    def _may_be_tag(self) -> bool:
        """Return whether what has begun can still become a tag."""
        begin = _BEGIN.match(self.begun)
        assert begin is not None
        if begin["name"] is None:
            return self.begun in ("<", "</")
        before = self.begun[:-1]
        char = self.begun[-1]
        if char == ">" and self._is_unknown(begin):
            self.warn(f"{readable(self.begun)} is not a tag of PASTA-LANG, so it is text")
            return False
        is_known = _KNOWN.match(self.begun) is not None
        within_quotes = is_known and char == "<" and _parse(before).quoted
        if len(self.begun) <= LONGEST_TAG and char != "\n" and (char != "<" or within_quotes):
            return True
        if is_known:
            self.warn(f"the tag {readable(before)!r} is not closed, so it is text")
        return False

    def _tag(self, closing: bool, name: str, parsed: "_ParsedTag") -> Tag:
        kind = _KINDS.get((closing, name), "stray")
        text = readable(self.begun)
        is_single = kind in ("promise", "sync")
        if kind == "stray":
            self.warn(f"{text} means nothing and is left out")
        elif is_single and not parsed.slash:
            self.warn(f"{text} is taken as <{name}/>")
        elif parsed.junk or (parsed.slash and not is_single):
            self.warn(f"{text} is malformed and read as closely as possible")
        return Tag(kind, parsed.attributes)


@dataclass
class _ParsedTag:
    """What has been read of a tag.

    Attributes:
        junk: Whether characters that belong to no attribute were skipped.
        ended: Whether its ">" was read.
        slash: Whether it ends in "/>".
        quoted: Whether the text ends within a quoted value.
    """

    attributes: dict[str, str] = field(default_factory=dict)
    junk: bool = False
    ended: bool = False
    slash: bool = False
    quoted: bool = False


def _matched(pattern: re.Pattern[str], text: str, offset: int = 0) -> re.Match[str]:
    """Match a pattern that always matches."""
    match = pattern.match(text, offset)
    assert match is not None
    return match


def _parse(text: str) -> _ParsedTag:
    """Read the attributes of a tag that has begun, from its name to the end of `text`."""
    parsed = _ParsedTag()
    offset = _matched(_BEGIN, text).end()
    while True:
        offset = _matched(_SPACE, text, offset).end()
        if offset == len(text):
            return parsed
        end = _END.match(text, offset)
        if end is not None and end.end() == len(text):
            parsed.ended = True
            parsed.slash = end[1] == "/"
            return parsed
        attribute = _ATTRIBUTE.match(text, offset)
        if attribute is None:
            parsed.junk = True
            offset += 1
            continue
        offset = attribute.end()
        quote = text[offset : offset + 1]
        if quote in ('"', "'"):
            close = _closing_quote(text, offset + 1, quote)
            if close is None:
                # A quote that comes last may be the closing one.
                value = text[offset + 1 :].rstrip(" \t\r")
                parsed.quoted = not value.endswith(quote)
                return parsed
            value = text[offset + 1 : close]
            offset = close + 1
        else:
            value = _matched(_BARE, text, offset)[0]
            offset += len(value)
        parsed.attributes.setdefault(attribute[1], value)


def _closing_quote(text: str, begin: int, quote: str) -> int | None:
    """Return the offset of the quote that closes a value, which begins at `begin`."""
    offset = text.find(quote, begin)
    while offset >= 0:
        if _BEHIND_VALUE.match(text, offset + 1):
            return offset
        offset = text.find(quote, offset + 1)
    # Superfluous words may come between the quote and the end of the tag.
    last = text.rfind(quote, begin)
    if last >= 0 and text.endswith("/>"):
        return last
    return None


def _append(pieces: list[MarkupPiece], piece: MarkupPiece) -> None:
    """Append a piece; adjacent pieces of text are joined."""
    if pieces and pieces[-1].tag is None and piece.tag is None:
        pieces[-1].text += piece.text
    else:
        pieces.append(piece)


# Marks where a thread was cut instead of ending by itself.
CUT = MarkupPiece("", Tag("cut"))


@dataclass
class PastaThread:
    """A thread of an answer.

    Attributes:
        topic: What the child's promise says; None for the main thread.
        promised: The positions that the main thread skipped for the child.
        tokens: Its decoded tokens, including tags and end token.
        stopped: Whether it ended by itself (an end token, </async>) and was not closed or cut.
    """

    topic: str | None = None
    promised: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False


@dataclass
class PastaAnswer:
    """What PASTA decoded, with the counters of section 5.1.

    Attributes:
        text: The text without tags, with every child's content after its promise.
        raw: The same with tags.
        warnings: The flaws of the markup.
        threads: The main thread, then the children in the order of their promises.
        cut: The number of characters of `text` before the first place where a thread was cut; None
            if all ended.
        tokens: The number of tokens decoded in all threads.
        steps: The number of forward passes.
        longest_path: The largest number of tokens, including end token and tags, that had to be
            decoded one after the other.
        content_tokens: The number of decoded tokens that contain text and not only tags.
    """

    text: str
    raw: str
    warnings: list[str]
    threads: list[PastaThread]
    cut: int | None = None
    tokens: int = 0
    steps: int = 0
    longest_path: int = 0
    content_tokens: int = 0

    @property
    def parallelism(self) -> float:
        """Theoretical parallelism (section 5.1): content tokens per token of the longest path."""
        return self.content_tokens / self.longest_path if self.longest_path else 0.0

    def generated(self, decode: Decode) -> GeneratedText:
        counters: dict[str, Any] = {
            "threads": len(self.threads),
            "steps": self.steps,
            "longest_path": self.longest_path,
            "parallelism": self.parallelism,
        }
        return GeneratedText(
            self.text,
            cut=self.cut,
            tokens=self.tokens,
            logprobs=[logprob for thread in self.threads for logprob in thread.logprobs],
            raw=self.raw,
            counters=counters,
            warnings=self.warnings,
        )


@dataclass
class Written:
    """What a thread wrote: text, tags and, in the right places, what its children wrote.

    The first `undecoded` characters were not decoded: a child's <async>.
    """

    pieces: "list[MarkupPiece | Written]" = field(default_factory=list)
    undecoded: int = 0

    def ends_with_promise(self) -> bool:
        """Return whether only blanks come after the last child."""
        for piece in reversed(self.pieces):
            if isinstance(piece, Written):
                return True
            if piece.text.strip():
                return False
        return False

    def _in_order(self) -> Iterator[MarkupPiece]:
        for piece in self.pieces:
            if isinstance(piece, Written):
                yield from piece._in_order()
            else:
                yield piece

    def text(self) -> str:
        return _untagged(list(self._in_order()))

    def raw(self) -> str:
        return readable("".join(piece.text for piece in self._in_order()))

    def cut(self) -> int | None:
        """Return the number of characters before the first CUT; None if there is none."""
        pieces = list(self._in_order())
        if CUT not in pieces:
            return None
        return len(_untagged(pieces[: pieces.index(CUT)]))

    def content_tokens(
        self, tokens: Sequence[int], texts: Sequence[bytes], ends: Collection[int]
    ) -> int:
        """Count the thread's decoded tokens that contain text and not only tags.

        Tokens of its children do not count.

        Args:
            tokens: The tokens that the thread decoded.
            texts: The bytes of every token.
            ends: The ids that end a thread.
        """
        is_text: list[bool] = []  # of each character
        for piece in self.pieces:
            if isinstance(piece, MarkupPiece):
                is_text += [piece.tag is None] * len(piece.text)
        count = 0
        offset = self.undecoded
        for token in tokens:
            if token in ends or token >= len(texts):
                continue
            size = len(texts[token])
            count += any(is_text[offset : offset + size])
            offset += size
        return count


def _untagged(pieces: Sequence[MarkupPiece]) -> str:
    return readable("".join(piece.text for piece in pieces if piece.tag is None))
