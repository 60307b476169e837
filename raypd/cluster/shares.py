"""Shares of a unit that a worker lends to others at the end of a run: how they are cut, and what comes back.

A share is groups of rows. A group is the rows of one work (of several where works have rows in common), and whoever
borrows it plans it by itself: so the same documents stand in a prompt together, and answers do not depend on who
decodes them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # the pool, which asks for shares, has nothing to do with tasks
    from raypd.tasks.base import Record, Request

Groups = list[list[int]]


class Progress(NamedTuple):
    """How far a worker is with a unit or a share.

    answered, failed: documents, those that came back from others among them. left: documents in its own hands. needs:
    seconds until it has answered these, at its pace so far; None where there is no pace yet.
    """

    answered: int = 0
    failed: int = 0
    begun: bool = False
    left: int = 0
    needs: float | None = None


@dataclass
class Answer:
    """What became of a share: its records, and what the unit's summary tells of it.

    busy: seconds of the engine. categories: tokens and seconds of each, without documents, which the lender counts.
    """

    records: list[Record]
    counts: dict[str, int]
    busy: float
    categories: dict[str, dict[str, float]] = field(default_factory=dict)


def together(own: Answer, others: Iterable[Answer]) -> Answer:
    """A worker's own part and those that came back from others as one."""
    whole = Answer(list(own.records), dict(own.counts), own.busy, {name: dict(c) for name, c in own.categories.items()})
    for other in others:
        whole.records += other.records
        whole.busy += other.busy
        _add(whole.counts, other.counts)
        for name, counts in other.categories.items():
            _add(whole.categories.setdefault(name, {}), counts)
    return whole


def _add(total: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        total[name] = total.get(name, 0) + value


def rows_of(works: Iterable[Request]) -> set[int]:
    return {row for work in works for row in work.rows}


def groups_of(works: Iterable[Request], begun: Container[int]) -> list[list[Request]]:
    """Works in groups that have no row in common, in their order; without the groups of which any row is begun."""
    groups: dict[int, list[Request]] = {}
    of_row: dict[int, int] = {}
    for number, work in enumerate(works):
        joined = sorted({of_row[row] for row in work.rows if row in of_row})
        groups[number] = [*(own for place in joined for own in groups.pop(place)), work]
        for row in rows_of(groups[number]):
            of_row[row] = number
    return [group for group in groups.values() if not any(row in begun for row in rows_of(group))]


def divided(groups: Sequence[list[Request]], begun: int, workers: int) -> list[list[list[Request]]]:
    """What each of `workers` but the first gets, so that all have about as many documents; the first keeps the start.

    begun: documents that the first has in the engine. Fewer parts where there are too few groups.
    """
    sizes = [len(rows_of(group)) for group in groups]
    each = (begun + sum(sizes)) / workers
    kept = 0
    while kept < len(groups) and begun < each:
        begun += sizes[kept]
        kept += 1
    given, done = sum(sizes[kept:]), 0
    parts: list[list[list[Request]]] = [[] for _ in range(workers - 1)]
    for group, size in zip(groups[kept:], sizes[kept:], strict=True):
        parts[done * (workers - 1) // given].append(group)
        done += size
    return [part for part in parts if part]
