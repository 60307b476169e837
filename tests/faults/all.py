"""All faults: `make faults`, `make test-slow`. Those `apart` need Linux namespaces (unshare).

`make test` has the most common of them in shorter tests: tests/cluster/test_driver.py and test_scheduler.py,
tests/run/test_lease.py, tests/storage/test_runs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.faults import on_cluster, on_s3, one_machine
from tests.faults.trial import Outcome


@dataclass(frozen=True)
class Fault:
    """A scenario; its name in the table is the first line of its description."""

    scenario: Callable[[Path], Outcome]
    apart: bool = False

    @property
    def name(self) -> str:
        return (self.scenario.__doc__ or "").strip().splitlines()[0]


FAULTS = [
    Fault(one_machine.worker_killed),
    Fault(one_machine.driver_killed),
    Fault(on_cluster.node_removed, apart=True),
    Fault(on_cluster.central_actor_killed, apart=True),
    Fault(on_cluster.spot_handed_back, apart=True),
    Fault(on_cluster.spot_finished, apart=True),
    Fault(one_machine.poison),
    Fault(one_machine.broken_engine),
    Fault(one_machine.out_of_memory),
    Fault(on_s3.s3_failing),
    Fault(on_s3.s3_hanging),
    Fault(on_s3.s3_cutting),
    Fault(one_machine.disk_full, apart=True),
    Fault(one_machine.clock_set_back),
    Fault(one_machine.started_twice),
]
