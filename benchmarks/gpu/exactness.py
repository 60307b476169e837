"""Whether the engine computes on a GPU what the unmodified model computes, family by family.

    python -m benchmarks.gpu.exactness                          # on a GPU, at most four minutes
    python -m benchmarks.gpu.exactness --only 'qwen3|gpt_oss'
    python -m benchmarks.gpu.exactness --rehearse --only llama  # anywhere

Each family has a tiny model with random weights. Every method that it has decodes on the device,
and the engine's log-probability of each token that was picked is compared with that of the
unmodified model of transformers in float64: on the same tokens, positions and visibility, without a
cache and without anything of the engine. In float64 they are the same; models with recurrent layers
decode in float32 there, in which their states are held. In 16 and 8 bits the error is held against
that of the unmodified model in the same precision. "fp8 cache" is bfloat16 with `model.kv_cache:
fp8`; the unmodified model then attends to keys and values of 8 bits.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.gpu.device import DEVICE, has_fp8, has_triton, machine
from benchmarks.gpu.results import Figures, Results, add_options, failure, table
from raypd.decoding.engine import Engine
from raypd.decoding.methods.hyper_parallel import hyper_parallel
from raypd.decoding.models.decoder import DecoderModel
from raypd.decoding.models.registry import find_family
from raypd.decoding.pack import pack_model
from raypd.decoding.program import Feed, Predictions, Program
from raypd.decoding.quantized import Fp8Linear, in_fp8, quantize
from raypd.decoding.size_counter import model_sizes
from tests.decoding.cases import CASES, Case, Knowing, slotted_prompts
from tests.decoding.reference import (
    Replay,
    dense_output,
    ids_of,
    mask_of,
    round_keys_and_values,
)
from tests.decoding.test_families import IN_FLOAT32, KINDS, tiny
from tests.tiny import HYBRIDS, in_float64, tiny_model

_FP8_CACHE = "fp8 cache"
PRECISIONS = ("float64", "bfloat16", "float16", "fp8", _FP8_CACHE)
# The methods that models with recurrent layers have. Their values are isolated.
_ISOLATED = "hyper_parallel, values"
_RECURRENT_METHODS = ("autoregressive", "guided", "intra_prompt", _ISOLATED)
_HEAD_DIM = 64
# The largest error in float64. Where a router or a norm computes in float32 in any precision, and
# where states of recurrent layers are held in it, it is larger.
_EXACT = 1e-8
_EXACT_BUT_FOR_A_PART = 1e-5
_EXACT_BUT_FOR_STATES = 1e-3
# In fewer bits, the quantiles of the errors that are compared, and how many times those of the
# unmodified model the engine's may be. Two roundings differ by chance. In a mixture one may send a
# token to another expert, so that only the median counts.
_QUANTILES = {0.5: 3.0, 0.95: 4.0}
# Errors below this are not told apart.
_NOISE = 1e-3
# The seconds that a family takes, beside others.
_ROW_SECONDS = 30.0
_MAX_WORKERS = 12
COLUMNS = ("family", "methods", *PRECISIONS)


@dataclass
class Sample:
    """A token that was picked."""

    row: int  # The token of the program behind which it was picked.
    token: int
    logprob: float
    allowed: list[int] | None


class Trace(Replay):
    """What a program fed, and what it was answered."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        super().__init__(None)

    def recorded(self, program: Program[Any]) -> Program[Any]:
        """Run a program, and note all its feeds and predictions."""
        try:
            feed = next(program)
            while True:
                predictions = yield feed
                if feed.draft is None and not feed.pause:
                    self._note(feed, predictions)
                feed = program.send(predictions)
        except StopIteration as end:
            return end.value

    def _note(self, feed: Feed, predictions: Predictions) -> None:
        first = self._append(feed)
        limits = feed.allowed_token_ids or [None] * len(feed.sample_at)
        for number, index in enumerate(feed.sample_at):
            self.samples.append(
                Sample(
                    row=first + index,
                    token=predictions.tokens[number],
                    logprob=predictions.logprobs[number],
                    allowed=ids_of(limits[number]),
                )
            )

    def logits(self, model: PreTrainedModel) -> dict[int, torch.Tensor]:
        """Return the logits of an unmodified model behind each token that was sampled, by row."""
        if hasattr(model, "is_recurrent_reference"):
            return self._logits_of_texts(model)
        logits, _ = dense_output(model, self.tokens, self.positions, mask_of(self.seen))
        return {sample.row: logits[sample.row] for sample in self.samples}

    def _logits_of_texts(self, model: PreTrainedModel) -> dict[int, torch.Tensor]:
        """Return the same where a token is read behind the text that it sees, in order."""
        logits_of_row: dict[int, torch.Tensor] = {}
        rows = sorted({sample.row for sample in self.samples}, key=lambda row: -len(self.seen[row]))
        for last in rows:
            if last in logits_of_row:
                continue
            text = sorted(self.seen[last], key=lambda row: (self.positions[row], row))
            tokens = [self.tokens[row] for row in text]
            positions = [self.positions[row] for row in text]
            causal = torch.ones(len(text), len(text)).tril().bool()
            logits, _ = dense_output(model, tokens, positions, causal)
            before: set[int] = set()
            for index, row in enumerate(text):
                before.add(row)
                if self.seen[row] == before:
                    logits_of_row[row] = logits[index]
        return logits_of_row


@dataclass(frozen=True)
class Family:
    """A type of model of transformers whose tiny model is decoded."""

    kind: str

    @property
    def is_recurrent(self) -> bool:
        return self.kind in HYBRIDS

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that it has."""
        return _RECURRENT_METHODS if self.is_recurrent else tuple(CASES)

    @property
    def limit(self) -> float:
        """The largest error in float64."""
        if self.is_recurrent:
            return _EXACT_BUT_FOR_STATES
        if self.kind in IN_FLOAT32 or has_experts(self):
            return _EXACT_BUT_FOR_A_PART
        return _EXACT

    def model(self) -> PreTrainedModel:
        """Return its tiny model in float32 on the CPU."""
        if self.is_recurrent:
            model = tiny_model(self.kind)
            if hasattr(model, "set_experts_implementation"):
                model.set_experts_implementation("eager")
            return model
        return tiny(self.kind, _HEAD_DIM)


FAMILIES = list(dict.fromkeys([*KINDS, *HYBRIDS]))


@cache
def has_experts(family: Family) -> bool:
    """Tell whether a family's model is a mixture of experts."""
    return model_sizes(family.model().config).experts > 0


def measure(kind: str, methods: Sequence[str], precisions: Sequence[str]) -> tuple[str, Figures]:
    """Measure a family.

    Args:
        kind: Its type in transformers.
        methods: The methods; those that it does not have are left out.
        precisions: The precisions.

    Returns:
        The type, and figures by precision and method.
    """
    torch.set_num_threads(1)  # Many processes run side by side.
    family = Family(kind)
    figures: Figures = {}
    try:
        cases = {}
        for method in methods:
            if method in family.methods:
                cases[method] = case_of(family, method)
        for precision in precisions:
            figures[precision] = of_precision(family, precision, cases)
    except Exception as error:
        return kind, failure(error)
    return kind, figures


def case_of(family: Family, method: str) -> Case:
    """Return programs of a method, with what a drafter has to know of the model."""
    if method == _ISOLATED:
        prompts = slotted_prompts((1, 1, 1, 1, 1))
        return Case(lambda: [hyper_parallel(prompt, 6, True) for prompt in prompts], _unchecked)
    stock = family.model()
    stock.set_attn_implementation("eager")
    return CASES[method](stock)


def _unchecked(answers: list[Any], atol: float) -> None:
    """Check nothing: answers are compared token by token here."""


@torch.inference_mode()
def of_precision(family: Family, precision: str, cases: dict[str, Case]) -> Figures:
    """Measure all methods of a family in a precision."""
    if precision in ("fp8", _FP8_CACHE) and not has_fp8():
        return {}
    # Drafts are guessed from hidden states, which are rounded here.
    Knowing.tolerance = float("inf")
    exact = _reference(in_float64(_rounded(family, precision)), family)
    stock = exact
    if precision != "float64":
        stock = _reference(_rounded(family, precision), family)
    model = _rounded(family, precision)
    if precision == "float64" and not family.is_recurrent:
        model = in_float64(model)
    model = model.to(DEVICE)
    if precision == "fp8":
        # Scales stay on the device where a layer was quantized.
        quantize(model, "fp8")
        _quantize_reference(stock)
    kv_cache = "auto"
    if precision == _FP8_CACHE:
        kv_cache = "fp8"
        round_keys_and_values(stock)
    on_device = _packed(model, precision)
    attention = "auto"
    if precision == "float64" and not family.is_recurrent and has_triton():
        attention = "triton"
    figures: Figures = {}
    for method, case in cases.items():
        try:
            engine = Engine(
                on_device,
                max_num_seqs=3,
                max_num_batched_tokens=30,
                # Several processes share the GPU.
                cache_tokens=4096,
                attention=attention,
                kv_cache=kv_cache,
            )
            traces = run(engine, case.programs())
            figures[method] = compared(traces, exact, stock)
        except Exception as error:
            figures[method] = failure(error)
    return figures


def _rounded(family: Family, precision: str) -> PreTrainedModel:
    """Return a family's model, with weights that the precision holds."""
    model = family.model()
    if precision == "float64":
        return model
    dtype = torch.float16 if precision == "float16" else torch.bfloat16
    return model.to(dtype)


def _reference(model: PreTrainedModel, family: Family) -> PreTrainedModel:
    """Mark an unmodified model as the reference."""
    model.set_attn_implementation("eager")
    if family.is_recurrent:
        model.is_recurrent_reference = True
    return model


def _quantize_reference(model: PreTrainedModel) -> None:
    """Let an unmodified model multiply what FP8 makes of weights and inputs, in float32."""
    quantize(model, "fp8")

    def multiply(linear: Fp8Linear, x: torch.Tensor) -> torch.Tensor:
        codes, scales = in_fp8(x.reshape(-1, linear.in_features))
        inputs = codes.float() * scales
        weight = linear.weight.float() * linear.scale.t()
        bias = None if linear.bias is None else linear.bias.float()
        out = torch.nn.functional.linear(inputs, weight, bias).to(x.dtype)
        return out.view(*x.shape[:-1], linear.out_features)

    for module in model.modules():
        if isinstance(module, Fp8Linear):
            module.forward = MethodType(multiply, module)  # type: ignore[method-assign]


def _packed(model: PreTrainedModel, precision: str) -> PreTrainedModel | DecoderModel:
    """Return a model as the engine runs it on this device."""
    family = find_family(model)
    if precision == "float64" and family is not None and has_triton():
        from raypd.decoding.layers.in_triton import CudaBuilder

        # `pack_model` has no use for float64, in which the kernels' parts can be told exactly.
        return family.build(model, CudaBuilder())
    if precision == "fp8" and DEVICE.type == "cpu":
        # FP8 is for GPUs: only torch's own layers compute it here.
        return model
    return pack_model(model)


def run(engine: Engine, programs: Sequence[Program[Any]]) -> list[Trace]:
    """Decode programs; return what each fed and was answered."""
    traces = [Trace() for _ in programs]
    pairs = zip(traces, programs, strict=True)
    engine.run(trace.recorded(program) for trace, program in pairs)
    return traces


def compared(traces: list[Trace], exact: PreTrainedModel, stock: PreTrainedModel) -> Figures:
    """Compare the log-probabilities of all tokens with those of the unmodified model.

    Args:
        traces: What programs fed and were answered.
        exact: The unmodified model in float64.
        stock: The unmodified model in the engine's precision; `exact` itself in float64.

    Returns:
        The number of tokens, and the quantiles of the errors of the engine and of the unmodified
        model.
    """
    engine_errors: list[float] = []
    stock_errors: list[float] = []
    for trace in traces:
        exact_logits = trace.logits(exact)
        stock_logits = exact_logits
        if stock is not exact:
            stock_logits = trace.logits(stock)
        for sample in trace.samples:
            expected = logprob_of(sample, exact_logits[sample.row])
            engine_errors.append(abs(sample.logprob - expected))
            rounded = logprob_of(sample, stock_logits[sample.row])
            stock_errors.append(abs(rounded - expected))
    return {
        "tokens": len(engine_errors),
        "largest": max(engine_errors),
        "engine": [quantile(engine_errors, share) for share in _QUANTILES],
        "stock": [quantile(stock_errors, share) for share in _QUANTILES],
    }


def logprob_of(sample: Sample, logits: torch.Tensor) -> float:
    """Return a model's log-probability of a token, among those allowed."""
    scores = logits.double()
    allowed = scores
    if sample.allowed is not None:
        allowed = scores[sample.allowed]
    return float(scores[sample.token] - allowed.logsumexp(-1))


def quantile(errors: list[float], share: float) -> float:
    """Return the error that so many do not exceed."""
    ordered = sorted(errors)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def is_right(family: Family, precision: str, figures: Figures) -> bool:
    """Tell whether the errors of a method are those of rounding."""
    if "failed" in figures:
        return False
    if precision == "float64":
        return bool(figures["largest"] < family.limit)
    pairs = list(zip(figures["engine"], figures["stock"], _QUANTILES.values(), strict=True))
    if has_experts(family):
        pairs = pairs[:1]
    return all(engine <= _NOISE + times * stock for engine, stock, times in pairs)


def cell(family: Family, precision: str, figures: Figures) -> str:
    """Return how many methods are right, and how far they are off."""
    methods: Figures = figures.get(precision) or {}
    if not methods:
        return "-"
    wrong = [name for name in methods if not is_right(family, precision, methods[name])]
    said = f"{len(methods) - len(wrong)} of {len(methods)}"
    if wrong:
        reasons = [f"{name} ({reason(methods[name])})" for name in wrong]
        return f"{said}; NOT {', '.join(reasons)}"
    if precision == "float64":
        largest = max(errors["largest"] for errors in methods.values())
        return f"{said}, to {largest:.0e}"
    median = statistics.median(errors["engine"][0] for errors in methods.values())
    stock = statistics.median(errors["stock"][0] for errors in methods.values())
    return f"{said}, {median:.2g} ({stock:.2g})"


def reason(figures: Figures) -> str:
    """Say in what way a method is wrong."""
    if "failed" in figures:
        return str(figures["failed"])[:80]
    return f"off by {figures['largest']:.2g}"


def wrong_rows(results: Results) -> list[str]:
    """Return the families that are wrong in a precision or failed."""
    wrong = []
    for kind in FAMILIES:
        figures = results.rows.get(kind)
        if figures is None:
            continue
        cells = [cell(Family(kind), precision, figures) for precision in PRECISIONS]
        if "failed" in figures or any("NOT" in text for text in cells):
            wrong.append(kind)
    return wrong


def lines(results: Results) -> Iterator[list[object]]:
    """Return the lines of the table."""
    for kind in FAMILIES:
        figures = results.rows.get(kind)
        if figures is None:
            continue
        family = Family(kind)
        if "failed" in figures:
            yield [kind, len(family.methods), figures["failed"], *["-"] * (len(COLUMNS) - 3)]
            continue
        cells = [cell(family, precision, figures) for precision in PRECISIONS]
        measured = max(len(methods) for methods in figures.values())
        yield [kind, measured, *cells]


@cache
def _workers() -> int:
    """Return how many families are measured side by side."""
    if DEVICE.type != "cuda":
        return 1
    return max(1, min(_MAX_WORKERS, (os.cpu_count() or 1) - 2))


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 1 if a family is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--methods", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    args = parser.parse_args(arguments)
    if DEVICE.type != "cuda" and not args.rehearse:
        parser.error("there is no GPU here: --rehearse runs anywhere")
    script = "exactness, rehearsed" if args.rehearse else "exactness"
    if list(args.methods) != list(CASES) or list(args.precisions) != list(PRECISIONS):
        # A row of some methods does not stand for one of all.
        script += f" ({', '.join([*args.methods, *args.precisions])})"
    results = Results(args.results, script, machine(), args.seconds, args.retry)
    wanted = [kind for kind in FAMILIES if re.search(args.only, kind)]
    run_row = partial(measure, methods=args.methods, precisions=args.precisions)
    try:
        if _workers() > 1:
            results.measure_in_processes(wanted, _ROW_SECONDS, run_row, _workers())
        else:
            for kind in wanted:
                results.measure(kind, 1.0, partial(_figures_of, run_row, kind))
    except KeyboardInterrupt:
        print("... interrupted; what is measured:", flush=True)
    print(f"\n{machine()}")
    print("16 and 8 bits: the median error of log-probabilities (in brackets transformers' own)")
    print(table(COLUMNS, list(lines(results))))
    left = results.describe_left()
    if left:
        print(left)
    return int(bool(wrong_rows(results)))


def _figures_of(run_row: Callable[[str], tuple[str, Figures]], kind: str) -> Figures:
    return run_row(kind)[1]


if __name__ == "__main__":
    sys.exit(main())
