"""People as judges: the answers of two runs as a CSV file, and what people wrote into it.

The file does not say which answer is whose.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from raypd import storage
from raypd.errors import InputError
from raypd.report import page
from raypd.report.review import harmless

COLUMNS = ("id", "category", "request", "answer 1", "answer 2", "better")


@dataclass(frozen=True)
class Pair:
    """A document and what two runs answered."""

    id: str
    category: str
    request: str
    answer: str
    other_answer: str


@dataclass(frozen=True)
class Vote:
    """What people said of a pair: 1 if the first run's answer is better, -1 if worse, 0 a tie."""

    category: str
    better: int


def write(pairs: Iterable[Pair], file: str) -> None:
    """Write a line per pair.

    Args:
        pairs: The pairs, whose answers are put in a random order.
        file: The path of the file.

    Raises:
        RunError: If the file cannot be written.
    """
    out = io.StringIO()
    rows = csv.writer(out)
    rows.writerow(COLUMNS)
    for pair in pairs:
        answers = [pair.answer, pair.other_answer]
        if not _is_in_order(pair.id):
            answers.reverse()
        cells = [pair.id, pair.category, pair.request, *answers, ""]
        rows.writerow([harmless(cell) for cell in cells])
    page.put(storage.absolute(file), out.getvalue().encode("utf-8-sig"))


def read(file: str) -> tuple[dict[str, Vote], int]:
    """Read what people wrote.

    Args:
        file: The path of a file that `write` wrote.

    Returns:
        The votes by document id, and the number of lines without one.

    Raises:
        InputError: If the file cannot be read, or no line has a vote.
    """
    try:
        reader = csv.DictReader(io.StringIO(Path(file).read_text(encoding="utf-8-sig")))
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read: {error}") from None
    missing = set(COLUMNS) - set(reader.fieldnames or ())
    if missing:
        raise InputError(
            f"{file}:1: no column {', '.join(sorted(missing))}; give a file that --export wrote"
        )
    votes = {}
    skipped = 0
    for row in reader:
        word = (row["better"] or "").strip().lower()
        # A spreadsheet shows a text with an apostrophe before it as it is.
        id = row["id"].removeprefix("'")
        category = row["category"].removeprefix("'")
        if word == "":
            skipped += 1
        elif word == "tie":
            votes[id] = Vote(category, 0)
        elif word in ("1", "2"):
            is_first_run = (word == "1") == _is_in_order(id)
            votes[id] = Vote(category, 1 if is_first_run else -1)
        else:
            raise InputError(f"{file}:{reader.line_num}: {word!r}: write 1, 2 or tie, or nothing")
    if not votes:
        raise InputError(f"{file}: no line says which answer is better")
    return votes, skipped


def _is_in_order(id: str) -> bool:
    """Return whether answer 1 is the first run's.

    The order looks random in the file, and is the same in every call.
    """
    return hashlib.sha256(f"answer 1 {id}".encode()).digest()[0] % 2 == 0
