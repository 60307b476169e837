"""Planning: the input's objects become units, as a stream, before anything is loaded or started."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from raypd.cluster.columns import Columns
from raypd.cluster.cutting import Inspected, inspect, line_limit
from raypd.cluster.listing import Found, objects
from raypd.cluster.plan import Plan, Writer
from raypd.cluster.unit import Part, Unit, make_unit
from raypd.config import RunConfig
from raypd.errors import InputError

__all__ = ["Part", "Plan", "Unit", "line_limit", "plan"]

_THREADS = 32  # that look into objects at once: mostly they wait for storage
_HOPELESS = 100  # objects, of which not one can be read: what is wrong is not an object

T = TypeVar("T")
R = TypeVar("R")


def plan(config: RunConfig, output: str | None = None) -> Plan:
    """All units of a run, in the order of the input; `Plan.keep` stores them for later sessions.

    output: the run's folder, whose stored plan is used again where the input is the same.
    Raises InputError for what makes a run pointless: no such input, nothing in it, a format that is not known, a
    column that is missing everywhere, no object that can be read. Single objects that cannot be read are in the plan.
    """
    digest = hashlib.sha256()
    return _planned(_digested(objects(config.input), digest), config, digest)


def _digested(found: Iterable[Found], digest: hashlib._Hash) -> Iterator[Found]:
    for item in found:
        digest.update(f"{item.name}\0{item.path}\0{item.size}\0{item.stamp}\n".encode("utf-8", "surrogateescape"))
        yield item


def _planned(found: Iterable[Found], config: RunConfig, digest: hashlib._Hash) -> Plan:
    writer, columns, fingerprint = Writer(), Columns(config), config.fingerprint()
    count = readable = 0
    first_damage: str | None = None
    with ThreadPoolExecutor(_THREADS) as pool:
        for item in in_order(pool, lambda item: inspect(item, config, columns), found):
            count += 1
            if item.damaged is None:
                readable += 1
                if item.found.format == "jsonl" and item.seen is not None:
                    columns.note(item.found.path, item.seen)
            else:
                first_damage = first_damage or item.damaged
                if not readable and count >= _HOPELESS:
                    raise InputError(f"{first_damage}\nand so it is with the first {count} objects")
            for unit in _units(item, fingerprint):
                writer.add(unit)
    if count and not readable:
        raise InputError(f"{first_damage}" + (f"\nand none of the {count} objects can be read" if count > 1 else ""))
    nowhere = columns.nowhere()
    if nowhere is not None:
        raise InputError(nowhere)
    made = writer.finish(count, digest.hexdigest(), {})
    if not made.units:
        shown = config.input.path if isinstance(config.input.path, str) else ", ".join(config.input.path)
        raise InputError(f"{shown}: no documents in it")
    return made


def _units(item: Inspected, fingerprint: str) -> Iterator[Unit]:
    for part in item.parts():
        yield make_unit([part], fingerprint, item.damaged)


def in_order(pool: ThreadPoolExecutor, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """The function's results in the order of the items, some tens of which are ahead."""
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= 2 * _THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
