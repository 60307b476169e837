"""What was estimated for the machines that a run had."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raypd.report.ledger import RunBill
from raypd.run.records import BillEstimate, Estimate, MachineEstimate, NodeTime


@dataclass
class MatchingBill:
    """The part of an estimate that is about the machines of the run. nodes: as many as the run had at a time."""

    machine: MachineEstimate
    bill: BillEstimate
    nodes: int


def held(found: Estimate, bill: RunBill) -> MatchingBill | None:
    """What was estimated for the kind and number of machines that the run's workers had; None where nothing was."""
    with_workers = {worker.node for worker in bill.workers}
    nodes = [node for node in bill.nodes if node.node in with_workers] or bill.nodes
    kinds = {node.instance_type for node in nodes}
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    machine = next((one for one in found.machines if one.instance_type == kind and one.bills), None)
    if machine is None:
        return None
    count = _most_at_once(nodes, bill.newest.until)
    nearest = min(machine.bills, key=lambda one: abs(math.log(one.nodes / count)))
    return MatchingBill(machine, nearest, count)


def _most_at_once(nodes: Sequence[NodeTime], until: float) -> int:
    """The most machines that were there at the same time, 1 at least."""

    def changes() -> Iterator[tuple[float, int]]:
        for node in nodes:
            yield node.began, 1
            yield until if node.ended is None else node.ended, -1

    there = most = 0
    for _, change in sorted(changes()):
        there += change
        most = max(most, there)
    return max(1, most)
