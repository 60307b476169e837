"""What the workers of the fault runs are made of, beside tests/cluster/fakes.py."""

import os
from pathlib import Path

from raypd.answering.components import WorkerComponents
from raypd.answering.components import build as real
from raypd.config import RunConfig
from tests.cluster import fakes
from tests.faults.run import set_clock


def clock(config: RunConfig, threads: int | None) -> WorkerComponents:
    """The fake engine in a worker whose clock is set back."""
    set_clock()
    return fakes.build(config, threads)


def little_memory(config: RunConfig, threads: int | None) -> WorkerComponents:
    """The real engine on a device that has no memory for more than 100 tokens a step; it notes each time."""
    from tests.decoding.drivers import small_device

    def fails(tokens: int) -> bool:
        if tokens > 100:
            with open(Path(config.output.path) / f"out-of-memory-{os.getpid()}", "a") as file:
                file.write(f"{tokens}\n")
        return tokens > 100

    parts = real(config, threads)
    small_device(parts.engine, fails)  # type: ignore[arg-type]
    return parts
