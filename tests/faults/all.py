"""All faults: `make faults`, `make test-slow`. The name of one in the table is its docstring.

`make test` has the most common of them in shorter tests: tests/cluster/test_driver.py and test_scheduler.py,
tests/run/test_lease.py, tests/storage/test_runs.py.
"""

from __future__ import annotations

from tests.faults import on_cluster, on_s3, one_machine

FAULTS = [
    one_machine.worker_killed,
    one_machine.driver_killed,
    on_cluster.node_removed,
    on_cluster.central_actor_killed,
    on_cluster.spot_handed_back,
    on_cluster.spot_finished,
    one_machine.poison,
    one_machine.broken_engine,
    one_machine.out_of_memory,
    on_s3.s3_failing,
    on_s3.s3_hanging,
    on_s3.s3_cutting,
    one_machine.disk_full,
    one_machine.clock_set_back,
    one_machine.started_twice,
]
APART = {  # need Linux namespaces (unshare)
    on_cluster.node_removed,
    on_cluster.central_actor_killed,
    on_cluster.spot_handed_back,
    on_cluster.spot_finished,
    one_machine.disk_full,
}
