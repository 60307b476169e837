"""A run in a process of its own, to be killed: python -m tests.faults.run CONFIG module:build

RAYPD_TEST_CLOCK=-86400: two seconds after the start of the driver and of every worker its clock is set back by a day.
"""

from __future__ import annotations

import importlib
import os
import sys
import time


def set_clock() -> None:
    """Lets this process's wall clock jump, where the environment says so."""
    shift = float(os.environ.get("RAYPD_TEST_CLOCK", "0"))
    if shift:
        real, began = time.time, time.monotonic()
        time.time = lambda: real() + (shift if time.monotonic() - began > 2 else 0)


if __name__ == "__main__":
    from raypd.cli import report_errors
    from raypd.cluster.pipeline import run_extract
    from raypd.config_file import load_config

    set_clock()
    module, _, name = sys.argv[2].partition(":")
    with report_errors():
        made = run_extract(load_config(sys.argv[1]), build=getattr(importlib.import_module(module), name))
        print(f"documents={made.documents} ok={made.ok} failed={made.failed}")
