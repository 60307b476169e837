"""Measure how many values two ways of decoding have in common, after normalising them.

A value that was truncated, ambiguous or invalid counts as different from every other value, so that
a setting does not look good because it truncates values. Values that are incomplete in the
reference are left out.
"""

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from raypd.estimation.profile import DocumentCost
from raypd.tasks import row_values
from raypd.text import counted

_Z = 1.96  # of a two-sided interval of 95%
_COMPLETE_STATUSES = ("ok", "null")
_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?$")
Judge = Literal["low", "share"]


@dataclass(frozen=True)
class NormalValue:
    text: str | None  # None if the document has no such value
    complete: bool  # neither truncated nor ambiguous nor invalid


# One mapping per document, from attribute or question to value; None if there is no answer.
Answers = Sequence[Mapping[str, NormalValue] | None]


@dataclass(frozen=True)
class Agreement:
    """How many values agree with the reference."""

    agree: int
    of: int  # values that were compared
    # Values that are incomplete in the reference, and documents without an answer in it.
    left_out: int = 0
    # Kish's design effect: the errors of the values of one document are correlated.
    alike: float = field(default=1.0, compare=False)

    @property
    def share(self) -> float:
        if not self.of:
            return math.nan
        return self.agree / self.of

    def interval(self) -> tuple[float, float]:
        """Return the 95% interval of the share (Wilson); (0, 1) if nothing was compared."""
        if not self.of:
            return 0.0, 1.0
        count = self.of / self.alike
        middle = self.share + _Z**2 / (2 * count)
        divisor = 1 + _Z**2 / count
        half_width = _Z * math.sqrt(self.share * (1 - self.share) / count + _Z**2 / (4 * count**2))
        low = max(0.0, (middle - half_width) / divisor)
        high = min(1.0, (middle + half_width) / divisor)
        return low, high

    def __str__(self) -> str:
        """Return, for example, 94.4% [90-97%] of 180 values."""
        if not self.of:
            return "no value to compare"
        low, high = self.interval()
        return f"{self.share:.1%} [{100 * low:.0f}-{high:.0%}] of {counted(self.of, 'value')}"


@dataclass(frozen=True)
class Floor:
    """The smallest share of values that must agree."""

    share: float
    by: Judge = "low"  # what must reach the floor: the low end of the interval, or the share itself

    def reached(self, agreement: Agreement) -> bool:
        """Return whether an agreement reaches the floor."""
        if self.by == "low":
            low, _ = agreement.interval()
            return low >= self.share
        return agreement.of > 0 and agreement.share >= self.share

    @property
    def needed(self) -> float:
        """The number of values that must be compared, and all agree, to reach the floor.

        It is infinite if no number of values suffices.
        """
        if self.by == "share":
            return 1
        if self.share >= 1:
            return math.inf
        return math.ceil(_Z**2 * self.share / (1 - self.share) - 1e-9)

    def judged(self, reference: Agreement) -> bool:
        """Return whether the reference has enough values to tell which settings reach the floor.

        Args:
            reference: The agreement of the reference with itself.
        """
        return self.share <= 0 or reference.of >= self.needed


def compare(reference: Answers, candidate: Answers) -> Agreement:
    """Compare a candidate's answers with those of the reference, document by document."""
    left_out = 0
    agree_counts: list[int] = []  # of each document with a value
    value_counts: list[int] = []
    for expected, actual in zip(reference, candidate, strict=True):
        if expected is None:
            left_out += 1
            continue
        values = {name: value for name, value in expected.items() if value.complete}
        left_out += len(expected) - len(values)
        if not values:
            continue
        answers = actual or {}
        agree_counts.append(sum(answers.get(name) == value for name, value in values.items()))
        value_counts.append(len(values))
    return Agreement(
        sum(agree_counts), sum(value_counts), left_out, _design_effect(agree_counts, value_counts)
    )


def _design_effect(agree_counts: Sequence[int], value_counts: Sequence[int]) -> float:
    """Return how much larger the share's variance is than with independent values."""
    documents = len(value_counts)
    agree = sum(agree_counts)
    total = sum(value_counts)
    if documents < 2 or not 0 < agree < total:
        return 1.0
    share = agree / total
    deviations = np.array(agree_counts) - share * np.array(value_counts)
    scatter = (deviations**2).sum() * documents / (documents - 1)
    return max(1.0, float(scatter / (share * (1 - share) * total)))


def values_of(cost: DocumentCost | None) -> dict[str, NormalValue] | None:
    """Return the values of a measured document; None if it failed or was not answered."""
    if cost is not None and cost.error is None and cost.rows:
        return normal_values(cost.rows)
    return None


def normal_values(rows: Iterable[Mapping[str, Any]]) -> dict[str, NormalValue]:
    """Return the normalised values of a document's output rows, by attribute or question."""
    values: dict[str, NormalValue] = {}
    for row in rows:
        for answer in row_values(row):
            complete = answer.status in _COMPLETE_STATUSES
            values[answer.key] = NormalValue(normal(answer.value), complete)
    return values


def normal(value: Any) -> str | None:
    """Normalise a value as text.

    Case, width, runs of spaces and punctuation around the value do not count, and 1,200.0 equals
    1200.
    """
    if value is None:
        return None
    text = unicodedata.normalize("NFKC", str(value)).casefold()
    text = " ".join(text.split()).strip(" \"'.,;:!?()[]")
    if _NUMBER.match(text):
        return f"{float(text.replace(',', '')):.12g}"
    return text
