"""The triton kernel on the CPU; test_triton.py runs this file under TRITON_INTERPRET=1."""

import copy
import dataclasses
import random
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter

from raypd.decoding import graphs
from raypd.decoding.attention import plan, sdpa, triton_kernel
from raypd.decoding.attention.check import HeadSizes, error_of
from raypd.decoding.attention.step import PrefixGroup
from raypd.decoding.engine import Engine
from raypd.decoding.layers import triton_kernels
from raypd.decoding.layers.expert_weights import GateKind
from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.in_triton import CudaBuilder, CudaNorm
from raypd.decoding.layers.sources import NormStyle
from raypd.decoding.methods.autoregressive import autoregressive
from raypd.decoding.pack import layers_error
from raypd.decoding.quantized import E4M3, in_fp8, quantize
from raypd.decoding.visibility import Reach
from tests.decoding.cases import CASES, _stacked, pair
from tests.decoding.drivers import INSTRUCTION, built, logits_of, never, prompts_of
from tests.decoding.kernel_cases import compare, random_pass, slow
from tests.decoding.reference import round_keys_and_values
from tests.decoding.test_hybrid import hybrid_case
from tests.decoding.test_properties import check
from tests.tiny import HYBRIDS, in_float64, tiny_model

CPU = torch.device("cpu")
# Latent attention, and layers that read the keys of earlier ones, are in the fast tests, too.
OTHERS = [
    ("intra_prompt", "youtu"),
    ("intra_prompt", "gemma4_text"),
    *slow(
        ("hyper_parallel", "youtu"),
        ("hyper_parallel", "gemma4_text"),
        ("intra_prompt", "gemma2"),
        ("apar", "llama"),
        ("space", "mistral"),
    ),
]
BY_GRAPHS = slow(
    ("hyper_parallel", "llama"),
    ("intra_prompt", "youtu"),
    ("hyper_parallel", "gemma4_text"),
    ("intra_prompt", "gemma2"),
    ("apar", "qwen2"),
    ("pasta", "mistral"),
    ("space", "qwen3"),
)


@pytest.mark.parametrize("seed", [0, 1, 2, 3, *slow((4,), (7,))])
def test_a_random_pass_is_what_torchs_attention_makes_of_it(seed, monkeypatch):
    if seed % 2:  # small blocks, so that small passes have several
        monkeypatch.setattr(triton_kernel, "tiles", lambda *_: {16: triton_kernel.Tile(16, 4)})
    split = plan._split
    shared = []  # Items that read a prefix for several spans at once.
    merged = []  # Tokens with several results.

    def recorded(items, fill):
        shared.extend(item for _, item in items if item.own_keys == 0)
        parts, merge = split(items, fill)
        merged.extend(merge.tokens)
        return parts, merge

    splits_keys = seed in (0, 3)
    if splits_keys:
        monkeypatch.setattr(plan, "_split", recorded)
        monkeypatch.setattr(plan, "_MIN_PART", 16)
        monkeypatch.setattr(triton_kernel, "gpu_of", lambda _: triton_kernel.Gpu((8, 0), 50))
    compare(triton_kernel.attend, sdpa.attend, seed, CPU, torch.float64, 1e-10)
    assert bool(merged) == splits_keys
    assert bool(shared) == (seed == 3)


def test_the_leading_keys_that_all_queries_of_a_span_see_are_counted():
    """The kernel reads them without a mask; if fewer are counted, its results are the same."""
    for seed in range(30):
        step = random_pass(random.Random(seed), CPU, 60)
        span_at = {span.query_start: span for span in step.spans}
        ((_, items),) = plan.KernelPlan(step, 1, (64,)).blocks
        for fields in items.tolist():
            item = plan.Item(*fields)
            span = span_at[item.first]
            hidden = np.flatnonzero(~span.visibility.all(0))
            exact = int(hidden[0]) if len(hidden) else span.key_count
            assert item.clear <= exact
            if span.query_count == 1 or span.causal:
                assert item.clear == exact


# Not bfloat16, whose bits the interpreter multiplies as integers (triton-lang/triton#11584).
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
def test_other_precisions(dtype, atol):
    for seed in range(2):
        compare(
            triton_kernel.attend,
            sdpa.attend,
            seed,
            CPU,
            dtype,
            atol,
            dim=16,
            value_dim=16,
        )


# Twenty heads are two groups that read the keys each.
@pytest.mark.parametrize(("heads", "dim", "latent_dim"), [(20, 80, 64), (3, 40, 24)])
def test_values_that_are_a_part_of_the_keys(heads, dim, latent_dim):
    compare(
        triton_kernel.attend,
        sdpa.attend,
        0,
        CPU,
        torch.float64,
        1e-10,
        kv_heads=1,
        repeat=heads,
        dim=dim,
        value_dim=latent_dim,
        latent=True,
    )


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("mistral", {"sliding_window": 7}),
        ("qwen3", {}),
        ("llama", {"attention_bias": True}),
        ("qwen3_moe", {}),
        ("gpt_oss", {"sliding_window": 7}),
        *slow(
            ("qwen2", {}), ("mixtral", {}), ("qwen2_moe", {"shared_expert_intermediate_size": 64})
        ),
    ],
)
@torch.inference_mode()
def test_layers_for_gpus_give_the_logits_of_transformers(kind, extra):
    model = in_float64(tiny_model(kind, **extra))
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    ids = torch.arange(5, 33)
    expected = model(ids[None]).logits[0]
    half = tiny_model(kind, **extra).half()
    error_in_torch = (logits_of(half, ids, "triton") - expected).norm()
    builder = CudaBuilder()
    found = logits_of(built(model, builder), ids, "triton")
    assert builder.fallbacks == []
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    error = (logits_of(built(half, CudaBuilder()), ids, "triton") - expected).norm()
    assert error < 1.1 * error_in_torch


@pytest.fixture
def rounded_to_fp8(monkeypatch):
    """Round as a GPU does; the interpreter rounds ties and carries in another way.

    It also fails to widen numbers in 8 bits to float64.
    """
    convert = interpreter._convert_float

    def convert_float(numbers, source, target, mode):
        # These are the numbers of a kernel, which no mode of torch watches.
        with _disable_current_modes():
            if source == tl.float8e4nv and target == tl.float64:
                return torch.from_numpy(numbers.view(np.uint8)).view(E4M3).double().numpy()
            if target != tl.float8e4nv:
                return convert(numbers, source, target, mode)
            return torch.from_numpy(numbers).to(E4M3).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert_float)


@pytest.mark.usefixtures("rounded_to_fp8")
@pytest.mark.parametrize("dim", [96, 1500])
def test_inputs_in_fp8_are_what_a_layer_would_make_of_them(dim):
    torch.manual_seed(0)
    x = (torch.randn(7, 2 * dim) * 10).half()
    norm = torch.nn.RMSNorm(2 * dim, dtype=torch.float16)
    norm.variance_epsilon = 1e-6
    torch.nn.init.normal_(norm.weight)
    style = NormStyle.ROUND_FIRST
    x[2] = 0
    x[3] = x[3] * 1e-4
    for plain, converted in (
        (x, triton_kernels.rows_in_fp8(x)),
        (CudaNorm(norm, style, False)(x), CudaNorm(norm, style, True)(x)),
        *[
            (triton_kernels.gated(x, gate, False), triton_kernels.gated(x, gate, True))
            for gate in (GateKind.SWIGLU, GateKind.GELU)
        ],
    ):
        rows, scale = in_fp8(plain)
        assert torch.equal(converted.rows.view(torch.uint8), rows.view(torch.uint8))
        assert torch.equal(converted.scale, scale)


@pytest.mark.usefixtures("rounded_to_fp8")
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-10), (torch.float16, 4e-3)])
def test_a_cache_in_8_bits_is_read_as_numbers(dtype, atol, seed, latent, monkeypatch):
    if seed == 0:
        monkeypatch.setattr(plan, "_MIN_PART", 16)
        monkeypatch.setattr(triton_kernel, "gpu_of", lambda _: triton_kernel.Gpu((8, 9), 50))
    sizes = (
        {
            "kv_heads": 1,
            "repeat": 4,
            "dim": 80,
            "value_dim": 64,
        }
        if latent
        else {}
    )
    sizes |= {"latent": latent, "cache_dtype": E4M3}
    compare(triton_kernel.attend, sdpa.attend, seed, CPU, dtype, atol, **sizes)


@pytest.mark.usefixtures("rounded_to_fp8")
@pytest.mark.parametrize("factor", [1.0, 300.0])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "youtu"])
@torch.inference_mode()
def test_layers_for_gpus_store_the_keys_that_torch_stores(kind, factor):
    """They are also clamped: with a factor of 300, some keys and values are beyond the range."""
    caches = []
    for builder in (Builder(), CudaBuilder()):
        model = in_float64(tiny_model(kind))
        for name, weight in model.named_parameters():
            if "v_proj" in name or "k_norm" in name or "kv_a_layernorm" in name:
                weight.mul_(factor)
        engine = Engine(built(model, builder), attention="triton", kv_cache="fp8")
        engine.run([autoregressive(prompts_of(3, 1)[0], 3, never)])
        assert builder.fallbacks == []
        caches.append(engine.cache)
    in_torch, by_kernels = caches
    stores = [*in_torch.keys.items(), *((-1 - n, store) for n, store in in_torch.values.items())]
    largest = 0.0
    for number, store in stores:
        others = by_kernels.keys if number >= 0 else by_kernels.values
        other = others[number if number >= 0 else -1 - number]
        assert store.dtype == other.dtype == E4M3
        assert torch.equal(store.view(torch.uint8), other.view(torch.uint8))
        largest = max(largest, float(store.double().abs().max()))
    assert (largest == 448) == (factor > 1)


@pytest.mark.usefixtures("rounded_to_fp8")
@pytest.mark.parametrize("builder", [Builder, *slow((CudaBuilder,))])
def test_graphs_decode_from_a_cache_in_8_bits(builder, monkeypatch):
    model, stock = (in_float64(one) for one in pair("qwen3"))
    round_keys_and_values(stock)
    case = _stacked((1, 2), isolate_values=False)(stock)
    replays = Replays(monkeypatch)
    packed = built(model, builder())
    engine = replays.engine(
        packed,
        max_num_seqs=3,
        max_num_batched_tokens=60,
        kv_cache="fp8",
    )
    case.check(engine.run(case.programs()), 1e-9)
    assert 0 < replays.captured < replays.replayed < engine.steps
    assert {store.dtype for store in engine.cache.keys.values()} == {E4M3}


@pytest.mark.usefixtures("rounded_to_fp8")
@torch.inference_mode()
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_layers_in_fp8_are_those_in_torch(kind):
    model = tiny_model(kind, head_dim=32).half()
    quantize(model, "fp8")
    builder = CudaBuilder()
    assert layers_error(model, builder, triton_kernel.attend) <= 0.05
    assert builder.fallbacks == []


@pytest.fixture
def small_gpu(monkeypatch):
    """A GPU for which keys are split, and a prefix is read once for several texts."""
    monkeypatch.setattr(triton_kernel, "gpu_of", lambda _: triton_kernel.Gpu((8, 9), 50))


def error_in_float16(attend, cache_dtype=None) -> float:
    return error_of(attend, CPU, torch.float16, HeadSizes(2, 1, 16), cache_dtype)


@pytest.mark.usefixtures("small_gpu")
@pytest.mark.parametrize("cache_dtype", [None, E4M3])
def test_the_check_of_a_device_passes_and_covers_all_that_the_kernel_does(cache_dtype, monkeypatch):
    split = mock.Mock(wraps=plan._split)
    monkeypatch.setattr(plan, "_split", split)
    assert error_in_float16(triton_kernel.attend, cache_dtype) <= 1
    sized_items, _ = split.call_args.args
    items = [item for _, item in sized_items]
    assert any(item.own_keys == 0 for item in items), "a prefix is read for several spans"
    longest = max(item.own_keys for item in items)
    assert longest > 1.5 * plan._MIN_PART, "keys are split"


@pytest.mark.usefixtures("small_gpu")
def test_an_attention_without_masks_fails_the_check():
    def attend(step, layer, query, key, value):
        groups = []
        for group in step.groups:
            spans = [sees_all(span) for span in group.spans]
            groups.append(PrefixGroup(spans, group.start, group.length))
        unmasked = dataclasses.replace(step, groups=groups, plans={})
        return triton_kernel.attend(unmasked, layer, query, key, value)

    def sees_all(span):
        return dataclasses.replace(span, reach=np.full_like(span.reach, Reach.ALL))

    assert error_in_float16(attend) > 1


@pytest.mark.usefixtures("small_gpu")
def test_an_attention_that_does_not_merge_parts_fails_the_check(monkeypatch):
    monkeypatch.setattr(triton_kernel, "_merge", mock.MagicMock())
    assert error_in_float16(triton_kernel.attend) > 1


def test_layers_without_norms_fail_the_check():
    class Unnormed(CudaBuilder):
        def norm(self, module, style=None, reader=None):
            return torch.nn.Identity()

    model = tiny_model("qwen3").half()
    assert layers_error(model, CudaBuilder(), triton_kernel.attend) <= 0.05
    mixture = tiny_model("qwen3_moe").half()
    assert layers_error(mixture, CudaBuilder(), triton_kernel.attend) <= 0.05
    assert layers_error(model, Unnormed(), triton_kernel.attend) > 0.05


def test_layers_for_gpus_decode_in_parallel_what_the_unmodified_model_says():
    model, stock = (in_float64(one) for one in pair("qwen3"))
    case = _stacked((1, 2), isolate_values=False)(stock)
    engine = Engine(
        built(model, CudaBuilder()), max_num_seqs=3, max_num_batched_tokens=60, attention="triton"
    )
    case.check(engine.run(case.programs()), 1e-9)


@pytest.mark.parametrize(("method", "kind"), [("hyper_parallel", "qwen3"), *OTHERS])
def test_a_method_decodes_what_the_unmodified_model_says(method, kind):
    model, stock = (in_float64(loaded) for loaded in pair(kind))
    case = CASES[method](stock)
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 60}
    # A copy keeps the original's functions in float64, so only its tokens are compared.
    copied = copy.deepcopy(model)
    by_kernel = Engine(
        model,
        **sizes,
        attention="triton",
    ).run(case.programs())
    in_torch = Engine(copied, **sizes).run(case.programs())
    case.check(by_kernel, 1e-9)
    assert tokens_in(by_kernel) == tokens_in(in_torch)


@pytest.mark.parametrize("method", ["hyper_parallel", *slow(("autoregressive",))])
def test_documents_read_the_prefix_that_they_share_once(method, monkeypatch):
    monkeypatch.setattr(plan, "_MIN_PART", 16)
    monkeypatch.setattr(triton_kernel, "gpu_of", lambda _: triton_kernel.Gpu((9, 0), 132))
    shared = []  # Blocks that read a prefix for several documents at once.
    split = plan._split

    def recorded(items, fill):
        shared.extend(item for _, item in items if item.own_keys == 0)
        return split(items, fill)

    monkeypatch.setattr(plan, "_split", recorded)
    model, stock = (in_float64(loaded) for loaded in pair("qwen3"))
    cases = {"hyper_parallel": _stacked((1,) * 6, isolate_values=False)}
    case = cases.get(method, CASES[method])(stock)
    engine = Engine(model, max_num_seqs=8, max_num_batched_tokens=200, attention="triton")
    case.check(engine.run(case.programs()), 1e-9)
    assert shared
    assert {item.prefix for item in shared} == {len(INSTRUCTION)}


class Replays:
    """CUDA graphs as far as a CPU has them: the same forward pass again, over the same tensors.

    It checks that a capture does nothing that waits for a GPU or copies to it, and that a replay
    finds the cache where it was.
    """

    def __init__(self, monkeypatch) -> None:
        self.captured = 0
        self.replayed = 0
        self.pools = set()  # The pools of memory, each with its stream.
        monkeypatch.setattr(graphs, "captured", self._capture)

    def engine(self, model, **sizes) -> Engine:
        engine = Engine(model, attention="triton", cuda_graphs=True, **sizes)
        self.cache = engine.cache
        return engine

    def _capture(self, run, device, pool, stream):
        self.pools.add((pool, stream))
        run()
        addresses = self._addresses()
        with OnDevice():
            run()
        self.captured += 1

        def replay() -> None:
            assert self._addresses() == addresses
            self.replayed += 1
            run()

        return replay

    def _addresses(self) -> list[int]:
        stores = (*self.cache.keys.values(), *self.cache.values.values())
        return [store.data_ptr() for store in stores]


class OnDevice(TorchDispatchMode):
    """Refuses operations that a CUDA graph cannot hold."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        refused = ("item", "lift_fresh", "nonzero", "masked_select", "is_nonzero", "equal")
        assert func._schema.name.removeprefix("aten::") not in refused, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("method", "kind"), BY_GRAPHS)
def test_a_method_decodes_the_same_by_graphs(method, kind, monkeypatch):
    model, stock = (in_float64(loaded) for loaded in pair(kind))
    case = CASES[method](stock)
    replays = Replays(monkeypatch)
    engine = replays.engine(model, max_num_seqs=3, max_num_batched_tokens=60)
    case.check(engine.run(case.programs()), 1e-9)
    assert 0 < replays.captured < replays.replayed < engine.steps


@pytest.mark.parametrize(
    "kind",
    [
        "qwen3_moe",
        "qwen3_5_text",
        *slow(("gpt_oss",), ("granitemoehybrid",), ("lfm2",), ("youtu",), ("gemma4_text",)),
    ],
)
def test_layers_for_gpus_of_every_family_run_in_graphs(kind, monkeypatch):
    is_hybrid = kind in HYBRIDS
    # States are held in float32.
    model, stock = (loaded if is_hybrid else in_float64(loaded) for loaded in pair(kind))
    if hasattr(stock.config, "num_experts_per_tok"):
        stock.set_experts_implementation("eager")
        model.set_experts_implementation("eager")
    case = hybrid_case("hyper_parallel", kind) if is_hybrid else CASES["hyper_parallel"](stock)
    replays = Replays(monkeypatch)
    engine = replays.engine(
        built(model, CudaBuilder()),
        max_num_seqs=3,
        max_num_batched_tokens=60,
    )
    case.check(engine.run(case.programs()), 1e-3 if is_hybrid else 1e-9)
    assert 0 < replays.captured <= replays.replayed < engine.steps


def test_long_keys_are_split_in_graphs_too(monkeypatch):
    monkeypatch.setattr(plan, "_MIN_PART", 16)
    monkeypatch.setattr(triton_kernel, "gpu_of", lambda _: triton_kernel.Gpu((8, 0), 20))
    monkeypatch.setattr(graphs, "_MIN_SPLIT_ROWS", 4)
    monkeypatch.setattr(graphs, "_MAX_LOGIT_ROWS", 3)  # a graph has 8 of logits at least
    model = in_float64(tiny_model("llama"))
    prompts = prompts_of(3, 2, 30, plain=1)
    replays = Replays(monkeypatch)
    plain_engine = Engine(copy.deepcopy(model))
    engine = replays.engine(model)
    graph_set = engine.graphs
    graph_set.pool = "a pool"
    graph_set.stream = "a stream"
    assert decoded(engine, prompts, 4) == decoded(plain_engine, prompts, 4)
    plans = [plan for graph in graph_set.graphs.values() for plan in graph.plans.values()]
    assert any(plan.split_rows for plan in plans)
    # The first pass of a size goes without a graph.
    assert graph_set.sizes >= graph_set.graphs.keys()
    assert replays.pools == {("a pool", "a stream")}


def test_large_passes_and_many_logits_go_without_graphs(monkeypatch):
    monkeypatch.setattr(graphs, "_MAX_LOGIT_ROWS", 3)
    engine = Replays(monkeypatch).engine(in_float64(tiny_model("llama")))
    engine.run([autoregressive(prompts_of(3, 1)[0], 4, never)])
    for tokens, samples in ((8193, 1), (9, 4)):
        ids = torch.zeros(tokens)
        step = SimpleNamespace(
            spans=[],
            slots=ids,
            sample_rows=[0] * samples,
        )
        assert engine.graphs.logits(ids, ids, step) is None


# Qwen3 with 0.6, 1.7, 4 and 8 billion weights.
@pytest.mark.parametrize(
    ("hidden_size", "intermediate_size", "tokens"),
    [(1024, 3072, 8192), (2048, 6144, 4034), (2560, 9728, 2179), (4096, 12288, 1024)],
)
def test_larger_models_have_smaller_graphs(hidden_size, intermediate_size, tokens):
    config = SimpleNamespace(hidden_size=hidden_size, intermediate_size=intermediate_size)
    assert graphs.max_graph_tokens(config) == tokens


@pytest.mark.parametrize("window", [None, 6])
def test_random_programs_by_graphs_equal_the_rule_written_out(window, monkeypatch):
    model, stock = (one.double() for one in pair("mistral", sliding_window=window))
    replays = Replays(monkeypatch)
    monkeypatch.setattr(graphs, "_MAX_GRAPHS", 3)
    engine = replays.engine(model, max_num_seqs=2, max_num_batched_tokens=40)
    check(range(10), engine, True, stock)
    assert 3 == replays.captured < replays.replayed


@pytest.mark.slow
def test_graphs_are_captured_anew_when_the_cache_has_moved(monkeypatch):
    model = in_float64(tiny_model("llama"))
    prompts = prompts_of(3, 4, 20)
    replays = Replays(monkeypatch)
    expected = decoded(Engine(copy.deepcopy(model)), prompts, 8)
    engine = replays.engine(model)
    for number, prompt in enumerate(prompts):
        engine.submit(autoregressive(prompt, 8, never), tag=number)
    tokens = {}
    captured_before = 0
    while engine.pending:
        for program in engine.step():
            tokens[program.tag] = program.answer.tokens
        if engine.steps == 5:
            captured_before = replays.captured
            engine.cache.alloc(5000)
    assert replays.captured > captured_before > 0
    assert [tokens[number] for number in range(4)] == expected


def test_where_a_capture_fails_passes_go_without_graphs(monkeypatch, caplog):
    error = RuntimeError("operation not permitted when stream is capturing")
    monkeypatch.setattr(graphs, "captured", mock.Mock(side_effect=error))
    model = in_float64(tiny_model("llama"))
    prompts = prompts_of(3, 2, 20)
    expected = decoded(Engine(copy.deepcopy(model)), prompts, 8)
    engine = Engine(model, attention="triton", cuda_graphs=True)
    assert decoded(engine, prompts, 8) == expected
    assert caplog.text.count("no CUDA graphs") == 1


def tokens_in(answer) -> list:
    """Return the tokens of an answer, whatever its parts are."""
    if isinstance(answer, list):
        return [tokens_in(part) for part in answer]
    if hasattr(answer, "points"):
        return [tokens_in(part) for part in answer.points]
    return list(answer.tokens)


def decoded(engine, prompts, max_tokens: int) -> list[list[int]]:
    """Return the tokens that an engine decodes behind each prompt."""
    programs = (autoregressive(prompt, max_tokens, never) for prompt in prompts)
    return [answer.tokens for answer in engine.run(programs)]
