"""How fast raypd's engine is on a GPU, and what vLLM and SGLang do beside it.

    python -m benchmarks.gpu.speed                                  # on a GPU, at most four minutes
    python -m benchmarks.gpu.speed --only 'Qwen3-8B'                # some rows
    python -m benchmarks.gpu.speed --vllm-python .venv-vllm/bin/python --only vllm
    python -m benchmarks.gpu.speed --rehearse                       # anywhere, without figures

A row of raypd is a model's shape in a precision and a work: W1 with keys and with slots, W4, W6.
The peak of the memory stands next to what the engine planned, the speed next to what
`raypd estimate --model` computes for this GPU. A row of a peer is one of its forms; after all forms
of a model it is measured once more with every option that helped.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

import benchmarks.gpu.peer_rows as peer_rows
from benchmarks.gpu.device import (
    DEVICE,
    gpu_uuid,
    has_fp8,
    machine,
    product_rate,
    release,
    synchronize,
    timed,
)
from benchmarks.gpu.peers.power import Power, PowerMeter
from benchmarks.gpu.results import Figures, Results, add_options, number, table
from benchmarks.gpu.shapes import SHAPES, Shape, model_of
from benchmarks.gpu.works import Work, works
from raypd.decoding.engine import Engine
from raypd.decoding.models.decoder import DecoderModel
from raypd.decoding.pack import pack_model
from raypd.decoding.quantized import quantize
from raypd.decoding.size_counter import model_sizes
from raypd.decoding.sizes import ModelSizes
from raypd.estimation.data_sheets import GPUS, gpu_named
from raypd.estimation.roofline import DocumentTokens, PassLimits, seconds_of

# The seconds that a row takes at most, and those of the first row of a model, which is built and
# whose kernels are compiled.
_ROW_SECONDS = 20.0
_FIRST_ROW_SECONDS = 45.0
# Turns before the one that is timed: they compile kernels and capture graphs.
_WARM_UPS = 3
_MAX_NUM_SEQS = 64
_MAX_BATCHED_TOKENS = 8192
_GIB = 2**30
COLUMNS = (
    "model, precision",
    "work",
    "engine",
    "a second",
    "% of the product",
    "passes",
    "GiB",
    "GiB planned",
    "predicted a second",
    "off by",
    "MHz",
    "W",
    "tokens/J",
)


@dataclass(frozen=True)
class Row:
    """A row of raypd's engine."""

    model: str
    precision: str  # "bfloat16" or "fp8"
    work: str

    @property
    def name(self) -> str:
        return f"{self.model}, {self.precision}: {self.work}"


def rows() -> Iterator[Row]:
    """Return all rows of raypd's engine: a model is built once for each precision."""
    for model in SHAPES:
        for precision in ("bfloat16", "fp8"):
            if precision == "fp8" and not has_fp8():
                continue
            for work in works(rehearse=False):
                yield Row(model, precision, work)


class Subject:
    """A model on the device, packed for the engine."""

    def __init__(self, shape: Shape, precision: str, rehearse: bool) -> None:
        config = shape.config(rehearse)
        self.shape = shape
        self.sizes: ModelSizes = model_sizes(config)
        self.vocabulary: int = config.vocab_size
        stock = model_of(shape, rehearse)
        if precision == "fp8":
            quantize(stock, "fp8")
        self.weight_bytes = sum(weight.nbytes for weight in stock.parameters())
        self.packed: PreTrainedModel | DecoderModel = stock
        if precision != "fp8" or DEVICE.type == "cuda":
            # FP8 is for GPUs: only torch's own layers compute it on a CPU.
            self.packed = pack_model(stock)


class Speed:
    """Measures rows of raypd's engine, with one model on the device at a time."""

    def __init__(self, rehearse: bool) -> None:
        self.rehearse = rehearse
        self.works = works(rehearse)
        self.product_rate = product_rate(256 if rehearse else 8192)
        self.meter = PowerMeter(gpu_uuid())
        self.limits = PassLimits(_MAX_BATCHED_TOKENS, _MAX_NUM_SEQS)
        if rehearse:
            self.limits = PassLimits(64, 2)
        self._subject: Subject | None = None
        self._of: tuple[str, str] | None = None

    def expected(self, row: Row) -> float:
        """Return the seconds that a row takes."""
        if self.rehearse:
            return 1.0
        if self._of == (row.model, row.precision):
            return _ROW_SECONDS
        return _FIRST_ROW_SECONDS

    def measure(self, row: Row) -> Figures:
        """Measure a row."""
        subject = self._subject_of(row)
        work = self.works[row.work]
        release()
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        engine = Engine(
            subject.packed,
            max_num_seqs=self.limits.sequences,
            max_num_batched_tokens=self.limits.tokens,
        )
        passes = 0

        def turn(seed: int) -> None:
            nonlocal passes
            before = engine.steps
            prompts = work.draw(work.documents, subject.vocabulary, seed)
            isolate = subject.shape.is_recurrent
            engine.run(work.program(prompt, subject.vocabulary, isolate) for prompt in prompts)
            synchronize()
            passes = engine.steps - before

        warm_ups = 1 if self.rehearse else _WARM_UPS
        for seed in range(warm_ups):
            turn(seed)
        seconds = 0.0

        def measured() -> None:
            nonlocal seconds
            seconds, _ = timed(turn, warm_ups)

        power = self.meter.measure(measured)
        memory = memory_of(engine, subject.weight_bytes)
        engine.close()
        return {
            "unit": work.unit,
            "documents": work.documents,
            "seconds": seconds,
            "passes": passes,
            "fed": work.shared + work.documents * work.fed,
            "sampled": work.documents * work.sampled,
            "share": self._share(subject, work, seconds),
            "product_rate": self.product_rate,
            "predicted": predicted(subject.sizes, work, self.limits, row.precision == "fp8"),
            **memory,
            **power_figures(power),
        }

    def _subject_of(self, row: Row) -> Subject:
        """Return the model of a row, which is built if it is not there yet."""
        of = (row.model, row.precision)
        if self._subject is None or self._of != of:
            # Its memory is needed for the next one.
            self._subject = None
            release()
            self._subject = Subject(SHAPES[row.model], row.precision, self.rehearse)
            self._of = of
        return self._subject

    def _share(self, subject: Subject, work: Work, seconds: float) -> float:
        """Return the share of the rate of a large product that the products of a work reach."""
        fed = work.shared + work.documents * work.fed
        flops = subject.sizes.product_flops(fed, work.documents * work.sampled)
        return flops / seconds / self.product_rate


def memory_of(engine: Engine, weight_bytes: int) -> Figures:
    """Return the peak of the memory, and what memory.py planned: both in bytes.

    The plan is the weights, the recurrent states, the cache, and the largest pass, which the engine
    measures before it sizes the cache.
    """
    planned = weight_bytes + engine.pass_bytes
    planned += engine.cache.allocator.slots * engine.cache.slot_bytes
    if engine.states is not None:
        planned += engine.states.limit * engine.states.state_bytes
    peak = None
    if DEVICE.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    return {"peak_bytes": peak, "planned_bytes": planned}


def power_figures(power: Power) -> Figures:
    """Return what a GPU drew as figures of a row."""
    return {"joules": power.joules, "megahertz": power.megahertz, "no_power": power.refusal}


def predicted(sizes: ModelSizes, work: Work, limits: PassLimits, fp8: bool) -> float | None:
    """Return the documents per second that data sheets give for this GPU; None without one."""
    if DEVICE.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(0)
    gpu = gpu_named(properties.name, properties.total_memory / _GIB)
    if gpu is None:
        return None
    tokens = DocumentTokens(
        shared=work.shared,
        own=work.own,
        keys=work.key_tokens,
        values=work.sampled,
        passes=work.value,
    )
    parts = seconds_of(sizes, GPUS[gpu], tokens, True, limits, fp8)
    if parts is None:
        return None
    return 1 / sum(parts.values())


def line(row: Row, figures: Figures) -> list[object]:
    """Return the cells of a row of raypd's engine."""
    model = f"{row.model}, {row.precision}"
    if "failed" in figures:
        return [model, row.work, "raypd", figures["failed"], *["-"] * (len(COLUMNS) - 4)]
    speed = figures["documents"] / figures["seconds"]
    off = None
    if figures["predicted"]:
        off = figures["predicted"] / speed - 1
    return [
        model,
        row.work,
        "raypd",
        f"{number(speed)} {figures['unit']}",
        f"{100 * figures['share']:.0f}",
        figures["passes"],
        gib(figures["peak_bytes"]),
        gib(figures["planned_bytes"]),
        number(figures["predicted"]),
        "-" if off is None else f"{100 * off:+.0f}%",
        *power_cells(figures),
    ]


def gib(size: float | None) -> str:
    """Return bytes in GiB; a dash if there are none."""
    if size is None:
        return "-"
    return f"{size / _GIB:.1f}"


def power_cells(figures: Figures) -> list[str]:
    """Return clock, power and tokens per joule: of all tokens that are fed."""
    joules = figures["joules"]
    watts = None
    tokens_per_joule = None
    if joules:
        watts = joules / figures["seconds"]
        tokens_per_joule = figures["fed"] / joules
    return [number(figures["megahertz"], 4), number(watts), number(tokens_per_joule)]


def notes(results: Results) -> list[str]:
    """Return why columns are empty, and what is left."""
    refusals = {str(figures.get("no_power") or "") for figures in results.rows.values()}
    reasons = [f"MHz, W and tokens/J are empty: {reason}" for reason in sorted(refusals - {""})]
    if DEVICE.type != "cuda":
        reasons.append("GiB and predicted speeds are empty: there is no GPU here")
    elif any(figures.get("predicted") is None for figures in results.rows.values()):
        reasons.append("predicted speeds are empty where no data sheet or formula applies")
    left = results.describe_left()
    if left:
        reasons.append(left)
    return reasons


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 1 if a row failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    peer_rows.add_options(parser)
    args = parser.parse_args(arguments)
    if DEVICE.type != "cuda" and not args.rehearse:
        parser.error("there is no GPU here: --rehearse runs anywhere")
    script = "speed, rehearsed" if args.rehearse else "speed"
    results = Results(args.results, script, machine(), args.seconds, args.retry)
    wanted = [row for row in rows() if re.search(args.only, row.name)]
    lines = measure_all(args, results, wanted)
    print(f"\n{machine()}")
    print(table(COLUMNS, lines))
    print("\n".join(notes(results)))
    return int(bool(results.failed))


def measure_all(
    args: argparse.Namespace, results: Results, wanted: list[Row]
) -> list[list[object]]:
    """Measure what is wanted and not there yet; return the lines of the table."""
    speed: Speed | None = None
    lines: list[list[object]] = []
    try:
        for row in wanted:
            if row.name not in results.rows and speed is None and results.remaining > 0:
                speed = Speed(args.rehearse)
            if speed is not None:
                results.measure(row.name, speed.expected(row), partial(speed.measure, row))
            elif row.name not in results.rows:
                results.left.append(row.name)
        # The peers need the whole memory.
        speed = None
        release()
        peer_rows.measure(args, results)
    except KeyboardInterrupt:
        print("... interrupted; what is measured:", flush=True)
    for row in wanted:
        if row.name in results.rows:
            lines.append(line(row, results.rows[row.name]))
    lines += peer_rows.lines(args, results, len(COLUMNS))
    return lines


if __name__ == "__main__":
    sys.exit(main())
