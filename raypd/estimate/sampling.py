"""A sample of the corpus that stands for it: documents drawn by category and by length, from units all over the plan.

Two phases (double sampling for stratification). The first reads units at equal distances along the plan, which is in
the order of the objects, and notes of each document only its category and its bytes: this costs reading and no
decoding. The second draws the few documents that are decoded, in proportion, from every category, short and long. A
corpus that is small enough is read whole in the first phase, and then shares and count are known, not estimated.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raypd.config import ExtractionConfig, QuestionAnsweringConfig, RunConfig
from raypd.errors import InputError
from raypd.estimate.estimation import Mean, ratio
from raypd.run.unit import Unit

if TYPE_CHECKING:
    from raypd.dataset.plan import Plan
    from raypd.tasks.base import Document

LOOKED_AT = 20_000  # documents that the first phase reads, about
_LEAST_UNITS, _MOST_UNITS = 8, 64
_LENGTHS = 4  # most strata by length within a category
_PER_STRATUM = 4  # documents that a stratum should have; two are the least that tell how much they differ
UNREADABLE = "(cannot be read)"


@dataclass(frozen=True)
class Seen:
    """A document of the first phase: where it stands, and what puts it into a stratum. `length`: bytes of its text."""

    unit: int  # its unit's place in Look.units
    row: int
    category: str
    length: int


@dataclass
class Look:
    """What the first phase found.

    documents: of the whole corpus, counted or estimated. whole: every document was seen.
    """

    units: list[Unit]
    seen: list[Seen]
    documents: Mean
    units_planned: int

    @property
    def whole(self) -> bool:
        return len(self.units) == self.units_planned


@dataclass
class Stratum:
    """Documents of one category and about one length: those that the first phase saw, and those drawn of them."""

    category: str
    members: list[Seen]
    chosen: list[Seen]
    documents: list[Document] = field(default_factory=list)

    @property
    def population(self) -> int:
        return len(self.members)

    @property
    def mean_length(self) -> float:
        return sum(one.length for one in self.members) / len(self.members)


@dataclass
class Sample:
    """The drawn documents. `unreadable`: documents of the first phase that cost nothing, as they are error rows."""

    look: Look
    strata: list[Stratum]
    unreadable: int

    @property
    def documents(self) -> list[Document]:
        return [document for stratum in self.strata for document in stratum.documents]


def look(config: RunConfig, seed: int = 0) -> Look:
    """Plans the corpus and looks at it. Raises InputError where it cannot be planned or read."""
    from raypd.dataset import planner as units

    return first_phase(config, units.plan(config), seed)


def draw(config: RunConfig, size: int, seed: int = 0) -> Sample:
    """Plans the corpus and draws about `size` documents of it.

    Raises InputError where the corpus cannot be planned, or nothing in what was looked at can be read.
    """
    found = look(config, seed)
    readable = [one for one in found.seen if one.category != UNREADABLE]
    if not readable:
        raise InputError(f"none of the {len(found.seen)} documents that were looked at can be read")
    strata = stratify(readable, size, seed)
    _read_chosen(config, found, strata)
    return Sample(found, strata, len(found.seen) - len(readable))


# -------------------------------------------------------------------------------------------------------- first phase


def first_phase(config: RunConfig, plan: Plan, seed: int = 0) -> Look:
    """Reads units at equal distances along the plan; those that cannot be read are left out.

    Raises InputError where none can.
    """
    from raypd.dataset.reader import read_unit

    wanted = _places(plan.units, max(1.0, plan.documents / max(plan.units, 1)), seed)
    chosen: list[Unit] = []
    seen: list[Seen] = []
    counts: list[int] = []
    problem: InputError | None = None
    for place, unit in enumerate(plan):
        if place not in wanted:
            continue
        try:
            found = read_unit(unit, config)
        except InputError as error:
            problem = error
            continue
        seen += [Seen(len(chosen), row, *_kind_of(document, config)) for row, document in enumerate(found)]
        chosen.append(unit)
        counts.append(len(found))
    if not seen:
        raise problem or InputError("no unit of the input holds a document")
    if len(chosen) == plan.units:
        documents = Mean(len(seen))
    elif plan.exact:
        documents = Mean(plan.documents)
    else:  # a range of lines tells its bytes and not its documents
        documents = ratio(counts, [unit.bytes for unit in chosen], plan.units).times(plan.bytes)
    return Look(chosen, seen, documents, plan.units)


def _places(planned: int, per_unit: float, seed: int) -> set[int]:
    """Places in the plan at equal distances from a random start: every object of some size is touched."""
    count = max(_LEAST_UNITS, min(_MOST_UNITS, math.ceil(LOOKED_AT / per_unit)))
    if planned * per_unit <= LOOKED_AT or planned <= count:
        return set(range(planned))
    start = random.Random(seed).random()
    return {int((number + start) * planned / count) for number in range(count)}


def _kind_of(document: Document, config: RunConfig) -> tuple[str, int]:
    """(category, bytes of its text) of a document."""
    if document.error is not None:
        return UNREADABLE, 0
    category = ""
    if isinstance(config.task, ExtractionConfig):
        column = config.input.category_column
        named = document.fields.get(column) if column else None
        category = str(named if named is not None else config.input.category or "")
    texts = list(config.text_columns()) or list(config.wanted_columns().values())
    if isinstance(config.task, QuestionAnsweringConfig):
        texts.append(config.task.questions_column)
    return category, sum(len(str(document.fields.get(name) or "")) for name in texts)


# ----------------------------------------------------------------------------------------------------------- strata


def stratify(seen: Sequence[Seen], size: int, seed: int = 0) -> list[Stratum]:
    """Cuts documents into strata and draws `size` of them, in proportion but at least two a stratum where it has two.

    Categories too rare for documents of their own share a stratum.
    """
    draws = random.Random(seed)
    size = min(size, len(seen))
    by_category: dict[str, list[Seen]] = {}
    for one in seen:
        by_category.setdefault(one.category, []).append(one)
    groups = _merged(by_category, size, len(seen))
    shares = _allocate([len(group) for _, group in groups], size)
    strata: list[Stratum] = []
    for (category, group), share in zip(groups, shares, strict=True):
        group.sort(key=lambda one: (one.length, one.unit, one.row))
        bins = max(1, min(_LENGTHS, share // _PER_STRATUM))
        cuts = [round(i * len(group) / bins) for i in range(bins + 1)]
        parts = [group[a:b] for a, b in itertools.pairwise(cuts)]
        for part, count in zip(parts, _allocate([len(part) for part in parts], share), strict=True):
            strata.append(Stratum(category, part, draws.sample(part, count)))
    return strata


def _merged(by_category: dict[str, list[Seen]], size: int, total: int) -> list[tuple[str, list[Seen]]]:
    """The categories, the rare ones together once there are too many for two documents each."""
    ordered = sorted(by_category.items(), key=lambda item: (-len(item[1]), item[0]))
    kept = ordered[: max(1, size // 2)]
    rest = [one for _, group in ordered[len(kept) :] for one in group]
    if rest:
        name, last = kept.pop()
        kept.append(("(rare categories)" if name else name, last + rest))
    return [(name, list(group)) for name, group in kept]


def _allocate(sizes: Sequence[int], size: int) -> list[int]:
    """Shares of `size` in proportion to `sizes`, at least two each where there are two, together exactly `size`.

    Together they are more than `size` only where two each are.
    """
    total = sum(sizes)
    least = [min(2, n) for n in sizes]
    exact = [size * n / total for n in sizes]
    shares = [min(n, max(low, int(x))) for n, low, x in zip(sizes, least, exact, strict=True)]
    while sum(shares) != size:
        more = sum(shares) < size
        movable = [i for i, n in enumerate(sizes) if (shares[i] < n if more else shares[i] > least[i])]
        if not movable:
            break
        # the one that is farthest from its exact share
        i = max(movable, key=lambda i: (exact[i] - shares[i]) * (1 if more else -1))
        shares[i] += 1 if more else -1
    return shares


def _read_chosen(config: RunConfig, look: Look, strata: list[Stratum]) -> None:
    """Reads the drawn documents: the first phase kept none, so that its memory does not grow with their length."""
    from raypd.dataset.reader import read_unit

    chosen = {(one.unit, one.row) for stratum in strata for one in stratum.chosen}
    read: dict[tuple[int, int], Document] = {}
    for unit in sorted({unit for unit, _ in chosen}):
        for row, document in enumerate(read_unit(look.units[unit], config)):
            if (unit, row) in chosen:
                read[unit, row] = document
    for stratum in strata:
        stratum.documents = [read[one.unit, one.row] for one in stratum.chosen]


def ring_order(documents: Sequence[Document], seed: int = 0) -> list[Document]:
    """The documents well mixed, so that every stretch of them is like the whole."""
    mixed = list(documents)
    random.Random(seed).shuffle(mixed)
    return mixed


def around(documents: Sequence[Document], count: int) -> Iterator[tuple[int, Document]]:
    """`count` documents of an endless ring: (its number in the ring, the document)."""
    return itertools.islice(itertools.cycle(enumerate(documents)), count)


def first_of_each(documents: Iterable[Document], config: RunConfig) -> list[Document]:
    """One document a category, for the warm-up: each category has an instruction that is computed once."""
    firsts: dict[str, Document] = {}
    for document in documents:
        firsts.setdefault(_kind_of(document, config)[0], document)
    return list(firsts.values())
