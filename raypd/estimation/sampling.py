"""Draw a representative sample of the corpus.

Units at equal distances along the plan are scanned for the category and the length of their
documents. The documents to decode are drawn in the order of category and length, again at equal
distances.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

import raypd.estimation.bootstrap as bootstrap
from raypd.config import ExtractionConfig, QuestionAnsweringConfig, RunConfig
from raypd.dataset import Plan, planner, read_unit
from raypd.errors import InputError
from raypd.run import LeftOutFiles, Unit
from raypd.tasks import Document
from raypd.text import counted

# The first phase reads about this many documents.
SCANNED = 20_000
_MIN_UNITS = 8
_MAX_UNITS = 64
# The seed is fixed, so the same command draws the same documents and prints the same intervals.
SEED = 0
_UNREADABLE = "(cannot be read)"


@dataclass(frozen=True, order=True)
class ScannedDocument:
    """Where a document is in the input; its first fields define the order of the corpus."""

    category: str
    length: int  # bytes of its text
    unit: int  # index into CorpusScan.units
    row: int


@dataclass
class CorpusScan:
    """The units that the first phase read."""

    units: list[Unit]
    counts: list[int]  # documents per unit
    scanned: list[ScannedDocument]
    documents: bootstrap.Array  # of the whole corpus, counted or estimated
    units_planned: int
    left_out: list[LeftOutFiles]  # files of the input that are not read
    # Notes on large objects that cannot be split.
    unsplit: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every document was scanned."""
        return len(self.units) == self.units_planned


@dataclass
class CorpusSample:
    """The drawn documents, shuffled, so that every part of them resembles the corpus."""

    scan: CorpusScan
    readable: list[ScannedDocument]  # in their order; unreadable documents become error rows
    readable_indices: list[int]  # the index in `readable` of each of `documents`
    documents: list[Document]

    @property
    def unreadable(self) -> int:
        return len(self.scan.scanned) - len(self.readable)


def draw(
    config: RunConfig, size: int, category: str | None = None, columns: Sequence[str] = ()
) -> CorpusSample:
    """Draw documents of the corpus.

    Args:
        config: The configuration, which names the input.
        size: Documents to draw; fewer if the corpus is smaller.
        category: Draw documents of this category only; None for all.
        columns: Columns to read in addition to those that the configuration names.

    Raises:
        InputError: If the input cannot be planned, or no such document is readable.
    """
    corpus = scan(config)
    readable = sorted(document for document in corpus.scanned if document.category != _UNREADABLE)
    if category is not None:
        categories = sorted({document.category for document in readable})
        readable = [document for document in readable if document.category == category]
        if categories and not readable:
            raise InputError(
                f"no document has the category {category!r}; the categories are "
                f"{', '.join(categories[:20])}"
            )
    if not readable:
        raise InputError(
            f"none of the {counted(len(corpus.scanned), 'document')} that were scanned can be read"
        )
    indices = equal_distances(min(size, len(readable)), len(readable))
    random.Random(SEED).shuffle(indices)
    documents = _read_documents(corpus, [readable[index] for index in indices], config, columns)
    return CorpusSample(corpus, readable, indices, documents)


def _read_documents(
    corpus: CorpusScan, drawn: list[ScannedDocument], config: RunConfig, columns: Sequence[str]
) -> list[Document]:
    """Read the drawn documents again.

    The scan keeps no document, so that its memory does not grow with the length of the documents.
    """
    positions = [(document.unit, document.row) for document in drawn]
    drawn_rows = set(positions)
    documents: dict[tuple[int, int], Document] = {}
    for unit in {unit for unit, _ in positions}:
        for row, document in enumerate(read_unit(corpus.units[unit], config, columns)):
            if (unit, row) in drawn_rows:
                documents[unit, row] = document
    return [documents[position] for position in positions]


def scan(config: RunConfig) -> CorpusScan:
    """Scan units at equal distances along the plan.

    Raises:
        InputError: If the input cannot be planned, or no unit can be read.
    """
    plan = planner.plan(config)
    unit_indices = _unit_indices(plan)
    units: list[Unit] = []
    scanned: list[ScannedDocument] = []
    last_error: InputError | None = None
    for unit_index, unit in enumerate(plan):
        if unit_index not in unit_indices:
            continue
        try:
            documents = read_unit(unit, config)
        except InputError as error:
            last_error = error
            continue
        for row, document in enumerate(documents):
            category, length = kind_of(document, config)
            scanned.append(ScannedDocument(category, length, len(units), row))
        units.append(unit)
    if not scanned:
        raise last_error or InputError("no unit of the input contains a document")
    counts = np.bincount([document.unit for document in scanned], minlength=len(units)).tolist()
    if len(units) == plan.units:
        total = bootstrap.exact(len(scanned))
    elif plan.exact:
        total = bootstrap.exact(plan.documents)
    else:
        # The plan knows the bytes of a range of lines, but not its documents.
        rng = np.random.default_rng(SEED)
        unit_bytes = [unit.bytes for unit in units]
        total = bootstrap.ratio(counts, unit_bytes, rng, plan.units) * plan.bytes
    return CorpusScan(units, counts, scanned, total, plan.units, plan.left_out, plan.unsplit)


def _unit_indices(plan: Plan) -> set[int]:
    """Choose the units to scan: all of a small corpus, else units at equal distances."""
    documents_per_unit = max(1.0, plan.documents / max(plan.units, 1))
    count = max(_MIN_UNITS, min(_MAX_UNITS, math.ceil(SCANNED / documents_per_unit)))
    if plan.units * documents_per_unit <= SCANNED or plan.units <= count:
        return set(range(plan.units))
    return set(equal_distances(count, plan.units))


def equal_distances(count: int, population: int) -> list[int]:
    """Return `count` indices below `population`, at equal distances from a random start."""
    start = random.Random(SEED).random()
    return [int((number + start) * population / count) for number in range(count)]


def kind_of(document: Document, config: RunConfig) -> tuple[str, int]:
    """Return the category of a document, and the bytes of its text."""
    if document.error is not None:
        return _UNREADABLE, 0
    category = ""
    if isinstance(config.task, ExtractionConfig):
        column = config.input.category_column
        value = document.fields.get(column) if column else None
        if value is None:
            value = config.input.category or ""
        category = str(value)
    texts = list(config.text_columns()) or list(config.wanted_columns().values())
    if isinstance(config.task, QuestionAnsweringConfig):
        texts += config.task.asked_columns
    return category, sum(len(str(document.fields.get(name) or "")) for name in texts)
