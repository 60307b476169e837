"""A device that runs out of memory: smaller steps, the same answers; and two passes in flight."""

import random
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from raypd.decoding import kv_cache, memory, native, scheduler
from raypd.decoding.attention import avx512
from raypd.decoding.engine import Engine
from raypd.decoding.kv_cache import KVCache, OutOfSlots
from raypd.decoding.linear import is_possible
from raypd.decoding.memory import LEAST_TOKENS, TokenBudget, is_out_of_memory
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from raypd.decoding.pack import pack
from raypd.decoding.sampling import Sampling
from raypd.decoding.sequence import ProgramError
from tests.decoding.cases import CASES, pair, run_all
from tests.decoding.drivers import INSTRUCTION, finished, never, prompts_of, small_device, tokens_of
from tests.tiny import in_float64, tiny_model

METHODS = ["autoregressive", "hyper_parallel", "intra_prompt", "apar", "space", "pasta"]
needs_native = pytest.mark.skipif(
    native.refusal() is not None or not is_possible(), reason="no AVX-512 BF16"
)


def said(engine: Engine, prompts: list[Prompt], most: int, **how: Any) -> list[list[int]]:
    return [
        answer.tokens
        for answer in engine.run((autoregressive(p, most, never) for p in prompts), **how)
    ]


def test_every_method_answers_as_on_a_device_with_room() -> None:
    cases = {name: case(pair("qwen3")[1]) for name, case in CASES.items()}
    for plain in (False, True):
        engine = Engine(pair("qwen3")[0], max_num_seqs=16)
        failed = small_device(engine, lambda tokens: tokens > 40, plain)
        run_all(engine, cases, 1e-3)
        assert (len(failed) > 1, failed[0] > 80, engine.budget.tokens <= 40) == (True, True, True)


def test_sampled_answers_do_not_change_when_passes_fail_now_and_then() -> None:
    rng = random.Random(1)
    prompts = [
        Prompt(INSTRUCTION + tokens_of(rng, 3, 30), shared=len(INSTRUCTION)) for _ in range(8)
    ]
    engines = [Engine(tiny_model("llama").double(), max_num_seqs=5) for _ in range(2)]
    unlucky = random.Random(2)
    failed = small_device(
        engines[1], lambda tokens: tokens > LEAST_TOKENS and unlucky.random() < 0.5
    )
    same, expected = (
        said(engine, prompts, 20, sampling=Sampling(1.0, 0, 1.0), seed=5) for engine in engines
    )
    assert same == expected
    assert failed


def test_at_the_floor_one_program_fails_or_whoever_waits_for_a_shared_prefix() -> None:
    rng = random.Random(3)
    engine = Engine(tiny_model("llama"), max_num_seqs=4)
    small, large = (
        [Prompt(tokens_of(rng, 20, 40)) for _ in range(4)],
        Prompt(tokens_of(rng, 300, 300)),
    )
    expected = said(Engine(tiny_model("llama"), max_num_seqs=4), small, 8)
    small_device(
        engine,
        lambda tokens: any(row.size > 200 and row.high > 16 for row in engine.scheduler.sequences),
    )
    for number, prompt in enumerate([small[0], large, *small[1:]]):
        engine.submit(autoregressive(prompt, 8, never), tag=number)
    done = finished(engine)
    assert type(done[1].error) is ProgramError
    assert "out of memory, and no step is smaller" in str(done[1].error)
    assert [done[n].answer.tokens for n in (0, 2, 3, 4)] == expected
    prefix = tokens_of(random.Random(3), 200, 200)
    engine = Engine(tiny_model("llama"), max_num_seqs=8)
    small_device(
        engine,
        lambda tokens: any(
            row.size > 150 and row.cached < 190 for row in engine.scheduler.sequences
        ),
    )
    for number in range(3):
        engine.submit(
            autoregressive(Prompt([*prefix, 5 + number], shared=200), 4, never),
            tag=f"waits {number}",
        )
    engine.submit(autoregressive(Prompt([5, 6, 7]), 4, never), tag="other")
    errors = {tag: type(ended.error) for tag, ended in finished(engine).items()}
    assert errors == {
        "other": type(None),
        **{f"waits {number}": ProgramError for number in range(3)},
    }
    assert not engine.scheduler.prefixes


@pytest.mark.parametrize("slots", [512, 1024])
def test_prefixes_that_do_not_fit_side_by_side_are_computed_one_after_the_other(slots: int) -> None:
    rng = random.Random(4)
    prefixes = [tokens_of(rng, 300, 300) for _ in range(8)]
    prompts = [
        Prompt(prefix + tokens_of(rng, 5, 9), shared=300) for prefix in prefixes for _ in range(2)
    ]
    prompts.append(Prompt(tokens_of(rng, 1100, 1100), shared=1090))  # no cache here holds it
    engine = Engine(in_float64(tiny_model("llama")), cache_tokens=slots, max_num_batched_tokens=400)
    for number, prompt in enumerate(prompts):
        engine.submit(autoregressive(prompt, 50, never), tag=number)
    done = finished(engine)
    assert "does not fit the cache" in str(done.pop(16).error)
    assert {n: ended.answer.tokens for n, ended in done.items()} == dict(
        enumerate(said(Engine(in_float64(tiny_model("llama"))), prompts[:16], 50))
    )
    assert {ended.counts.decode_tokens for ended in done.values()} == {50}  # not what is fed again


def test_a_device_without_any_memory_ends_the_engine_and_another_error_is_not_taken_for_it():
    engine = Engine(tiny_model("llama"), max_num_seqs=8)
    small_device(engine, lambda tokens: True)
    for number in range(20):
        engine.submit(autoregressive(Prompt([5, 6, number]), 4, never), tag=number)
    assert [len(programs) for programs in [engine.step() for _ in range(4)]] == [0, 1, 1, 1]
    with pytest.raises(RuntimeError, match="not even the smallest steps"):
        engine.step()
    engine = Engine(tiny_model("llama"))
    engine.submit(autoregressive(Prompt([5, 6]), 4, never))
    engine._forward = mock.Mock(
        side_effect=RuntimeError("CUDA error: device-side assert triggered")
    )
    with pytest.raises(RuntimeError, match="device-side assert"):
        engine.step()
    assert not is_out_of_memory(ValueError("out of memory"))


# A third is weights, a pass takes 10,000 bytes a token, a slot 512.
@pytest.mark.parametrize(
    ("total", "how", "tokens", "slots"),
    [
        (60_000_000, {}, 2048, 32_265),
        (60_000_000, {"most": 3000, "graph_tokens": 1024}, 2048, 3000),
        (60_000_000, {"graph_tokens": 1024}, 2048, 12_265),
        (60_000_000, {"share": 0.5}, 1024, 13_203),
        (8_000_000, {}, 256, 4635),
        (2_000_000, {}, None, None),
    ],
)
def test_on_a_gpu_the_cache_is_sized_once(total, how, tokens, slots, monkeypatch) -> None:
    engine, gpu = Engine(tiny_model("llama"), max_num_seqs=8), {"peak": 0}

    def held() -> int:
        return total // 3 + engine.cache.slot_bytes * engine.cache.allocator.slots

    def takes(_, inputs) -> None:
        gpu["peak"] = max(gpu["peak"], held() + 10_000 * len(inputs[0]))
        if held() + 10_000 * len(inputs[0]) > total:
            raise RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            )

    engine.model.register_forward_pre_hook(takes)
    stubs = {
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device: gpu.update(peak=0),
        "memory_allocated": lambda device: held(),
        "max_memory_allocated": lambda device: gpu["peak"],
        "mem_get_info": lambda device: (total - held(), total),
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    if slots is None:
        with pytest.raises(ValueError, match="no memory for the model's cache"):
            engine.size_cache(**how)
        return
    engine.size_cache(**how)
    assert (engine.budget.tokens, engine.cache.allocator.slots) == (tokens, slots)
    prompts = [Prompt(tokens_of(random.Random(n), 500, 900)) for n in range(9)]
    assert said(engine, prompts, 3) == said(Engine(tiny_model("llama")), prompts, 3)
    assert (engine.cache.generation, engine.cache.allocator.slots) == (0, slots)


def test_the_budget_comes_back() -> None:
    budget = TokenBudget(1000)
    assert (budget.too_much(900), budget.tokens) == (True, 450)
    for _ in range(10_000):
        budget.fitted()
    assert budget.tokens == 1000
    for failed, left in ((40, 20), (20, LEAST_TOKENS)):
        assert (budget.too_much(failed), budget.tokens) == (True, left)
    assert not budget.too_much(LEAST_TOKENS)


def test_a_cache_that_cannot_grow_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(64, None, torch.device("cpu"))
    for layer in range(3):
        cache.write(layer, torch.tensor([1]), torch.ones(1, 2, 4), torch.ones(1, 2, 4))
    cache.alloc(64)
    grown, zeros = [], torch.Tensor.new_zeros

    def new_zeros(self, *shape):
        if len(grown) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        grown.append(shape)
        return zeros(self, *shape)

    monkeypatch.setattr(torch.Tensor, "new_zeros", new_zeros)
    with pytest.raises(OutOfSlots):
        cache.alloc(64)
    assert cache.limit == 64
    assert all(
        float(store[1, 0, 0]) == 1 for store in (*cache.keys.values(), *cache.values.values())
    )
    cache.free(0, 64)
    assert cache.alloc(64) == 0


def test_a_cache_in_main_memory_leaves_the_rest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    prompts = [Prompt(tokens_of(rng, 700, 900)) for _ in range(12)]
    free = Engine(tiny_model("llama"), max_num_seqs=12)
    expected = said(free, prompts, 3)
    slot, most = (
        2 * len(free.cache.keys) * free.cache.keys[0][0].nbytes,
        free.cache.allocator.slots - 2048,
    )
    engine = Engine(tiny_model("llama"), max_num_seqs=12)
    free_slots = lambda: most - engine.cache.allocator.slots  # noqa: E731
    monkeypatch.setattr(kv_cache, "has_main_memory", lambda size: size <= slot * free_slots())
    assert said(engine, prompts, 3) == expected
    assert 4096 < engine.cache.allocator.slots <= most
    engine, most = Engine(tiny_model("llama")), 0
    long = [Prompt(tokens_of(rng, 4000, 4000)) for _ in range(2)]
    engine.submit(autoregressive(long[0], 200, never), tag="long")
    assert "no memory for more" in str(finished(engine)["long"].error)
    most = 2**20  # others have given some back
    engine.submit(autoregressive(long[1], 200, never), tag="again")
    assert finished(engine)["again"].error is None


def test_what_is_free_in_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MACHINE", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CONTAINER", tmp_path)
    assert memory.has_main_memory(2**50)  # nothing tells how much there is
    machine = f"MemTotal: {64 << 20} kB\nMemFree: 0 kB\nMemAvailable: {40 << 20} kB\n"
    used = {"memory.current": f"{8 << 30}\n", "memory.stat": f"anon 5\ninactive_file {3 << 30}\n"}
    # A tenth of all of it is spared.
    for files, most in (
        ({"meminfo": machine}, 33),
        ({"memory.max": "max\n"}, 33),
        ({"memory.max": f"{10 << 30}\n", **used}, 4),
    ):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        assert [memory.has_main_memory(most + more << 30) for more in (0, 1)] == [True, False]


def test_a_cache_grows_by_what_is_wanted_where_it_cannot_double(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = KVCache(64, None, torch.device("cpu"))
    key = torch.ones(1, 2, 4)
    cache.write(0, torch.tensor([1]), key, key)
    free = lambda: 2 * key.nbytes * (100 - cache.allocator.slots)  # noqa: E731
    monkeypatch.setattr(kv_cache, "has_main_memory", lambda size: size <= free())
    assert [cache.alloc(64), cache.alloc(32)] == [0, 64]
    assert cache.allocator.slots == len(cache.keys[0]) == 96
    with pytest.raises(
        OutOfSlots, match="32 slots wanted, 0 of 96 free, and there is no memory for more"
    ):
        cache.alloc(32)


class Watched(Engine):
    """`flights`: how many were in flight behind each start; each program is in one of them, and
    keeps its place.
    """

    def __init__(self, *arguments: Any, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        self.most = 0

    def _start(self, chunks: list[Any]) -> str | None:
        reason = super()._start(chunks)
        flying = [chunk.seq for flight in self.flights for chunk in flight.chunks]
        assert (
            len(flying)
            == len(set(map(id, flying)))
            == sum(seq.in_flight for seq in self.scheduler.sequences)
        )
        assert all(len(seq.owner) for seq in flying)
        self.most = max(self.most, len(self.flights))
        return reason


def everything(engine: Engine, stock: Any, digits: int) -> list[str]:
    """All that the programs of all methods answer, figures rounded to so many digits."""
    programs = [program for method in METHODS for program in CASES[method](stock).programs()]
    answers = engine.run(programs, sampling=Sampling(0.8), seed=3)
    return [
        re.sub(r"-?\d+\.\d+(e-\d+)?", lambda m: str(round(float(m[0]), digits)), repr(one))
        for one in answers
    ]


@pytest.mark.parametrize("digits", [pytest.param(17, marks=needs_native), 9])
def test_answers_are_those_of_one_pass_after_the_other(
    digits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit where a token's figures do not depend on what else is in the pass, as in bfloat16
    on CPUs.
    """
    monkeypatch.setattr(scheduler, "_LEAST_HALF", 1)
    monkeypatch.setattr(avx512, "is_best", lambda device, dtype: digits == 17)
    model, stock = tiny_model("llama", head_dim=32), pair("llama")[1]
    model = pack(model.bfloat16()) if digits == 17 else in_float64(model)
    engines = [Watched(model, max_num_seqs=12, passes=passes) for passes in (None, 2)]
    assert everything(engines[0], stock, digits) == everything(engines[1], stock, digits)
    assert [engine.most for engine in engines] == [1, 2]
    assert 1.5 * engines[0].steps < engines[1].steps


@pytest.mark.parametrize(("cache_tokens", "fails"), [(None, 0.3), (350, 0.0)])
def test_what_takes_a_pass_back_leaves_the_other_alone(
    cache_tokens, fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes that have no memory, some of them alone; and programs that have no room in the
    cache.
    """
    monkeypatch.setattr(scheduler, "_LEAST_HALF", 1)
    monkeypatch.setattr(
        "tests.decoding.test_memory.METHODS", ["autoregressive", "hyper_parallel", "space"]
    )
    (model, stock), unlucky, back = pair("qwen3"), random.Random(2), []
    model = in_float64(model)
    expected = everything(Watched(model, max_num_seqs=12), stock, 9)
    engine = Watched(
        model, max_num_seqs=12, max_num_batched_tokens=120, cache_tokens=cache_tokens, passes=2
    )
    rollback, preempt = engine.scheduler.rollback, engine.scheduler._preempt
    engine.scheduler.rollback = lambda *a, alone: back.append(alone) or rollback(*a, alone=alone)
    engine.scheduler._preempt = lambda *a: back.append("preempted") or preempt(*a)
    small_device(
        engine,
        lambda tokens: unlucky.random() < (fails if tokens > LEAST_TOKENS or engine.flights else 0),
    )
    assert everything(engine, stock, 9) == expected
    assert (set(back), engine.most) == ({True, False} if fails else {"preempted"}, 2)


# A prefix, the prompts, 19 tokens of each; with 4, prompts begin apart. All of it in halves would
# be some forty.
@pytest.mark.parametrize(("least", "most"), [(256, 21), (4, 29)])
def test_few_tokens_go_in_one_pass(least: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_LEAST_HALF", least)
    engine = Watched(tiny_model("llama"), max_num_seqs=6, passes=2)
    engine.run(autoregressive(prompt, 20, never) for prompt in prompts_of(3, 6, 20))
    assert engine.steps <= most
