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
    import torch

    parts = real(config, threads)
    model = parts.engine.model  # type: ignore[attr-defined]
    tokens = [0]

    def begins(module, inputs) -> None:
        tokens[0] = len(inputs[0])

    def ends(module, inputs) -> None:
        if tokens[0] > 100:
            with open(Path(config.output.path) / f"out-of-memory-{os.getpid()}", "a") as file:
                file.write(f"{tokens[0]}\n")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model.register_forward_pre_hook(begins)
    model.head.register_forward_pre_hook(ends)
    return parts
