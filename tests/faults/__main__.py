"""`make faults`: every fault once, and the table of what became of the documents, as Markdown."""

from __future__ import annotations

import sys
import tempfile
import traceback
from pathlib import Path

from tests.faults.all import FAULTS, Fault
from tests.faults.apart import has_namespaces
from tests.processes import end_all


def row(fault: Fault, folder: Path) -> str:
    """A line of the table. Raises what the scenario raises."""
    found = fault.scenario(folder)
    cells = [fault.name, found.done, found.documents, found.rows, found.lost, found.doubled, found.note]
    return "| " + " | ".join(map(str, cells)) + " |"


def main(only: list[str]) -> int:
    """Runs all faults, or those named; the number of those that went wrong."""
    wrong = 0
    print("| fault | what was done | documents in | rows out | lost | doubled | what raypd did |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for fault in FAULTS:
        if only and fault.scenario.__name__ not in only:
            continue
        if fault.apart and not has_namespaces():
            print(f"{fault.name}: left out, this machine lets nobody have namespaces (unshare)", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory(prefix="raypd-faults-", ignore_cleanup_errors=True) as folder:
            try:
                print(row(fault, Path(folder)), flush=True)
            except Exception:
                wrong += 1
                print(f"{fault.name}: WENT WRONG", file=sys.stderr)
                traceback.print_exc()
            finally:
                end_all()
    return wrong


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
