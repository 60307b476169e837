"""`make faults`: every fault once, by its docstring, and the table of what became of the documents,
as Markdown.
"""

import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from unittest import SkipTest

from tests.faults import of_readers, on_cluster, on_s3, one_machine
from tests.faults.trial import Outcome
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
    one_machine.second_host,
    of_readers.reader_killed,
    of_readers.reader_hangs,
    of_readers.object_store_full,
    of_readers.readers_node_removed,
]


def main(names: list[str]) -> int:
    """Run all faults, or those named; return the number of those that went wrong."""
    wrong = 0
    print("| fault | what was done | documents in | rows, lost, doubled | what raypd did |")
    print("|---|---|---|---|---|", flush=True)
    for fault in FAULTS:
        if names and fault.__name__ not in names:
            continue
        result = outcome(fault)
        if isinstance(result, Outcome):
            counts = f"{result.rows} {result.lost} {result.doubled}"
            cells = [
                fault.__doc__,
                result.done,
                str(result.documents),
                counts,
                result.note,
            ]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
        else:
            wrong += result == "WENT WRONG"
    return wrong


def outcome(fault: Callable[[Path], Outcome]) -> Outcome | str:
    """Return what became of the documents, or in words why nobody can say."""
    with tempfile.TemporaryDirectory(prefix="raypd-faults-", ignore_cleanup_errors=True) as folder:
        try:
            return fault(Path(folder))
        except SkipTest as why:
            print(f"{fault.__doc__}: left out: {why}", file=sys.stderr)
            return "left out"
        except Exception:
            print(f"{fault.__doc__}: WENT WRONG", file=sys.stderr)
            traceback.print_exc()
            return "WENT WRONG"
        finally:
            end_all()


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
