"""All faults. `slow` ones are left out of `make test`, which has the most common of them in shorter tests
(tests/cluster/test_pipeline.py, test_holding.py, tests/storage/test_runs.py). Those `apart` need Linux namespaces
(unshare).
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
    slow: bool = False
    apart: bool = False

    @property
    def name(self) -> str:
        return (self.scenario.__doc__ or "").strip().splitlines()[0]


FAULTS = [
    Fault(one_machine.worker_killed, slow=True),
    Fault(one_machine.driver_killed, slow=True),
    Fault(on_cluster.node_removed, apart=True),
    Fault(on_cluster.central_actor_killed, slow=True, apart=True),
    Fault(on_cluster.spot_handed_back, slow=True, apart=True),
    Fault(on_cluster.spot_finished, slow=True, apart=True),
    Fault(one_machine.poison),
    Fault(one_machine.broken_engine, slow=True),
    Fault(one_machine.out_of_memory, slow=True),
    Fault(on_s3.s3_failing, slow=True),
    Fault(on_s3.s3_hanging, slow=True),
    Fault(on_s3.s3_cutting, slow=True),
    Fault(one_machine.disk_full, slow=True, apart=True),
    Fault(one_machine.clock_set_back, slow=True),
    Fault(one_machine.started_twice, slow=True),
]
