"""What the GPU and the host do in a prefill pass and in a decode pass of W1.

    python -m benchmarks.gpu.profile              # on a GPU, at most four minutes
    python -m benchmarks.gpu.profile --rehearse   # anywhere, without the columns of a GPU

Passes go one after the other here, so that each part of a pass can be timed: the host chooses and
packs it, starts its kernels, waits for the GPU, and resumes the programs. A pass is then run under
a profiler, which counts kernels and the time in which one is running. Of attention the table says
how many keys its blocks read, how many they would read if each span read its prefix by itself, and
how many there are.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd import DeviceType

from benchmarks.gpu.device import DEVICE, machine, release, synchronize
from benchmarks.gpu.key_reads import KeyReads, key_reads
from benchmarks.gpu.results import Figures, Results, add_options, number, table
from benchmarks.gpu.shapes import SHAPES, model_of
from benchmarks.gpu.works import works
from raypd.decoding.attention.step import Step
from raypd.decoding.counts import Finished
from raypd.decoding.engine import Engine
from raypd.decoding.pack import pack_model
from raypd.decoding.scheduler import Chunk

_ROW_SECONDS = 40.0
_MAX_NUM_SEQS = 64
_MAX_BATCHED_TOKENS = 8192
# The functions of a pass that are named, by their time.
_NAMED_KERNELS = 3
COLUMNS = (
    "model",
    "pass",
    "tokens",
    "ms",
    "host: plan",
    "host: start",
    "waits for GPU",
    "host: resume",
    "kernels",
    "kernels a layer",
    "GPU busy, ms",
    "gaps, ms",
    "keys read",
    "without sharing",
    "keys there are",
    "longest kernels",
)


@dataclass
class Parts:
    """The seconds of a pass, by part."""

    plan: float = 0.0  # The host chooses what goes into the pass.
    start: float = 0.0  # It packs the pass and starts its kernels.
    wait: float = 0.0  # It waits for the GPU.
    resume: float = 0.0  # It resumes the programs.

    @property
    def total(self) -> float:
        return self.plan + self.start + self.wait + self.resume


class TimedEngine(Engine):
    """An engine of one pass in flight that times the parts of each.

    Attributes:
        parts: The parts of the last pass.
        step_of_pass: What attention read about the last pass.
    """

    parts = Parts()
    step_of_pass: Step | None = None

    def step(self) -> list[Finished]:
        self.parts = Parts()
        began = time.perf_counter()
        finished = super().step()
        self.parts.plan = time.perf_counter() - began - self.parts.total
        return finished

    def _start(self, chunks: list[Chunk]) -> str | None:
        began = time.perf_counter()
        failure = super()._start(chunks)
        started = time.perf_counter()
        synchronize()
        self.parts.start = started - began
        self.parts.wait = time.perf_counter() - started
        return failure

    def _advance(self, flight: Any) -> list[Finished]:
        began = time.perf_counter()
        finished = super()._advance(flight)
        self.parts.resume = time.perf_counter() - began
        return finished

    def _logits(self, ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        self.step_of_pass = step
        return super()._logits(ids, positions, step)


@dataclass
class Pass:
    """A pass that was measured."""

    prefill_tokens: int
    decode_tokens: int
    parts: Parts
    reads: KeyReads | None
    profiler: torch.profiler.profile | None = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens

    @property
    def kind(self) -> str:
        """Whether most of its tokens are of prompts or of answers."""
        return "prefill" if self.prefill_tokens > self.decode_tokens else "decode"


def passes(engine: TimedEngine, profiled: bool) -> Iterator[Pass]:
    """Run what was submitted to an engine, and yield every pass.

    Args:
        engine: The engine.
        profiled: Whether passes run under a profiler.
    """
    # The tokens of programs that have ended, and of all programs before the pass.
    ended = Tokens()
    before = Tokens()
    while engine.pending:
        profiler = None
        if profiled:
            with torch.profiler.profile() as profiler:
                finished = engine.step()
                synchronize()
        else:
            finished = engine.step()
        for program in finished:
            ended.prefill += program.counts.prefill_tokens
            ended.decode += program.counts.decode_tokens
        now = Tokens(ended.prefill, ended.decode)
        for sequence in engine.sequences:
            now.prefill += sequence.counts.prefill_tokens
            now.decode += sequence.counts.decode_tokens
        reads = None
        if engine.step_of_pass is not None:
            reads = key_reads(engine.step_of_pass)
        yield Pass(
            prefill_tokens=now.prefill - before.prefill,
            decode_tokens=now.decode - before.decode,
            parts=engine.parts,
            reads=reads,
            profiler=profiler,
        )
        before = now


@dataclass
class Tokens:
    """Tokens of prompts and of answers."""

    prefill: int = 0
    decode: int = 0


def measure(model: str, rehearse: bool) -> Figures:
    """Measure the largest prefill pass and the largest decode pass of W1.

    Args:
        model: The name of a shape.
        rehearse: Whether a tiny model stands for it.
    """
    release()
    shape = SHAPES[model]
    config = shape.config(rehearse)
    engine = TimedEngine(
        pack_model(model_of(shape, rehearse)),
        max_num_seqs=2 if rehearse else _MAX_NUM_SEQS,
        max_num_batched_tokens=64 if rehearse else _MAX_BATCHED_TOKENS,
        # The kernels of a graph are started together, which would hide what the host does.
        cuda_graphs=False,
        passes=1,
    )
    work = works(rehearse)["W1 keys"]

    def submit(seed: int) -> None:
        count = engine.scheduler.max_num_seqs
        for prompt in work.draw(count, config.vocab_size, seed):
            engine.submit(work.program(prompt, config.vocab_size, shape.is_recurrent))

    submit(0)
    for _ in passes(engine, profiled=False):
        pass  # The warm-up compiles kernels.
    submit(1)
    timed = list(passes(engine, profiled=False))
    submit(2)
    profiled = list(passes(engine, profiled=True))
    figures: Figures = {}
    for kind in ("prefill", "decode"):
        candidates = [number for number in range(len(timed)) if timed[number].kind == kind]
        if not candidates:
            continue
        largest = max(candidates, key=lambda number: timed[number].tokens)
        # Both turns have the same passes, because their prompts have the same lengths.
        figures[kind] = pass_figures(timed[largest], profiled[largest], config.num_hidden_layers)
    engine.close()
    return figures


def pass_figures(timed: Pass, profiled: Pass, layers: int) -> Figures:
    """Return the figures of a pass that was timed, and run once more under a profiler."""
    assert profiled.profiler is not None
    parts = timed.parts
    figures: Figures = {
        "tokens": timed.tokens,
        "seconds": parts.total,
        "plan": parts.plan,
        "start": parts.start,
        "wait": parts.wait,
        "resume": parts.resume,
    }
    if timed.reads is not None:
        figures["reads"] = timed.reads._asdict()
    events = [
        event for event in profiled.profiler.events() or [] if event.device_type == DeviceType.CUDA
    ]
    on_gpu = bool(events)
    if on_gpu:
        ranges = [(event.time_range.start, event.time_range.end) for event in events]
        busy = busy_seconds(ranges)
        figures["kernels"] = len(events)
        figures["kernels_per_layer"] = len(events) / layers
        figures["busy"] = busy
        # A profiler slows the host down, so the timed pass tells how long it takes.
        figures["gaps"] = max(0.0, parts.start + parts.wait - busy)
    figures["longest"] = longest(profiled.profiler, on_gpu)
    return figures


def busy_seconds(ranges: list[tuple[float, float]]) -> float:
    """Return the seconds in which at least one kernel runs.

    Args:
        ranges: Start and end of each kernel in microseconds.
    """
    busy = 0.0
    last_end = float("-inf")
    for start, end in sorted(ranges):
        busy += max(0.0, end - max(start, last_end))
        last_end = max(last_end, end)
    return busy / 1e6


def longest(profiler: torch.profiler.profile, on_gpu: bool) -> list[str]:
    """Return the functions of a pass that take the most time, each with its milliseconds."""
    averages = profiler.key_averages()
    key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    ordered = sorted(averages, key=lambda event: getattr(event, key), reverse=True)
    named = []
    for event in ordered[:_NAMED_KERNELS]:
        named.append(f"{event.key[:40]} {getattr(event, key) / 1000:.2f}")
    return named


def lines(model: str, figures: Figures) -> list[list[object]]:
    """Return the lines of the table for a model."""
    if "failed" in figures:
        return [[model, "-", figures["failed"], *["-"] * (len(COLUMNS) - 3)]]
    made: list[list[object]] = []
    for kind, of_pass in figures.items():
        reads = of_pass.get("reads") or {}
        times = [of_pass[key] for key in ("seconds", "plan", "start", "wait", "resume")]
        made.append(
            [
                model,
                kind,
                of_pass["tokens"],
                *[milliseconds(seconds) for seconds in times],
                of_pass.get("kernels", "-"),
                number(of_pass.get("kernels_per_layer")),
                milliseconds(of_pass.get("busy")),
                milliseconds(of_pass.get("gaps")),
                reads.get("read", "-"),
                reads.get("unshared", "-"),
                reads.get("distinct", "-"),
                "; ".join(of_pass["longest"]),
            ]
        )
    return made


def milliseconds(seconds: float | None) -> str:
    """Return seconds in milliseconds; a dash if there are none."""
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.2f}"


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 1 if a row failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    args = parser.parse_args(arguments)
    if DEVICE.type != "cuda" and not args.rehearse:
        parser.error("there is no GPU here: --rehearse runs anywhere")
    script = "profile, rehearsed" if args.rehearse else "profile"
    results = Results(args.results, script, machine(), args.seconds, args.retry)
    wanted = [model for model in SHAPES if re.search(args.only, model)]
    try:
        for model in wanted:
            expected = 1.0 if args.rehearse else _ROW_SECONDS
            results.measure(model, expected, partial(measure, model, args.rehearse))
    except KeyboardInterrupt:
        print("... interrupted; what is measured:", flush=True)
    measured: list[list[object]] = []
    for model in wanted:
        if model in results.rows:
            measured += lines(model, results.rows[model])
    print(f"\n{machine()}; W1, times in milliseconds")
    print(table(COLUMNS, measured))
    if DEVICE.type != "cuda":
        print("kernels, busy time, gaps and keys read are empty: there is no GPU here")
    left = results.describe_left()
    if left:
        print(left)
    return int(bool(results.failed))


if __name__ == "__main__":
    sys.exit(main())
