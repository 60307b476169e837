"""What was estimated for the machines that a run had."""

from __future__ import annotations

import math
from dataclasses import dataclass

from raypd.report.ledger import RunBill
from raypd.run.records import BillEstimate, Estimate, MachineEstimate


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
    there = [(node.began, node.ended or node.began) for node in nodes]
    count = max(1, *(sum(began <= at < ended for began, ended in there) for at, _ in there))  # at the same time
    nearest = min(machine.bills, key=lambda one: abs(math.log(one.nodes / count)))
    return MatchingBill(machine, nearest, count)
