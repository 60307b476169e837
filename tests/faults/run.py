"""A run in a process of its own, to be killed: python -m tests.faults.run CONFIG [module:build]

RAYPD_TEST_CLOCK=-86400: the clocks of the driver and of every worker are set back by a day as soon as the file that
RAYPD_TEST_CLOCK_FILE names exists; each then leaves a file FILE-PID.
"""

import importlib
import os
import sys
import time
from pathlib import Path


def set_clock() -> None:
    """Lets this process's wall clock jump, where the environment asks for it."""
    shift = float(os.environ.get("RAYPD_TEST_CLOCK", "0"))
    if shift:
        file = Path(os.environ["RAYPD_TEST_CLOCK_FILE"])
        mark = file.with_name(f"{file.name}-{os.getpid()}")

        def now() -> float:
            if not mark.exists() and file.exists():
                mark.touch()
            # Not the builtin, which could not be pickled any more: Ray Data pickles what reaches it.
            return time.clock_gettime(time.CLOCK_REALTIME) + (shift if mark.exists() else 0)

        time.time = now


if __name__ == "__main__":
    from raypd.cli.main import report_errors
    from raypd.cluster.driver import run_extract
    from raypd.config.load import load_config

    set_clock()
    module, _, name = (sys.argv[2:] or ["tests.cluster.fakes:build"])[0].partition(":")
    with report_errors():
        made = run_extract(load_config(sys.argv[1]), build=getattr(importlib.import_module(module), name))
        print(f"documents={made.documents} ok={made.ok} failed={made.failed}")
