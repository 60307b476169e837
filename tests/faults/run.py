"""A run in a process of its own, to be killed: python -m tests.faults.run CONFIG [module:build
[retry]]. With RAYPD_TEST_CLOCK=-86400 clocks go back by a day once RAYPD_TEST_CLOCK_FILE is there;
each then leaves FILE-PID.
"""

import importlib
import os
import sys
import threading
import time
from pathlib import Path

from raypd.answering.components import WorkerComponents, build as real
from raypd.config import RunConfig
from tests.cluster import fakes


def set_clock() -> None:
    """Lets this process's wall clock jump, where the environment asks for it."""
    shift = float(os.environ.get("RAYPD_TEST_CLOCK", "0"))
    if shift:
        file = Path(os.environ["RAYPD_TEST_CLOCK_FILE"])
        mark = file.with_name(f"{file.name}-{os.getpid()}")

        def now() -> float:
            if not mark.exists() and file.exists():
                mark.touch()
            # Not the builtin, which could not be pickled any more: Ray Data pickles what reaches
            # it.
            return time.clock_gettime(time.CLOCK_REALTIME) + (shift if mark.exists() else 0)

        def ask() -> None:
            # The clock jumps even while nothing else in this process asks for the time.
            while not mark.exists():
                now()
                time.sleep(0.1)

        time.time = now
        threading.Thread(target=ask, daemon=True).start()


def clock(config: RunConfig, threads: int | None) -> WorkerComponents:
    """The fake engine in a worker whose clock is set back."""
    set_clock()
    return fakes.build(config, threads)


def little_memory(config: RunConfig, threads: int | None) -> WorkerComponents:
    """The real engine on a device that has no memory for more than 100 tokens a step; it notes each
    time.
    """
    from tests.decoding.drivers import small_device

    def fails(tokens: int) -> bool:
        if tokens > 100:
            with open(Path(config.output.path) / f"out-of-memory-{os.getpid()}", "a") as file:
                file.write(f"{tokens}\n")
        return tokens > 100

    parts = real(config, threads)
    small_device(parts.engine, fails)  # type: ignore[arg-type]
    return parts


if __name__ == "__main__":
    from raypd.cli.main import report_errors
    from raypd.cluster.driver import run_extract
    from raypd.config.load import load_config
    from raypd.verify.retry import retry_errors

    set_clock()
    module, _, name = (sys.argv[2:] or ["tests.cluster.fakes:build"])[0].partition(":")
    config = load_config(sys.argv[1])
    build = getattr(importlib.import_module(module), name)
    with report_errors():
        if sys.argv[3:]:
            print(retry_errors(config, build=build).describe())
            sys.exit()
        made = run_extract(config, build=build)
        print(f"documents={made.documents} ok={made.ok} failed={made.failed}")
