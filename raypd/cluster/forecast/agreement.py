"""How far two ways to decode give the same values: value by value, after normalisation.

A value that was cut at its limit or is not valid counts as different from anything, even where what there is of it is
the same: a setting must not look good because it cuts. Where the reference itself has no whole value there is nothing
to agree with, and the value is left out and counted as such.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raypd.cluster.forecast.clock import Cost


@dataclass(frozen=True)
class Said:
    """One value of one document, normalised; None is a value, too: the document does not say. whole: neither cut nor
    invalid."""

    text: str | None
    whole: bool


Answers = Sequence[Mapping[str, Said] | None]  # for each document {what was asked: what was said}; None: no answer


@dataclass(frozen=True)
class Agreement:
    """agree of `of` values; left_out: values, or documents without any, of which the reference says nothing whole."""

    agree: int
    of: int
    left_out: int = 0

    @property
    def share(self) -> float:
        return self.agree / self.of if self.of else math.nan


def compare(reference: Answers, other: Answers) -> Agreement:
    """The values of `other` against those of `reference`, document by document."""
    agree = of = left_out = 0
    for wanted, found in zip(reference, other, strict=True):
        if wanted is None:
            left_out += 1
            continue
        for name, said in wanted.items():
            if not said.whole:
                left_out += 1
                continue
            of += 1
            theirs = found.get(name) if found is not None else None
            agree += theirs is not None and theirs.whole and theirs.text == said.text
    return Agreement(agree, of, left_out)


def said_of(cost: Cost | None) -> dict[str, Said] | None:
    """What a measured document answered; None where it failed or was not done."""
    if cost is None or cost.error is not None or not cost.rows:
        return None
    found: dict[str, Said] = {}
    for row in cost.rows:
        if "values" in row:  # extraction
            for value in row["values"]:
                found[value["name"]] = Said(normal(value["value"]), value["status"] in ("ok", "null"))
        elif "question" in row:
            found[str(row["question_id"])] = Said(normal(row["answer"]), row["answer_status"] in ("ok", "null"))
        else:
            name = f"sample {row['sample']}, turn {row['turn']}"
            found[name] = Said(normal(row["text"]), row["finish_reason"] == "stop")
    return found


_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?$")


def normal(value: Any) -> str | None:
    """Case, width and runs of spaces do not count, nor does punctuation around a value; 1,200.0 is 1200."""
    if value is None:
        return None
    text = " ".join(unicodedata.normalize("NFKC", str(value)).casefold().split()).strip(" \"'.,;:!?()[]")
    if _NUMBER.match(text):
        return f"{float(text.replace(',', '')):.12g}"
    return text
