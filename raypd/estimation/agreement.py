"""How far two ways to decode give the same values, normalised.

A value cut at its limit, ambiguous or not valid differs from anything: a setting must not look good
because it cuts. What the reference itself has not whole is left out.
"""

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from raypd.estimation.profile import DocumentCost
from raypd.tasks.columns import row_values
from raypd.text import counted

_Z = 1.96  # 95%, both sides
_WHOLE = ("ok", "null")  # statuses
_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?$")
Judge = Literal["low", "share"]


@dataclass(frozen=True)
class NormalValue:
    text: str | None  # None: the document has none
    complete: bool  # not cut, ambiguous or invalid


# Of each document, by what was asked; None: no answer.
Answers = Sequence[Mapping[str, NormalValue] | None]


@dataclass(frozen=True)
class Agreement:
    agree: int
    of: int  # values
    left_out: int = 0  # values, or documents without any, of which the reference has nothing whole
    # Kish's design effect: values of a document err together.
    alike: float = field(default=1.0, compare=False)

    @property
    def share(self) -> float:
        return self.agree / self.of if self.of else math.nan

    def interval(self) -> tuple[float, float]:
        """95% of the share (Wilson); 0 to 1 where there is nothing to go by."""
        if not self.of:
            return 0.0, 1.0
        count = self.of / self.alike
        middle = self.share + _Z**2 / (2 * count)
        by = 1 + _Z**2 / count
        half = _Z * math.sqrt(self.share * (1 - self.share) / count + _Z**2 / (4 * count**2))
        return max(0.0, (middle - half) / by), min(1.0, (middle + half) / by)

    def __str__(self) -> str:
        """94.4% [90-97%] of 180 values"""
        if not self.of:
            return "no value to compare"
        low, high = self.interval()
        return f"{self.share:.1%} [{100 * low:.0f}-{high:.0%}] of {counted(self.of, 'value')}"


@dataclass(frozen=True)
class Floor:
    """The least share of values that must agree."""

    share: float
    by: Judge = "low"  # what must reach it: the low end of the interval, or the share

    def reached(self, agreement: Agreement) -> bool:
        if self.by == "low":
            return agreement.interval()[0] >= self.share
        return agreement.of > 0 and agreement.share >= self.share

    @property
    def needed(self) -> float:
        """Values that must be compared, and all agree, before the floor can be reached; inf where
        none suffice.
        """
        if self.by == "share":
            return 1
        if self.share >= 1:
            return math.inf
        return math.ceil(_Z**2 * self.share / (1 - self.share) - 1e-9)

    def judged(self, reference: Agreement) -> bool:
        """Whether a reference (against itself) has values enough to tell whether the floor is
        reached.
        """
        return self.share <= 0 or reference.of >= self.needed


def compare(reference: Answers, candidate: Answers) -> Agreement:
    left_out = 0
    counts: list[tuple[int, int]] = []  # of each document: (values that agree, values)
    for expected, actual in zip(reference, candidate, strict=True):
        values = {name: value for name, value in (expected or {}).items() if value.complete}
        left_out += 1 if expected is None else len(expected) - len(values)
        counts.append(
            (sum((actual or {}).get(name) == value for name, value in values.items()), len(values))
        )
    rows = np.array([(0, 0), *(count for count in counts if count[1])])[1:]
    agree, of = map(int, rows.sum(0))
    alike = 1.0  # how much more the share scatters than that of independent values
    if 0 < agree < of and len(rows) > 1:
        share = agree / of
        scatter = ((rows[:, 0] - share * rows[:, 1]) ** 2).sum() * len(rows) / (len(rows) - 1)
        alike = max(1.0, float(scatter / (share * (1 - share) * of)))
    return Agreement(agree, of, left_out, alike)


def values_of(cost: DocumentCost | None) -> dict[str, NormalValue] | None:
    """What a measured document was answered with; None where it failed or was not done."""
    if cost is not None and cost.error is None and cost.rows:
        return normal_values(cost.rows)
    return None


def normal_values(rows: Iterable[Mapping[str, Any]]) -> dict[str, NormalValue]:
    answers = (answer for row in rows for answer in row_values(row))
    return {
        answer.key: NormalValue(normal(answer.value), answer.status in _WHOLE) for answer in answers
    }


def normal(value: Any) -> str | None:
    """Case, width and runs of spaces do not count, nor does punctuation around a value; 1,200.0 is
    1200.
    """
    if value is None:
        return None
    text = " ".join(unicodedata.normalize("NFKC", str(value)).casefold().split()).strip(
        " \"'.,;:!?()[]"
    )
    return f"{float(text.replace(',', '')):.12g}" if _NUMBER.match(text) else text
