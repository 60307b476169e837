"""`make faults`: every fault once, and the table of what became of the documents, as Markdown."""

from __future__ import annotations

import sys
import tempfile
import traceback
from pathlib import Path

from tests.faults.all import APART, FAULTS
from tests.faults.apart import has_namespaces
from tests.processes import end_all


def main(only: list[str]) -> int:
    """Runs all faults, or those named; the number of those that went wrong."""
    wrong = 0
    print("| fault | what was done | documents in | rows out | lost | doubled | what raypd did |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for fault in FAULTS:
        if only and fault.__name__ not in only:
            continue
        if fault in APART and not has_namespaces():
            print(f"{fault.__doc__}: left out, this machine lets nobody have namespaces (unshare)", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory(prefix="raypd-faults-", ignore_cleanup_errors=True) as folder:
            try:
                found = fault(Path(folder))
                cells = [fault.__doc__, found.done, found.documents, found.rows, found.lost, found.doubled, found.note]
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)
            except Exception:
                wrong += 1
                print(f"{fault.__doc__}: WENT WRONG", file=sys.stderr)
                traceback.print_exc()
            finally:
                end_all()
    return wrong


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
