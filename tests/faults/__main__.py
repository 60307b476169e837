"""`make faults`: every fault once, and the table of what became of the documents, as Markdown.

The name of a fault in the table is its docstring. `make test` has the most common of them in shorter tests:
tests/cluster/test_driver.py and test_scheduler.py, tests/run/test_lease.py, tests/storage/test_runs.py.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from pathlib import Path
from unittest import SkipTest

from tests.faults import on_cluster, on_s3, one_machine
from tests.processes import end_all

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


def main(only: list[str]) -> int:
    """Runs all faults, or those named; the number of those that went wrong."""
    wrong = 0
    print("| fault | what was done | documents in | rows out | lost | doubled | what raypd did |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for fault in FAULTS:
        if only and fault.__name__ not in only:
            continue
        with tempfile.TemporaryDirectory(prefix="raypd-faults-", ignore_cleanup_errors=True) as folder:
            try:
                found = fault(Path(folder))
                cells = [fault.__doc__, found.done, found.documents, found.rows, found.lost, found.doubled, found.note]
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)
            except SkipTest as why:
                print(f"{fault.__doc__}: left out: {why}", file=sys.stderr)
            except Exception:
                wrong += 1
                print(f"{fault.__doc__}: WENT WRONG", file=sys.stderr)
                traceback.print_exc()
            finally:
                end_all()
    return wrong


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
