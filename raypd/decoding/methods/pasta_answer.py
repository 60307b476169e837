"""What PASTA's threads wrote, put together: the text in reading order, and the counters of section 5.1."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from raypd.decoding.methods.pasta_lang import Piece, Tag, readable
from raypd.decoding.text import Decode, GeneratedText

CUT = Piece("", Tag("cut"))  # stands where a thread ended that did not come to its own end


@dataclass
class PastaThread:
    """What one thread decoded."""

    topic: str | None = None  # of a child: what its promise says
    promised: int = 0  # of a child: positions that the main thread skipped for it
    tokens: list[int] = field(default_factory=list)  # tags and end token among them
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False  # it came to its own end (end token, </async>); False when it was closed or cut


@dataclass
class PastaAnswer:
    """The text, put together in reading order."""

    text: str  # every child's content behind its promise, tags left out
    raw: str  # the same with tags
    warnings: list[str]
    threads: list[PastaThread]  # the main thread, then the children in the order of their promises
    cut: int | None = None  # characters of `text` in front of the first place where a thread was cut; None: all ended
    tokens: int = 0  # decoded in all threads
    steps: int = 0  # forward passes
    longest_path: int = 0  # most tokens that had to be decoded one after the other, end token and tags among them
    content_tokens: int = 0  # decoded tokens that hold text, not tags alone

    @property
    def parallelism(self) -> float:
        """Theoretical parallelism (section 5.1): content tokens a token of the longest path."""
        return self.content_tokens / self.longest_path if self.longest_path else 0.0

    def generated(self, decode: Decode) -> GeneratedText:
        counters: dict[str, Any] = {"threads": len(self.threads), "steps": self.steps}
        counters |= {"longest_path": self.longest_path, "parallelism": self.parallelism}
        logprobs = [logprob for thread in self.threads for logprob in thread.logprobs]
        return GeneratedText(self.text, self.cut, self.tokens, logprobs, self.raw, counters, self.warnings)


@dataclass
class Written:
    """What a thread wrote, in pieces of text and tags, one character a byte; the children's own where they belong."""

    pieces: list[Piece | Written] = field(default_factory=list)
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
        return len(readable("".join(piece.text for piece in pieces[: pieces.index(CUT)] if piece.tag is None)))

    def content_tokens(self, tokens: Sequence[int], texts: Sequence[bytes], ends: Collection[int]) -> int:
        """How many of the thread's decoded tokens hold text and not tags alone; its children's do not count."""
        pieces = [piece for piece in self.pieces if isinstance(piece, Piece)]
        is_text = [piece.tag is None for piece in pieces for _ in piece.text]
        count, offset = 0, self.undecoded
        for token in tokens:
            size = 0 if token in ends or token >= len(texts) else len(texts[token])
            count += any(is_text[offset : offset + size])
            offset += size
        return count
