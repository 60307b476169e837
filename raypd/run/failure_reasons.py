"""Why documents failed: reasons in the words of the rows, and kinds of reasons that can be counted.

Reasons that differ only in numbers and locations are of one kind.
"""

import codecs
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import raypd.run.read as read
from raypd.config import RunConfig

# Kinds of reasons that a unit's summary counts; further ones are counted together.
_MAX_KINDS = 50
OTHER = "(other reasons)"
# Numbers, with the words that show whether they are the same for all documents of a run: the name
# of an encoding, a limit, and the value of a key of the configuration.
_NUMBERS = re.compile(
    r"\b(?P<encoding>[A-Za-z]+(?:[-_]?\d+)+)\b"
    r"|(?P<limit>\b(?:more than|over|at most|up to|larger than|longer than|within) \d+(?:[.,]\d+)*)"
    rf"|(?P<key>\b(?:{'|'.join(RunConfig.model_fields)})(?:\.[a-z_]+)+"
    r"(?: is |, | |: |=)\d+(?:[.,]\d+)*)"
    r"|\d+(?:[.,]\d+)*"
)


@dataclass
class FailureReason:
    """A kind of reason, and the documents of a unit that failed because of it.

    A document that failed for several kinds of reasons is counted in each of them.
    """

    reason: str
    documents: int = 0
    can_change: bool = True  # whether a retry may help


@dataclass
class FailureCounts:
    """The failed documents of a unit by kind of reason."""

    reasons: list[FailureReason]
    retriable: int  # documents that a retry may help


def count(rows: Iterable[Mapping[str, Any]]) -> FailureCounts:
    """Count the failed documents of a unit by kind of reason.

    Args:
        rows: Error rows with the columns source, row and error.
    """
    kinds: dict[str, FailureReason] = {}
    retriable = 0
    for document_rows in read.by_document(rows).values():
        retriable += any(not of_input(row["source"], row["error"]) for row in document_rows)
        changes: dict[str, bool] = {}
        for row in document_rows:
            kind = normalize(row["source"], row["error"])
            can_change = not of_input(row["source"], row["error"])
            if kind not in kinds and len(kinds) >= _MAX_KINDS:
                kind = OTHER
                can_change = True
            changes.setdefault(kind, can_change)
        for kind, can_change in changes.items():
            kinds.setdefault(kind, FailureReason(kind, can_change=can_change)).documents += 1
    return FailureCounts(list(kinds.values()), retriable)


def of_input(source: str, reason: str | None) -> bool:
    """Return whether the input caused a failure, so that a retry cannot help.

    Such reasons start with the location in the input (`name:13: `).
    """
    return _location(source).match(reason or "") is not None


@lru_cache(maxsize=64)
def _location(source: str) -> re.Pattern[str]:
    """Return a pattern of the locations within a source, as reasons start with them."""
    return re.compile("^" + re.escape(source) + r"(?:(?::|, line |, row |, byte )\d+)?: ")


def normalize(source: str, reason: str | None) -> str:
    """Remove the location, the numbers and the addresses of a reason, so that similar ones are
    equal. Limits and names of encodings stay: they are the same for all documents of a run.

    >>> normalize("a.jsonl", "a.jsonl:13: not JSON: Expecting ',' delimiter: line 1 column 30 (char
        29)")
    "not JSON: Expecting ',' delimiter: line N column N (char N)"
    """
    text = _location(source).sub("", (reason or "").strip())
    lines = [line for line in text.splitlines() if line.strip()] or ["no reason"]
    line = lines[0]
    if text.startswith("Traceback"):
        line = lines[-1]
    line = re.sub(r"0x[0-9a-fA-F]+|\b[0-9a-f]{12,}\b", "X", line)
    return _NUMBERS.sub(_masked, line)[:300]


def _masked(match: re.Match[str]) -> str:
    """Return a number as N, unless it is part of the advice in the reason."""
    if match["limit"] or match["key"]:
        return match[0]
    if match["encoding"]:
        try:
            codecs.lookup(match["encoding"])
        except LookupError:
            return re.sub(r"\d+", "N", match[0])
        return match[0]
    return "N"
