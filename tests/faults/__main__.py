"""`make faults`: every fault once, by its docstring, and the table of what became of the documents,
as Markdown.
"""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from unittest import SkipTest

from tests.faults import on_cluster, on_s3, one_machine
from tests.faults.trial import EXECUTORS, Outcome
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
    """Runs all faults, or those named, with every executor; the number of those that went wrong."""
    wrong = 0
    executors = " | ".join(f"`{name}`" for name in EXECUTORS)
    print(f"| fault | what was done | documents in | {executors} | what raypd did |")
    print(f"|---|---|---|{'---|' * len(EXECUTORS)}---|", flush=True)
    for fault in FAULTS:
        if only and fault.__name__ not in only:
            continue
        outcomes = [outcome(fault, executor) for executor in EXECUTORS]
        wrong += outcomes.count("WENT WRONG")
        found = [own for own in outcomes if isinstance(own, Outcome)]
        if found:
            counts = [
                f"{o.rows} {o.lost} {o.doubled}" if isinstance(o, Outcome) else o for o in outcomes
            ]
            cells = [fault.__doc__, found[0].done, str(found[0].documents), *counts, found[0].note]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    return wrong


def outcome(fault: Callable[[Path], Outcome], executor: str) -> Outcome | str:
    """What became of the documents; in words where nobody can say."""
    os.environ["RAYPD_TEST_EXECUTOR"] = executor
    with tempfile.TemporaryDirectory(prefix="raypd-faults-", ignore_cleanup_errors=True) as folder:
        try:
            return fault(Path(folder))
        except SkipTest as why:
            print(f"{fault.__doc__}, {executor}: left out: {why}", file=sys.stderr)
            return "left out"
        except Exception:
            print(f"{fault.__doc__}, {executor}: WENT WRONG", file=sys.stderr)
            traceback.print_exc()
            return "WENT WRONG"
        finally:
            end_all()


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
