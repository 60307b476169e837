"""Rows of vLLM and SGLang: a search for their best form, each form in a process of its own.

An engine runs by the interpreter of an environment of its own (`--vllm-python`). Its forms are
measured on one model, one option at a time; then every model is measured with all options that
helped there, in bfloat16 and in FP8. Structured output is off in every form.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import benchmarks.gpu.results as tables
from benchmarks.gpu.device import gpu_uuid
from benchmarks.gpu.peers import __file__ as _PEERS
from benchmarks.gpu.results import Figures, Results
from benchmarks.gpu.shapes import MAX_MODEL_LEN, SHAPES, Shape
from benchmarks.gpu.works import Work, works
from raypd.decoding.size_counter import model_sizes

# The model on which forms are searched, and the works that are measured for each.
SEARCHED_MODEL = "Qwen3-8B"
_SEARCHED_WORKS = ("W1 keys", "W6")
# An option is kept if it makes an engine faster by more than this.
_MIN_GAIN = 0.02
# The seconds that a form takes at most: most of them load and compile.
_FORM_SECONDS = 100.0
_MARK = "RAYPD "
_GRAPH_SIZES = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, 1025, 32)]
_NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}


@dataclass(frozen=True)
class Form:
    """How an engine runs, beside its defaults."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def plus(self, other: Form, name: str) -> Form:
        """Return both forms in one."""
        arguments = self.arguments | other.arguments
        return Form(name, arguments, self.environment | other.environment)


DEFAULT = Form("its defaults")
FP8 = Form("fp8", {"quantization": "fp8"})
# The first form of an option that helps most is kept; `_option_of` tells which belong together.
FORMS: dict[str, list[Form]] = {
    "vllm": [
        DEFAULT,
        Form("max_num_batched_tokens 8192", {"max_num_batched_tokens": 8192}),
        Form("max_num_batched_tokens 32768", {"max_num_batched_tokens": 32_768}),
        Form("max_num_seqs 256", {"max_num_seqs": 256}),
        Form("max_num_seqs 2048", {"max_num_seqs": 2048}),
        Form("no prefix caching", {"enable_prefix_caching": False}),
        Form("async scheduling", {"async_scheduling": True}),
        Form("no async scheduling", {"async_scheduling": False}),
        Form(
            "CUDA graphs up to 1024",
            {"compilation_config": {"cudagraph_capture_sizes": _GRAPH_SIZES}},
        ),
        Form("n-gram speculation", {"speculative_config": _NGRAM}),
        Form("engine in the same process", {}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
    ],
    "sglang": [
        DEFAULT,
        Form("chunked_prefill_size 16384", {"chunked_prefill_size": 16_384}),
        Form("max_running_requests 1024", {"max_running_requests": 1024}),
        Form("no prefix caching", {"disable_radix_cache": True}),
        Form("CUDA graphs up to 512", {"cuda_graph_max_bs": 512}),
    ],
}


@dataclass(frozen=True)
class PeerRow:
    """A form of an engine with a model."""

    engine: str
    model: str
    form: str
    is_searched: bool

    @property
    def name(self) -> str:
        return f"{self.model}: {self.engine}, {self.form}"

    @property
    def works(self) -> tuple[str, ...]:
        """The works that are measured."""
        if self.is_searched:
            return _SEARCHED_WORKS
        return tuple(works(rehearse=False))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the engines are."""
    for engine in FORMS:
        parser.add_argument(
            f"--{engine}-python",
            default=sys.executable,
            help=f"the interpreter of an environment with {engine} (default: this one)",
        )


def measure(args: argparse.Namespace, results: Results) -> None:
    """Measure the rows of all engines that are installed."""
    for engine in FORMS:
        if missing(args, engine):
            continue
        for row in _rows(engine):
            if not re.search(args.only, row.name):
                continue
            form = _form_of(row, results)
            if form is None:
                # It is known once all searched forms are measured.
                results.left.append(row.name)
                continue
            expected = 1.0 if args.rehearse else _FORM_SECONDS
            results.measure(row.name, expected, partial(_run, args, row, form))


def missing(args: argparse.Namespace, engine: str) -> str:
    """Say what is missing to run an engine; empty if nothing is."""
    python = getattr(args, f"{engine}_python")
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({engine!r}) is None)"
    try:
        checked = subprocess.run([python, "-c", code], capture_output=True, check=False)
    except OSError as error:
        return f"{python}: {error.strerror}"
    if checked.returncode == 0:
        return ""
    return (
        f"{python} has no {engine}: pip install {engine} into an environment of its own, and "
        f"--{engine}-python names its interpreter"
    )


def _rows(engine: str) -> list[PeerRow]:
    """Return all rows of an engine, the searched forms first."""
    rows = [PeerRow(engine, SEARCHED_MODEL, form.name, True) for form in FORMS[engine]]
    for model in SHAPES:
        rows.append(PeerRow(engine, model, "best form", False))
        rows.append(PeerRow(engine, model, "best form, fp8", False))
    return rows


def _form_of(row: PeerRow, results: Results) -> Form | None:
    """Return the form of a row; None for a best form that is not known yet."""
    if row.is_searched:
        return next(form for form in FORMS[row.engine] if form.name == row.form)
    best = best_form(row.engine, results)
    if best is not None and row.form.endswith("fp8"):
        return best.plus(FP8, row.form)
    return best


def best_form(engine: str, results: Results) -> Form | None:
    """Return the defaults of an engine with every option that helped in the search.

    Of several forms of one option the fastest counts. Returns None before all forms are measured.
    """
    gains: dict[tuple[str, ...], tuple[float, Form]] = {}
    default_speed: float | None = None
    for form in FORMS[engine]:
        figures = results.rows.get(PeerRow(engine, SEARCHED_MODEL, form.name, True).name)
        if figures is None:
            return None
        if "failed" in figures:
            continue
        speed = _mean_speed(figures)
        if form is DEFAULT:
            default_speed = speed
            continue
        option = _option_of(form)
        if option not in gains or gains[option][0] < speed:
            gains[option] = (speed, form)
    best = DEFAULT
    for speed, form in gains.values():
        if default_speed is None or speed > (1 + _MIN_GAIN) * default_speed:
            best = best.plus(form, "best form")
    return Form("best form", best.arguments, best.environment)


def _option_of(form: Form) -> tuple[str, ...]:
    return (*form.arguments, *form.environment)


def _mean_speed(figures: Figures) -> float:
    """Return the geometric mean of the documents per second of the works of a row."""
    product = 1.0
    for name in _SEARCHED_WORKS:
        product *= fastest(figures, name)["speed"]
    return float(product ** (1 / len(_SEARCHED_WORKS)))


def fastest(figures: Figures, work: str) -> Figures:
    """Return the figures of the faster kind of requests for a work."""
    kinds: list[Figures] = figures["works"][work]
    return max(kinds, key=lambda kind: float(kind["speed"]))


def _run(args: argparse.Namespace, row: PeerRow, form: Form) -> Figures:
    """Measure a form in a process of its own.

    Raises:
        RuntimeError: If the process ends before all works are measured.
    """
    shape = SHAPES[row.model]
    all_works = works(args.rehearse)
    with tempfile.TemporaryDirectory() as folder:
        job = _job(Path(folder), row, form, shape, all_works, args.rehearse)
        script = Path(_PEERS).with_name("serve.py")
        log = Path(folder) / "log"
        results = _served([getattr(args, f"{row.engine}_python"), str(script), str(job)], log)
        wanted = json.loads(job.read_text(encoding="utf-8"))["works"]
        if len(results) < len(wanted):
            raise RuntimeError(_last_lines(log))
    sizes = model_sizes(shape.config(args.rehearse))
    figures: Figures = {"works": {name: [] for name in row.works}, "form": form.arguments}
    for result in results:
        name, requests = result["name"].rsplit(", ", 1)
        work = all_works[name]
        fed = _fed(work, requests)
        figures["works"][name].append(
            result
            | {
                "requests": requests,
                "documents": work.documents,
                "speed": work.documents / result["seconds"],
                "fed": fed,
                "flops": sizes.product_flops(fed, result["written"]),
            }
        )
    figures["no_power"] = results[0]["no_power"]
    return figures


def _job(
    folder: Path,
    row: PeerRow,
    form: Form,
    shape: Shape,
    all_works: dict[str, Work],
    rehearse: bool,
) -> Path:
    """Write what a process needs; return the file of its job."""
    config = shape.config(rehearse)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[shape.kind]]
    config.save_pretrained(folder)
    listed = []
    for name in row.works:
        work = all_works[name]
        kinds = {"a request per value": work.single_requests}
        if work.unit == "documents":
            kinds["a request per document"] = work.whole_requests
        for kind, requests_of in kinds.items():
            turns = []
            new_tokens = 0
            for seed in range(2):
                prompts = work.draw(work.documents, config.vocab_size, seed)
                requests, new_tokens = requests_of(prompts, config.vocab_size)
                turns.append(requests)
            *warm_ups, timed = turns
            listed.append(
                {
                    "name": f"{name}, {kind}",
                    "new_tokens": new_tokens,
                    "warm_ups": warm_ups,
                    "prompts": timed,
                }
            )
    job = {
        "engine": row.engine,
        "folder": str(folder),
        "max_model_len": MAX_MODEL_LEN,
        "arguments": form.arguments,
        "environment": form.environment,
        "uuid": gpu_uuid(),
        "works": listed,
    }
    file = folder / "job.json"
    file.write_text(json.dumps(job), encoding="utf-8")
    return file


def _served(command: list[str], log: Path) -> list[Figures]:
    """Run a process to its end; return what it measured. It is killed if this is interrupted."""
    results: list[Figures] = []
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True
        )
        try:
            assert process.stdout is not None
            for output in process.stdout:
                if output.startswith(_MARK):
                    results.append(json.loads(output.removeprefix(_MARK)))
            process.wait()
        finally:
            if process.poll() is None:
                # Its engine may have processes of its own, which are in the same group.
                os.killpg(process.pid, 9)
                process.wait()
    return results


def _last_lines(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " ".join(lines[-3:])[-280:] or "the process ended without a message"


def _fed(work: Work, requests: str) -> int:
    """Return the tokens that go through the layers if all that prompts share is cached."""
    if requests == "a request per document":
        per_document = work.own + work.attributes * (work.key + work.value) - 1
    else:
        per_document = work.own + work.attributes * (work.key + work.value - 1)
    return work.shared + work.documents * per_document


def lines(args: argparse.Namespace, results: Results, width: int) -> list[list[object]]:
    """Return the lines of the table, each of so many cells; an engine that is missing says so."""
    all_lines: list[list[object]] = []
    for engine in FORMS:
        measured = [row for row in _rows(engine) if row.name in results.rows]
        for row in measured:
            all_lines += _lines_of(row, results, width)
        reason = missing(args, engine)
        if reason and not measured:
            all_lines.append(["-", "-", engine, reason, *["-"] * (width - 4)])
    return all_lines


def _lines_of(row: PeerRow, results: Results, width: int) -> list[list[object]]:
    figures = results.rows[row.name]
    # Measured before the rows of raypd, on the same machine.
    rates = []
    for measured in results.rows.values():
        if "product_rate" in measured:
            rates.append(measured["product_rate"])
    form = f"{row.engine}, {row.form}"
    if "failed" in figures:
        return [[row.model, "-", form, figures["failed"], *["-"] * (width - 4)]]
    if row.form.startswith("best form"):
        form = f"{row.engine}, {row.form} {json.dumps(figures['form'])}"
    made: list[list[object]] = []
    for name, kinds in figures["works"].items():
        unit = works(rehearse=False)[name].unit
        for kind in kinds:
            joules = kind["joules"]
            watts = joules / kind["seconds"] if joules else None
            tokens_per_joule = kind["fed"] / joules if joules else None
            power = [kind["megahertz"], watts, tokens_per_joule]
            cells = [tables.number(figure, 4) for figure in power]
            speed = f"{tables.number(kind['speed'])} {unit}, {kind['requests']}"
            share = "-"
            if rates:
                share = f"{100 * kind['flops'] / kind['seconds'] / max(rates):.0f}"
            empty = ["-"] * (width - 5 - len(cells))
            made.append([row.model, name, form, speed, share, *empty, *cells])
    return made
