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
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from benchmarks import gpu
from raypd.decoding import cuda_layer, graphs
from raypd.decoding.attention import plan, sdpa, triton_kernel
from raypd.decoding.attention.check import error_of
from raypd.decoding.attention.step import PrefixGroup
from raypd.decoding.cuda_layer import CudaLayer
from raypd.decoding.engine import Engine
from raypd.decoding.llama import Llama
from raypd.decoding.methods.autoregressive import autoregressive
from raypd.decoding.pack import layers_error
from raypd.decoding.quantized import E4M3, in_fp8, quantize
from raypd.decoding.visibility import Reach
from tests.decoding.cases import CASES, _stacked, pair
from tests.decoding.drivers import logits_of, never, prompts_of
from tests.decoding.kernel_cases import compare, random_pass, slow
from tests.decoding.test_properties import check
from tests.runs import says
from tests.tiny import in_float64, tiny_model

CPU = torch.device("cpu")
OTHERS = slow(("intra_prompt", "gemma2"), ("apar", "llama"), ("space", "mistral"))
BY_GRAPHS = slow(
    ("hyper_parallel", "llama"),
    ("intra_prompt", "gemma2"),
    ("apar", "qwen2"),
    ("pasta", "mistral"),
    ("space", "qwen3"),
)


@pytest.mark.parametrize("seed", [0, 1, 2, 3, *slow((4,), (7,))])
def test_a_random_pass_is_what_torchs_attention_makes_of_it(seed, monkeypatch):
    if seed % 2:  # small blocks, so that small passes have several
        monkeypatch.setattr(triton_kernel, "tiles", lambda *_: {16: (16, 4)})
    split, merged, shared = plan._split, [], []

    def recorded(items, fill):
        shared.extend(item for _, item in items if not item.own_keys)
        result = split(items, fill)
        merged.extend(result[1])
        return result

    if seed in (0, 3):  # keys are split, and a prefix is read for several spans at once
        monkeypatch.setattr(plan, "_split", recorded)
        monkeypatch.setattr(plan, "_LEAST_PART", 16)
        monkeypatch.setattr(triton_kernel, "card", lambda _: ((8, 0), 50))
    compare(triton_kernel.attend, sdpa.attend, seed, CPU, torch.float64, 1e-10)
    assert (bool(merged), bool(shared)) == (seed in (0, 3), seed == 3)


def test_the_leading_keys_that_all_queries_of_a_span_see_are_counted():
    """What is read without a mask: results are the same with fewer."""
    for seed in range(30):
        step = random_pass(random.Random(seed), CPU, 60)
        ((_, items),) = plan.KernelPlan(step, 1, (64,)).blocks
        for item in items.tolist():
            span = next(span for group in step.groups for span in group.spans if span.a == item[0])
            hidden = np.flatnonzero(~span.seen.all(0))
            exact = int(hidden[0]) if len(hidden) else span.length
            assert item[6] == exact if span.size == 1 or span.causal else item[6] <= exact


# Not bfloat16, whose bits the interpreter multiplies as integers (triton-lang/triton#11584).
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
def test_other_precisions(dtype, atol):
    for seed in range(2):
        compare(triton_kernel.attend, sdpa.attend, seed, CPU, dtype, atol, dim=16, value_dim=16)


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("mistral", {"sliding_window": 7}),
        ("qwen3", {}),
        ("llama", {"attention_bias": True}),
        *slow(("qwen2", {})),
    ],
)
@torch.inference_mode()
def test_layers_for_gpus_give_the_logits_of_transformers(kind, extra):
    model, ids = in_float64(tiny_model(kind, **extra)), torch.arange(5, 33)
    expected = model(ids[None]).logits[0]
    assert all(CudaLayer.takes(layer) for layer in model.model.layers)
    half = tiny_model(kind, **extra).half()
    plain = (logits_of(half, ids, "triton") - expected).norm()
    torch.testing.assert_close(
        logits_of(Llama(model, CudaLayer), ids, "triton"), expected, atol=1e-9, rtol=0
    )
    assert (logits_of(Llama(half, CudaLayer), ids, "triton") - expected).norm() < 1.1 * plain


@pytest.fixture
def rounded_to_fp8(monkeypatch):
    """As a GPU does it: of ties and carries the interpreter makes other numbers."""
    convert = interpreter._convert_float

    def right(numbers, source, target, mode):
        if target != tl.float8e4nv:
            return convert(numbers, source, target, mode)
        return torch.from_numpy(numbers).to(E4M3).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", right)


@pytest.mark.usefixtures("rounded_to_fp8")
@pytest.mark.parametrize("dim", [96, 1500])
def test_inputs_in_fp8_are_what_a_layer_would_make_of_them(dim):
    torch.manual_seed(0)
    x, norm = (torch.randn(7, 2 * dim) * 10).half(), torch.nn.RMSNorm(2 * dim, dtype=torch.float16)
    norm.variance_epsilon = 1e-6
    torch.nn.init.normal_(norm.weight)
    x[2], x[3] = 0, x[3] * 1e-4
    for plain, made in (
        (x, cuda_layer.rows_in_fp8(x)),
        (CudaLayer.norm(x, norm), CudaLayer.norm(x, norm, True)),
        (cuda_layer.swiglu(x, False), cuda_layer.swiglu(x, True)),
    ):
        rows, scale = in_fp8(plain)
        assert torch.equal(made[0].view(torch.uint8), rows.view(torch.uint8))
        assert torch.equal(made[1], scale)


@pytest.mark.usefixtures("rounded_to_fp8")
@torch.inference_mode()
def test_layers_in_fp8_are_those_in_torch():
    quantize(model := tiny_model("qwen3", head_dim=32).half(), "fp8")
    assert all(CudaLayer.takes(layer) for layer in model.model.layers)
    assert layers_error(model, CudaLayer, triton_kernel.attend) <= 0.05


def test_what_is_wrong_on_a_device_is_not_taken_there(monkeypatch):
    split, shared = plan._split, []

    def of_all_keys(step, layer, query, key, value):
        groups = [
            PrefixGroup([sees_all(span) for span in g.spans], g.start, g.length)
            for g in step.groups
        ]
        return triton_kernel.attend(
            dataclasses.replace(step, groups=groups, plans={}), layer, query, key, value
        )

    def sees_all(span):
        return dataclasses.replace(span, reach=np.full_like(span.reach, Reach.ALL))

    def without_the_parts(*arguments):
        monkeypatch.setattr(triton_kernel, "_merge", mock.MagicMock())
        return triton_kernel.attend(*arguments)

    # Of a GPU: it splits long keys, and reads the prefix once for several texts.
    monkeypatch.setattr(triton_kernel, "card", lambda _: ((8, 9), 50))
    monkeypatch.setattr(
        plan, "_split", lambda items, fill: shared.append(items) or split(items, fill)
    )
    for attend, right in (
        (triton_kernel.attend, True),
        (of_all_keys, False),
        (without_the_parts, False),
    ):
        assert (error_of(attend, CPU, torch.float16, 2, 1, 16) <= 1) == right
    items = [item for _, item in shared[0]]
    assert any(not item.own_keys for item in items)
    assert max(item.own_keys for item in items) > 1.5 * plan._LEAST_PART
    model = tiny_model("qwen3").half()

    class Unnormed(CudaLayer):
        norm = staticmethod(lambda x, norm, fp8=False: x)

    for layer, right in ((CudaLayer, True), (Unnormed, False)):
        assert (layers_error(model, layer, triton_kernel.attend) <= 0.05) == right


def test_layers_for_gpus_decode_in_parallel_what_the_unmodified_model_says():
    model, stock = (in_float64(one) for one in pair("qwen3"))
    case = _stacked((1, 2), isolate_values=False)(stock)
    engine = Engine(
        Llama(model, CudaLayer), max_num_seqs=3, max_num_batched_tokens=60, attention="triton"
    )
    case.check(engine.run(case.programs()), 1e-9)


@pytest.mark.parametrize(("method", "kind"), [("hyper_parallel", "qwen3"), *OTHERS])
def test_a_method_decodes_what_the_unmodified_model_says(method, kind):
    model, stock = (in_float64(one) for one in pair(kind))
    case, sizes = CASES[method](stock), {"max_num_seqs": 3, "max_num_batched_tokens": 60}
    other = copy.deepcopy(model)
    answers = Engine(model, **sizes, attention="triton").run(case.programs())
    case.check(answers, 1e-9)
    assert tokens_in(answers) == tokens_in(Engine(other, **sizes).run(case.programs()))


class Replays:
    """CUDA graphs as far as a CPU has them: the same forward pass again, over the same tensors.

    A capture is checked to do nothing that waits for a GPU or copies to it, a replay to find the
    cache where it was.
    """

    def __init__(self, monkeypatch) -> None:
        self.captured = self.replayed = 0
        self.pools = set()  # of memory, each with its stream
        monkeypatch.setattr(graphs, "captured", self._capture)

    def engine(self, model, **sizes) -> Engine:
        self.cache = (engine := Engine(model, attention="triton", cuda_graphs=True, **sizes)).cache
        return engine

    def _capture(self, run, device, pool, stream):
        self.pools.add((pool, stream))
        run()
        places = self._places()
        with OnDevice():
            run()
        self.captured += 1

        def replay() -> None:
            assert self._places() == places
            self.replayed += 1
            run()

        return replay

    def _places(self) -> list[int]:
        return [
            store.data_ptr() for store in (*self.cache.keys.values(), *self.cache.values.values())
        ]


class OnDevice(TorchDispatchMode):
    """Refuses operations that a CUDA graph cannot hold."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        refused = ("item", "lift_fresh", "nonzero", "masked_select", "is_nonzero", "equal")
        assert func._schema.name.removeprefix("aten::") not in refused, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("method", "kind"), BY_GRAPHS)
def test_a_method_decodes_the_same_by_graphs(method, kind, monkeypatch):
    model, stock = (in_float64(one) for one in pair(kind, sliding_window=4096))
    case, replays = CASES[method](stock), Replays(monkeypatch)
    engine = replays.engine(model, max_num_seqs=3, max_num_batched_tokens=60)
    case.check(engine.run(case.programs()), 1e-9)
    assert 0 < replays.captured < replays.replayed < engine.steps


def test_long_keys_are_split_in_graphs_too(monkeypatch):
    monkeypatch.setattr(plan, "_LEAST_PART", 16)
    monkeypatch.setattr(triton_kernel, "card", lambda _: ((8, 0), 20))
    monkeypatch.setattr(graphs, "_LEAST_ROWS", 4)
    monkeypatch.setattr(graphs, "_MOST_ROWS", 3)  # a graph has 8 of logits at least
    model, prompts, replays = (
        in_float64(pair("llama")[0]),
        prompts_of(3, 2, 30, plain=1),
        Replays(monkeypatch),
    )
    engines = Engine(copy.deepcopy(model)), replays.engine(model)
    engines[1].graphs.pool, engines[1].graphs.stream = "a pool", "a stream"
    answers = [
        tokens_in(engine.run(autoregressive(prompt, 4, never) for prompt in prompts))
        for engine in engines
    ]
    assert answers[0] == answers[1]
    assert any(graph.split_rows for graph in engines[1].graphs.graphs.values())
    # The first of a size goes without.
    assert engines[1].graphs.sizes >= engines[1].graphs.graphs.keys()
    assert replays.pools == {("a pool", "a stream")}
    for ids, kept in ((torch.zeros(4097), [0]), (torch.zeros(9), [0] * 4)):
        assert engines[1].graphs.logits(ids, ids, SimpleNamespace(groups=[], kept=kept)) is None
    qwen3 = [(1024, 3072), (2048, 6144), (2560, 9728), (4096, 12288)]  # 0.6B, 1.7B, 4B, 8B
    most = [
        graphs.most_tokens(SimpleNamespace(hidden_size=h, intermediate_size=i)) for h, i in qwen3
    ]
    assert most == [4096, 4034, 2179, 1024]


@pytest.mark.parametrize("window", [None, 6])
def test_random_programs_by_graphs_equal_the_rule_written_out(window, monkeypatch):
    model, stock = (one.double() for one in pair("mistral", sliding_window=window))
    replays = Replays(monkeypatch)
    monkeypatch.setattr(graphs, "_MOST_GRAPHS", 3)
    check((1, 3, 4), replays.engine(model, max_num_seqs=2, max_num_batched_tokens=40), True, stock)
    assert 3 == replays.captured < replays.replayed or window


@pytest.mark.slow
def test_graphs_are_captured_anew_when_the_cache_has_moved(monkeypatch):
    model, prompts, replays = (
        in_float64(pair("llama")[0]),
        prompts_of(3, 4, 20),
        Replays(monkeypatch),
    )
    engine, same = replays.engine(model), Engine(copy.deepcopy(model))
    for number, prompt in enumerate(prompts):
        engine.submit(autoregressive(prompt, 8, never), tag=number)
    answers, before = {}, 0
    while engine.pending:
        answers |= {done.tag: done.answer for done in engine.step()}
        if engine.steps == 5:
            before = replays.captured
            engine.cache.alloc(5000)
    assert replays.captured > before > 0
    expected = same.run(autoregressive(prompt, 8, never) for prompt in prompts)
    assert tokens_in([answers[number] for number in range(4)]) == tokens_in(expected)


def test_where_a_capture_fails_passes_go_on_without(monkeypatch, caplog):
    def refused(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "captured", refused)
    model, prompts = in_float64(pair("llama")[0]), prompts_of(3, 2, 20)
    same = Engine(copy.deepcopy(model))
    engine = Engine(model, attention="triton", cuda_graphs=True)
    answers = engine.run(autoregressive(prompt, 8, never) for prompt in prompts)
    assert tokens_in(answers) == tokens_in(
        same.run(autoregressive(prompt, 8, never) for prompt in prompts)
    )
    assert caplog.text.count("no CUDA graphs") == 1


def test_the_benchmark_of_gpus_makes_its_table(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu", "--tiny"])
    assert gpu.main() == 0
    rows = [
        line.split(" | ")[1:3]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("| tiny")
    ]
    assert [attention for method, attention in rows if method.startswith("hyper_parallel")] == [
        "sdpa",
        "triton",
    ] * 2
    assert len(rows) == 11


def test_an_interrupted_benchmark_prints_what_it_has(monkeypatch, capsys):
    line = ["tiny", "generate", "sdpa", 2, "1.00", "2.00", 3, "4", "5.0", "-"]
    monkeypatch.setattr(gpu, "row", mock.Mock(side_effect=[line, KeyboardInterrupt]))
    monkeypatch.setattr(gpu, "passes", lambda *_: ({"prefill": 0.5}, "a table of the profiler"))
    monkeypatch.setattr("sys.argv", ["gpu", "--tiny"])
    assert gpu.main() == 1
    says(
        capsys.readouterr().out,
        "a table of the profiler",
        "| tiny | generate | sdpa |",
        "summary: estimates",
        "masks for 64 sequences",
    )


def tokens_in(answer) -> list:
    """The tokens of an answer, whatever its parts are."""
    parts = answer if isinstance(answer, list) else getattr(answer, "points", None)
    return list(answer.tokens) if parts is None else [tokens_in(part) for part in parts]
