"""People as judges: answers of two runs as CSV, without a word of which is whose, and what people
wrote into it.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterable
from pathlib import Path

from raypd import storage
from raypd.errors import InputError
from raypd.report import page
from raypd.report.review import harmless

COLUMNS = ("id", "category", "request", "answer 1", "answer 2", "better")


def write(pairs: Iterable[tuple[str, str, str, str, str]], file: str) -> None:
    """A line for each (id, category, request, our answer, theirs).

    Raises RunError: the file cannot be written.
    """
    out = io.StringIO()
    rows = csv.writer(out)
    rows.writerow(COLUMNS)
    for id, category, request, *answers in pairs:
        answers = answers if _ours_first(id) else answers[::-1]
        rows.writerow([harmless(cell) for cell in (id, category, request, *answers, "")])
    page.put(storage.absolute(file), out.getvalue().encode("utf-8-sig"))


def read(file: str) -> tuple[dict[str, tuple[str, int]], int]:
    """Id -> (category, 1: ours is better, -1: theirs, 0: a tie); how many lines say nothing.

    Raises InputError.
    """
    try:
        reader = csv.DictReader(io.StringIO(Path(file).read_text(encoding="utf-8-sig")))
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read: {error}") from None
    if missing := set(COLUMNS) - set(reader.fieldnames or ()):
        raise InputError(
            f"{file}:1: no column {', '.join(sorted(missing))}; give a file that --export wrote"
        )
    people, skipped = {}, 0
    for row in reader:
        verdict, id = (row["better"] or "").strip().lower(), row["id"].removeprefix("'")
        if verdict not in ("", "1", "2", "tie"):
            raise InputError(
                f"{file}:{reader.line_num}: {verdict!r}: write 1, 2 or tie, or nothing"
            )
        if verdict:
            better = 0 if verdict == "tie" else 1 if (verdict == "1") == _ours_first(id) else -1
            people[id] = row["category"].removeprefix("'"), better
        skipped += not verdict
    if not people:
        raise InputError(f"{file}: no line says which answer is better")
    return people, skipped


def _ours_first(id: str) -> bool:
    """A coin for each document, which nobody guesses from the file and every later call throws
    alike.
    """
    return hashlib.sha256(f"answer 1 {id}".encode()).digest()[0] % 2 == 0
