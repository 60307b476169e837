"""How many positions a promise takes (PASTA, sections 3 and 6.2): what the main thread skips."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from raypd.decoding.methods.pasta_lang import Tag, readable


@dataclass
class Lengths:
    """The rule of a run.

    Args:
        rule: predicted: what the promise says (Pred-10X, and Pred-1X as well); fixed; or given lengths (oracle).
        most: more than that a child cannot take, so no promise does.
        warn: is called with every flaw of a promise.
    """

    rule: Literal["predicted", "fixed"] | Sequence[int]
    fixed: int
    most: int
    warn: Callable[[str], None]

    def of(self, tag: Tag, number: int, room: float) -> int:
        """Positions of promise `number` (from 1), of which `room` are left to the main thread."""
        if self.rule == "fixed":
            length = self.fixed
        elif self.rule == "predicted":
            length = self._predicted(tag, number)
        elif number <= len(self.rule):
            length = int(self.rule[number - 1])
        else:
            self.warn(f"no length is given for promise {number}: it is {self.fixed}")
            length = self.fixed
        if length >= room:
            self.warn(f"promise {number} passes the last position: it takes half of the {room} left")
            length = max(0, int(room) // 2)
        return length

    def _predicted(self, tag: Tag, number: int) -> int:
        said, length = tag.attributes.get("tokens"), tag.tokens
        if length is None:
            what = "has no tokens attribute" if said is None else f"promises {readable(said)!r} tokens"
            self.warn(f"promise {number} {what}: it is {self.fixed}")
            return self.fixed
        if length > self.most:
            self.warn(f"promise {number} promises {length} tokens: it is {self.most}, as much as it may have")
        return min(length, self.most)
