"""A sample of the corpus that stands for it.

Units at equal distances along the plan are scanned for each document's category and bytes; in the
order of these the documents to decode are drawn, at equal distances again.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raypd.config import ExtractionConfig, QuestionAnsweringConfig, RunConfig
from raypd.dataset import planner, read_unit
from raypd.errors import InputError
from raypd.estimation import bootstrap
from raypd.run.left_out import LeftOutFiles
from raypd.run.unit import Unit
from raypd.tasks.base import Document
from raypd.text import counted

SCANNED = 20_000  # documents that the first phase reads, about
_LEAST_UNITS = 8
_MOST_UNITS = 64
# Of all that is drawn: the same command draws the same documents and gives the same intervals.
SEED = 0
_UNREADABLE = "(cannot be read)"


@dataclass(frozen=True, order=True)
class ScannedDocument:
    """Where a document stands, and what orders it."""

    category: str
    length: int  # bytes of its text
    unit: int  # place in Scan.units
    row: int


@dataclass
class Scan:
    units: list[Unit]
    counts: list[int]  # documents of each
    scanned: list[ScannedDocument]
    documents: bootstrap.Array  # of the whole corpus, counted or estimated
    units_planned: int
    left_out: list[LeftOutFiles]  # files of the input that are not read

    @property
    def whole(self) -> bool:
        """Whether every document was seen."""
        return len(self.units) == self.units_planned


@dataclass
class CorpusSample:
    """What was drawn, well mixed, so that every part of it is like the corpus."""

    scan: Scan
    readable: list[ScannedDocument]  # in their order; the others are error rows
    places: list[int]  # in `readable`, of each of `documents`
    documents: list[Document]

    @property
    def unreadable(self) -> int:
        return len(self.scan.scanned) - len(self.readable)


def draw(
    config: RunConfig, size: int, category: str | None = None, columns: Sequence[str] = ()
) -> CorpusSample:
    """Draws documents of the corpus, or of a category. columns: to be read beside those that the
    configuration names. Raises InputError: no plan, or no such document is readable.
    """
    corpus = scan(config)
    readable = sorted(member for member in corpus.scanned if member.category != _UNREADABLE)
    if category is not None:
        there = sorted({member.category for member in readable})
        readable = [member for member in readable if member.category == category]
        if there and not readable:
            raise InputError(
                f"no document is of the category {category!r}; there are {', '.join(there[:20])}"
            )
    if not readable:
        raise InputError(
            f"of {counted(len(corpus.scanned), 'document')} looked at none can be read"
        )
    places = equal_distances(min(size, len(readable)), len(readable))
    random.Random(SEED).shuffle(places)
    # The scan kept no document, so that its memory does not grow with their length: they are read
    # again.
    drawn = [(readable[place].unit, readable[place].row) for place in places]
    read: dict[tuple[int, int], Document] = {}
    for unit in {unit for unit, _ in drawn}:
        read |= {
            (unit, row): document
            for row, document in enumerate(read_unit(corpus.units[unit], config, columns))
            if (unit, row) in drawn
        }
    return CorpusSample(corpus, readable, places, [read[place] for place in drawn])


def scan(config: RunConfig) -> Scan:
    """Reads units at equal distances along the plan.

    Raises InputError: it cannot be planned, or none can be read.
    """
    plan = planner.plan(config)
    per_unit = max(1.0, plan.documents / max(plan.units, 1))
    count = max(_LEAST_UNITS, min(_MOST_UNITS, math.ceil(SCANNED / per_unit)))
    complete = plan.units * per_unit <= SCANNED or plan.units <= count
    # Every object of some size.
    places = set(range(plan.units) if complete else equal_distances(count, plan.units))
    chosen: list[Unit] = []
    scanned: list[ScannedDocument] = []
    problem: InputError | None = None
    for place, unit in enumerate(plan):
        if place not in places:
            continue
        try:
            batch = read_unit(unit, config)
        except InputError as error:
            problem = error
            continue
        scanned += [
            ScannedDocument(*kind_of(document, config), len(chosen), row)
            for row, document in enumerate(batch)
        ]
        chosen.append(unit)
    if not scanned:
        raise problem or InputError("no unit of the input holds a document")
    counts = np.bincount([document.unit for document in scanned], minlength=len(chosen)).tolist()
    if len(chosen) == plan.units or plan.exact:
        documents = bootstrap.exact(len(scanned) if len(chosen) == plan.units else plan.documents)
    else:  # a range of lines tells its bytes and not its documents
        rng = np.random.default_rng(SEED)
        documents = (
            bootstrap.ratio(counts, [unit.bytes for unit in chosen], rng, plan.units) * plan.bytes
        )
    return Scan(chosen, counts, scanned, documents, plan.units, plan.left_out)


def equal_distances(count: int, population: int) -> list[int]:
    """`count` places of `population` at equal distances from a random start."""
    start = random.Random(SEED).random()
    return [int((number + start) * population / count) for number in range(count)]


def kind_of(document: Document, config: RunConfig) -> tuple[str, int]:
    """(category, bytes of its text) of a document."""
    if document.error is not None:
        return _UNREADABLE, 0
    category = ""
    if isinstance(config.task, ExtractionConfig):
        column = config.input.category_column
        named = document.fields.get(column) if column else None
        category = str(named if named is not None else config.input.category or "")
    texts = list(config.text_columns()) or list(config.wanted_columns().values())
    if isinstance(config.task, QuestionAnsweringConfig):
        texts.append(config.task.questions_column)
    return category, sum(len(str(document.fields.get(name) or "")) for name in texts)
