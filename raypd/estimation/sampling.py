"""A sample of the corpus that stands for it: documents drawn by category and by length, from units all over the plan.

Two phases (double sampling for stratification). The first scans units at equal distances along the plan, or all of a
small corpus, and notes of each document its category and its bytes. The second draws the few documents that are
decoded, in proportion, from every category, short and long.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raypd.config import ExtractionConfig, QuestionAnsweringConfig, RunConfig
from raypd.dataset import planner
from raypd.dataset.reader import read_unit
from raypd.errors import InputError
from raypd.estimation import estimator
from raypd.estimation.estimator import Array
from raypd.run.text import counted
from raypd.run.unit import Unit
from raypd.tasks.base import Document

SCANNED = 20_000  # documents that the first phase reads, about
_LEAST_UNITS, _MOST_UNITS = 8, 64
_LENGTHS = 4  # most strata by length within a category
_PER_STRATUM = 4  # documents that a stratum should have; two are the least that tell how much they differ
SEED = 0  # of all that is drawn: the same command draws the same documents and gives the same intervals
_UNREADABLE = "(cannot be read)"


@dataclass(frozen=True)
class ScannedDocument:
    """Where a document stands, and its stratum's features. unit: place in Scan.units; length: bytes of its text."""

    unit: int
    row: int
    category: str
    length: int


@dataclass
class Scan:
    """What the first phase found. documents: of the whole corpus, counted or estimated (see `estimator`).

    counts: documents of each of `units`.
    """

    units: list[Unit]
    counts: list[int]
    seen: list[ScannedDocument]
    documents: Array
    units_planned: int

    @property
    def whole(self) -> bool:
        """Whether every document was seen."""
        return len(self.units) == self.units_planned


@dataclass
class CorpusSample:
    """What was drawn. unreadable: scanned documents that cost nothing, as they are error rows.

    strata: the scanned documents of each, of one category and about one length. drawn: place in `strata` and in the
    corpus of each of `documents`, which are well mixed, so that every part of them is like the whole.
    """

    scan: Scan
    strata: list[list[ScannedDocument]]
    drawn: list[tuple[int, ScannedDocument]]
    documents: list[Document]
    unreadable: int


def draw(config: RunConfig, size: int, category: str | None = None) -> CorpusSample:
    """Plans the corpus and draws about `size` documents of it. category: that they are to be of; None: any.

    Raises:
        InputError: the corpus cannot be planned, or nothing of what was scanned can be read, or is of the category.
    """
    scanned = scan(config)
    readable = [member for member in scanned.seen if member.category != _UNREADABLE]
    if category is not None:
        there = sorted({member.category for member in readable})
        readable = [member for member in readable if member.category == category]
        if there and not readable:
            raise InputError(f"no document is of the category {category!r}; there are {', '.join(there[:20])}")
    if not readable:
        raise InputError(f"of {counted(len(scanned.seen), 'document')} looked at none can be read")
    strata = _stratify(readable, size)
    drawn = [(place, member) for place, (_, chosen) in enumerate(strata) for member in chosen]
    random.Random(SEED).shuffle(drawn)
    # The scan kept no document, so that its memory does not grow with their length: they are read again.
    places = {(member.unit, member.row) for _, member in drawn}
    read: dict[tuple[int, int], Document] = {}
    for unit in sorted({unit for unit, _ in places}):
        rows = enumerate(read_unit(scanned.units[unit], config))
        read |= {(unit, row): document for row, document in rows if (unit, row) in places}
    documents = [read[member.unit, member.row] for _, member in drawn]
    return CorpusSample(
        scanned, [members for members, _ in strata], drawn, documents, len(scanned.seen) - len(readable)
    )


def scan(config: RunConfig) -> Scan:
    """Plans the corpus and reads units at equal distances along the plan; those that cannot be read are left out.

    Raises InputError where the corpus cannot be planned, or none of the units can be read.
    """
    plan = planner.plan(config)
    places = _places(plan.units, max(1.0, plan.documents / max(plan.units, 1)))
    chosen: list[Unit] = []
    scanned: list[ScannedDocument] = []
    counts: list[int] = []
    problem: InputError | None = None
    for place, unit in enumerate(plan):
        if place not in places:
            continue
        try:
            documents_read = read_unit(unit, config)
        except InputError as error:
            problem = error
            continue
        scanned += [
            ScannedDocument(len(chosen), row, *kind_of(document, config)) for row, document in enumerate(documents_read)
        ]
        chosen.append(unit)
        counts.append(len(documents_read))
    if not scanned:
        raise problem or InputError("no unit of the input holds a document")
    if len(chosen) == plan.units or plan.exact:
        documents = estimator.exact(len(scanned) if len(chosen) == plan.units else plan.documents)
    else:  # a range of lines tells its bytes and not its documents
        rng = np.random.default_rng(SEED)
        documents = estimator.ratio(counts, [unit.bytes for unit in chosen], rng, plan.units) * plan.bytes
    return Scan(chosen, counts, scanned, documents, plan.units)


def _places(planned: int, per_unit: float) -> set[int]:
    """Places in the plan at equal distances from a random start: every object of some size is touched."""
    count = max(_LEAST_UNITS, min(_MOST_UNITS, math.ceil(SCANNED / per_unit)))
    if planned * per_unit <= SCANNED or planned <= count:
        return set(range(planned))
    start = random.Random(SEED).random()
    return {int((number + start) * planned / count) for number in range(count)}


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


def _stratify(
    scanned: Sequence[ScannedDocument], size: int
) -> list[tuple[list[ScannedDocument], list[ScannedDocument]]]:
    """Cuts documents into strata, in which rare categories share one, and draws `size` in proportion: (all, drawn)."""
    draws = random.Random(SEED)
    size = min(size, len(scanned))
    by_category: dict[str, list[ScannedDocument]] = {}
    for document in scanned:
        by_category.setdefault(document.category, []).append(document)
    groups = [by_category[name] for name in sorted(by_category, key=lambda name: (-len(by_category[name]), name))]
    common = max(1, size // 2) - 1
    if rare := [document for group in groups[common:] for document in group]:
        groups[common:] = [rare]
    strata = []
    for group, share in zip(groups, _allocate([len(group) for group in groups], size), strict=True):
        group.sort(key=lambda document: (document.length, document.unit, document.row))
        bins = max(1, min(_LENGTHS, share // _PER_STRATUM))
        cuts = [round(i * len(group) / bins) for i in range(bins + 1)]
        parts = [group[a:b] for a, b in itertools.pairwise(cuts)]
        for part, count in zip(parts, _allocate([len(part) for part in parts], share), strict=True):
            strata.append((part, draws.sample(part, count)))
    return strata


def _allocate(sizes: Sequence[int], size: int) -> list[int]:
    """Shares of `size` in proportion to `sizes`, at least two each where there are two (then more than `size`)."""
    total = sum(sizes)
    least = [min(2, n) for n in sizes]
    exact = [size * n / total for n in sizes]
    shares = [min(n, max(low, int(x))) for n, low, x in zip(sizes, least, exact, strict=True)]
    while sum(shares) != size:
        step = 1 if sum(shares) < size else -1
        movable = [i for i, n in enumerate(sizes) if (shares[i] < n if step > 0 else shares[i] > least[i])]
        if not movable:
            break
        shares[max(movable, key=lambda i: (exact[i] - shares[i]) * step)] += step  # the farthest from its exact share
    return shares
