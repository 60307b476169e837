"""A device that runs out of memory answers the same in smaller steps; two passes in flight."""

import random
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from raypd.decoding import kv_cache, memory, native, scheduler
from raypd.decoding.attention import avx512
from raypd.decoding.engine import Engine, size_cache
from raypd.decoding.kv_cache import KVCache, OutOfSlots
from raypd.decoding.linear import is_possible
from raypd.decoding.memory import MIN_PASS_TOKENS, TokenBudget, is_out_of_memory
from raypd.decoding.methods.autoregressive import autoregressive
from raypd.decoding.pack import pack_model
from raypd.decoding.program import ProgramError
from raypd.decoding.sampling import Sampling
from raypd.decoding.text import Prompt
from tests.decoding.cases import CASES, pair, run_all
from tests.decoding.drivers import INSTRUCTION, finished, never, prompts_of, small_device, tokens_of
from tests.tiny import in_float64, tiny_model

METHODS = ["autoregressive", "hyper_parallel", "intra_prompt", "apar", "space", "pasta"]
needs_native = pytest.mark.skipif(
    native.refusal() is not None or not is_possible(), reason="no AVX-512 BF16"
)


def decoded(
    engine: Engine, prompts: list[Prompt], max_tokens: int, **options: Any
) -> list[list[int]]:
    """Return the tokens that an engine decodes behind each prompt."""
    programs = (autoregressive(prompt, max_tokens, never) for prompt in prompts)
    return [answer.tokens for answer in engine.run(programs, **options)]


@pytest.mark.parametrize("plain", [False, True], ids=["OutOfMemoryError", "RuntimeError"])
def test_every_method_answers_as_on_a_device_with_room(plain: bool) -> None:
    model, stock = pair("qwen3")
    cases = {name: case(stock) for name, case in CASES.items()}
    engine = Engine(model, max_num_seqs=16)
    failed = small_device(engine, lambda tokens: tokens > 40, plain)
    run_all(engine, cases, 1e-3)
    assert len(failed) > 1
    assert failed[0] > 80
    assert engine.budget.tokens <= 40


def test_sampled_answers_do_not_change_when_passes_fail_now_and_then() -> None:
    rng = random.Random(1)
    prompts = []
    for _ in range(8):
        tokens = INSTRUCTION + tokens_of(rng, 3, 30)
        prompts.append(Prompt(tokens, shared=len(INSTRUCTION)))
    unlucky = random.Random(2)

    def fails(tokens: int) -> bool:
        return tokens > MIN_PASS_TOKENS and unlucky.random() < 0.5

    roomy = Engine(tiny_model("llama").double(), max_num_seqs=5)
    small = Engine(tiny_model("llama").double(), max_num_seqs=5)
    failed = small_device(small, fails)
    sampling = Sampling(1.0, 0, 1.0)
    expected = decoded(roomy, prompts, 20, sampling=sampling, seed=5)
    assert decoded(small, prompts, 20, sampling=sampling, seed=5) == expected
    assert failed


def test_at_the_floor_only_the_largest_program_fails() -> None:
    rng = random.Random(3)
    small = [Prompt(tokens_of(rng, 20, 40)) for _ in range(4)]
    large = Prompt(tokens_of(rng, 300, 300))
    expected = decoded(Engine(tiny_model("llama"), max_num_seqs=4), small, 8)
    engine = Engine(tiny_model("llama"), max_num_seqs=4)

    def fails(tokens: int) -> bool:
        return any(seq.size > 200 and seq.region.high > 16 for seq in engine.scheduler.sequences)

    small_device(engine, fails)
    for number, prompt in enumerate([small[0], large, *small[1:]]):
        engine.submit(autoregressive(prompt, 8, never), tag=number)
    done = finished(engine)
    error = done.pop(1).error
    assert type(error) is ProgramError
    assert "out of memory, and passes cannot get smaller" in str(error)
    assert [done[number].answer.tokens for number in sorted(done)] == expected


def test_at_the_floor_whoever_waits_for_a_shared_prefix_fails_with_it() -> None:
    prefix = tokens_of(random.Random(3), 200, 200)
    engine = Engine(tiny_model("llama"), max_num_seqs=8)

    def fails(tokens: int) -> bool:
        return any(seq.size > 150 and seq.cached < 190 for seq in engine.scheduler.sequences)

    small_device(engine, fails)
    for number in range(3):
        prompt = Prompt([*prefix, 5 + number], shared=200)
        engine.submit(autoregressive(prompt, 4, never), tag=f"waits {number}")
    engine.submit(autoregressive(Prompt([5, 6, 7]), 4, never), tag="other")
    done = finished(engine)
    assert done.pop("other").error is None
    assert set(done) == {"waits 0", "waits 1", "waits 2"}
    assert {type(program.error) for program in done.values()} == {ProgramError}
    assert not engine.scheduler.prefixes


@pytest.mark.parametrize("slots", [512, 1024])
def test_prefixes_that_do_not_fit_side_by_side_are_computed_one_after_the_other(slots: int) -> None:
    rng = random.Random(4)
    prompts = []
    prefixes = [tokens_of(rng, 300, 300) for _ in range(8)]
    for prefix in prefixes:
        for _ in range(2):
            prompts.append(Prompt(prefix + tokens_of(rng, 5, 9), shared=300))
    too_long = Prompt(tokens_of(rng, 1100, 1100), shared=1090)  # No cache here holds it.
    engine = Engine(
        in_float64(tiny_model("llama")),
        cache_tokens=slots,
        max_num_batched_tokens=400,
    )
    for number, prompt in enumerate([*prompts, too_long]):
        engine.submit(autoregressive(prompt, 50, never), tag=number)
    done = finished(engine)
    assert "does not fit the cache" in str(done.pop(len(prompts)).error)
    expected = decoded(Engine(in_float64(tiny_model("llama"))), prompts, 50)
    assert [done[number].answer.tokens for number in range(len(prompts))] == expected
    # Tokens that are fed again do not count.
    assert {program.counts.decode_tokens for program in done.values()} == {50}


def test_a_device_without_any_memory_ends_the_engine() -> None:
    engine = Engine(tiny_model("llama"), max_num_seqs=8)
    small_device(engine, lambda tokens: True)
    for number in range(20):
        engine.submit(autoregressive(Prompt([5, 6, number]), 4, never), tag=number)
    failed_programs = [len(engine.step()) for _ in range(4)]
    assert failed_programs == [0, 1, 1, 1]
    with pytest.raises(RuntimeError, match="even the smallest passes no longer fit"):
        engine.step()


def test_another_error_of_the_device_is_not_taken_for_a_lack_of_memory() -> None:
    engine = Engine(tiny_model("llama"))
    engine.submit(autoregressive(Prompt([5, 6]), 4, never))
    error = RuntimeError("CUDA error: device-side assert triggered")
    engine._forward = mock.Mock(side_effect=error)
    with pytest.raises(RuntimeError, match="device-side assert"):
        engine.step()
    assert not is_out_of_memory(ValueError("out of memory"))


# A third of the memory holds weights. A pass takes 10,000 bytes per token, a slot 512, and 128 in 8
# bits.
@pytest.mark.parametrize(
    ("total", "options", "tokens", "slots"),
    [
        (60_000_000, {}, 2048, 32_265),
        (60_000_000, {"kv_cache": "fp8"}, 2048, 4 * 32_265 + 2),
        (60_000_000, {"limit": 3000, "graph_tokens": 1024}, 2048, 3000),
        (60_000_000, {"graph_tokens": 1024}, 2048, 12_265),
        (60_000_000, {"share": 0.5}, 1024, 13_203),
        (8_000_000, {}, 256, 4635),
        (2_000_000, {}, None, None),
    ],
)
def test_on_a_gpu_the_cache_is_sized_once(total, options, tokens, slots, monkeypatch) -> None:
    options = dict(options)
    kv_cache = options.pop("kv_cache", "auto")
    engine = Engine(tiny_model("llama"), max_num_seqs=8, kv_cache=kv_cache)
    gpu = {"peak": 0}

    def allocated() -> int:
        return total // 3 + engine.cache.slot_bytes * engine.cache.allocator.slots

    def allocate_pass(_, inputs) -> None:
        during_pass = allocated() + 10_000 * len(inputs[0])
        gpu["peak"] = max(gpu["peak"], during_pass)
        if during_pass > total:
            raise RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            )

    engine.model.register_forward_pre_hook(allocate_pass)
    stubs = {
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device: gpu.update(peak=0),
        "memory_allocated": lambda device: allocated(),
        "max_memory_allocated": lambda device: gpu["peak"],
        "mem_get_info": lambda device: (total - allocated(), total),
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    if slots is None:
        with pytest.raises(ValueError, match="no memory for the model's cache"):
            size_cache(engine, **options)
        return
    size_cache(engine, **options)
    assert engine.budget.tokens == tokens
    assert engine.cache.allocator.slots == slots
    graph_tokens = min(tokens, options.get("graph_tokens", 0))
    assert engine.pass_bytes == 10_000 * (tokens + graph_tokens)
    prompts = [Prompt(tokens_of(random.Random(n), 500, 900)) for n in range(9)]
    roomy = Engine(tiny_model("llama"), kv_cache=kv_cache)
    assert decoded(engine, prompts, 3) == decoded(roomy, prompts, 3)
    # The cache has not grown since.
    assert engine.cache.generation == 0
    assert engine.cache.allocator.slots == slots


def test_the_budget_comes_back() -> None:
    budget = TokenBudget(1000)
    assert budget.shrink(900)
    assert budget.tokens == 450
    for _ in range(10_000):
        budget.record_success()
    assert budget.tokens == 1000


def test_the_budget_has_a_floor() -> None:
    budget = TokenBudget(1000)
    assert budget.shrink(40)
    assert budget.tokens == 20
    assert budget.shrink(20)
    assert budget.tokens == MIN_PASS_TOKENS
    assert not budget.shrink(MIN_PASS_TOKENS)


def test_a_cache_that_cannot_grow_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(64, None, torch.device("cpu"))
    ones = torch.ones(1, 2, 4)
    for layer in range(3):
        cache.write(layer, torch.tensor([1]), ones, ones)
    cache.alloc(64)
    new_zeros = torch.Tensor.new_zeros
    allocated = []

    def new_zeros_with_little_memory(self, *shape, **options):
        if len(allocated) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        allocated.append(shape)
        return new_zeros(self, *shape, **options)

    monkeypatch.setattr(torch.Tensor, "new_zeros", new_zeros_with_little_memory)
    with pytest.raises(OutOfSlots):
        cache.alloc(64)
    assert cache.limit == 64
    for store in (*cache.keys.values(), *cache.values.values()):
        assert float(store[1, 0, 0]) == 1
    cache.free(0, 64)
    assert cache.alloc(64) == 0


def test_a_cache_in_main_memory_leaves_the_rest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    prompts = [Prompt(tokens_of(rng, 700, 900)) for _ in range(12)]
    roomy = Engine(tiny_model("llama"), max_num_seqs=12)
    expected = decoded(roomy, prompts, 3)
    slot_bytes = roomy.cache.slot_bytes
    slot_limit = roomy.cache.allocator.slots - 2048
    engine = Engine(tiny_model("llama"), max_num_seqs=12)

    def has_main_memory(size: int) -> bool:
        return size <= slot_bytes * (slot_limit - engine.cache.allocator.slots)

    monkeypatch.setattr(kv_cache, "has_main_memory", has_main_memory)
    assert decoded(engine, prompts, 3) == expected
    assert 4096 < engine.cache.allocator.slots <= slot_limit


def test_a_cache_grows_again_when_others_have_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    engine = Engine(tiny_model("llama"))
    prompts = [Prompt(tokens_of(rng, 4000, 4000)) for _ in range(2)]
    monkeypatch.setattr(kv_cache, "has_main_memory", lambda size: False)
    engine.submit(autoregressive(prompts[0], 200, never), tag="first")
    assert "no memory for more" in str(finished(engine)["first"].error)
    monkeypatch.setattr(kv_cache, "has_main_memory", lambda size: True)
    engine.submit(autoregressive(prompts[1], 200, never), tag="second")
    assert finished(engine)["second"].error is None


MACHINE = f"MemTotal: {64 << 20} kB\nMemFree: 0 kB\nMemAvailable: {40 << 20} kB\n"
CONTAINER = {
    "memory.max": f"{10 << 30}\n",
    "memory.current": f"{8 << 30}\n",
    "memory.stat": f"anon 5\ninactive_file {3 << 30}\n",
}


# A tenth of the whole memory is spared: 40 GB free of 64, or 10 - 8 + 3 GB of 10.
@pytest.mark.parametrize(
    ("files", "gigabytes"),
    [
        ({"meminfo": MACHINE}, 33),
        ({"meminfo": MACHINE, "memory.max": "max\n"}, 33),
        ({"meminfo": MACHINE, **CONTAINER}, 4),
    ],
    ids=["machine", "container without a limit", "container"],
)
def test_memory_is_that_of_the_machine_and_of_its_container(
    files: dict[str, str], gigabytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_MEMORY_OF_MACHINE", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CONTROL_GROUP", tmp_path)
    assert memory.has_main_memory(2**50)  # The system tells nothing.
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert memory.has_main_memory(gigabytes << 30)
    assert not memory.has_main_memory((gigabytes + 1) << 30)


def test_a_cache_grows_by_what_is_wanted_where_it_cannot_double(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = KVCache(64, None, torch.device("cpu"))
    key = torch.ones(1, 2, 4)
    cache.write(0, torch.tensor([1]), key, key)

    def has_main_memory(size: int) -> bool:
        return size <= cache.slot_bytes * (100 - cache.allocator.slots)

    monkeypatch.setattr(kv_cache, "has_main_memory", has_main_memory)
    assert cache.alloc(64) == 0
    assert cache.alloc(32) == 64
    assert cache.allocator.slots == 96
    assert len(cache.keys[0]) == 96
    message = "32 slots wanted, 0 of 96 free, and there is no memory for more"
    with pytest.raises(OutOfSlots, match=message):
        cache.alloc(32)


class Watched(Engine):
    """An engine that checks its passes in flight.

    `max_flights` is the largest number of passes that were in flight together.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.max_flights = 0

    def _start(self, chunks: list[Any]) -> str | None:
        reason = super()._start(chunks)
        flying = [chunk.seq for flight in self.flights for chunk in flight.chunks]
        # Each sequence is in one pass at most, and keeps its region of the cache.
        assert len(flying) == len(set(map(id, flying)))
        assert len(flying) == sum(seq.in_flight for seq in self.scheduler.sequences)
        assert all(seq.region.slots for seq in flying)
        self.max_flights = max(self.max_flights, len(self.flights))
        return reason


def answers_of(engine: Engine, stock: Any, digits: int, methods: list[str]) -> list[str]:
    """Return the answers of methods' programs as text, with figures rounded to so many digits."""
    programs = [program for method in methods for program in CASES[method](stock).programs()]
    answers = engine.run(programs, sampling=Sampling(0.8), seed=3)

    def rounded(match: re.Match[str]) -> str:
        return str(round(float(match[0]), digits))

    return [re.sub(r"-?\d+\.\d+(e-\d+)?", rounded, repr(answer)) for answer in answers]


@pytest.mark.parametrize("in_c", [pytest.param(True, marks=needs_native), False])
def test_answers_are_those_of_one_pass_after_the_other(
    in_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_MIN_SPLIT_TOKENS", 1)
    monkeypatch.setattr(avx512, "is_best", lambda device, dtype: in_c)
    _, stock = pair("llama")
    model = tiny_model("llama", head_dim=32)
    if in_c:
        # In bfloat16 on a CPU the answers are equal to the bit, because a token's figures do not
        # depend on what else is in the pass.
        model = pack_model(model.bfloat16())
        digits = 17
    else:
        model = in_float64(model)
        digits = 9
    one_pass = Watched(model, max_num_seqs=12)
    two_passes = Watched(model, max_num_seqs=12, passes=2)
    expected = answers_of(one_pass, stock, digits, METHODS)
    assert answers_of(two_passes, stock, digits, METHODS) == expected
    assert one_pass.max_flights == 1
    assert two_passes.max_flights == 2
    assert 1.5 * one_pass.steps < two_passes.steps


# Passes run out of memory, some of them while no other one is in flight; or programs find no room
# in the cache.
@pytest.mark.parametrize(("cache_tokens", "failures"), [(None, 0.3), (350, 0.0)])
def test_what_takes_a_pass_back_leaves_the_other_alone(
    cache_tokens: int | None, failures: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_MIN_SPLIT_TOKENS", 1)
    methods = ["autoregressive", "hyper_parallel", "space"]
    model, stock = pair("qwen3")
    model = in_float64(model)
    expected = answers_of(Watched(model, max_num_seqs=12), stock, 9, methods)
    engine = Watched(
        model, max_num_seqs=12, max_num_batched_tokens=120, cache_tokens=cache_tokens, passes=2
    )
    rollback = mock.Mock(wraps=engine.scheduler.rollback)
    preempt = mock.Mock(wraps=engine.scheduler._preempt)
    monkeypatch.setattr(engine.scheduler, "rollback", rollback)
    monkeypatch.setattr(engine.scheduler, "_preempt", preempt)
    unlucky = random.Random(2)

    def fails(tokens: int) -> bool:
        # The smallest passes must not fail alone, or a program would.
        may_fail = tokens > MIN_PASS_TOKENS or engine.flights
        return unlucky.random() < (failures if may_fail else 0)

    small_device(engine, fails)
    assert answers_of(engine, stock, 9, methods) == expected
    assert engine.max_flights == 2
    if failures:
        assert {call.kwargs["alone"] for call in rollback.call_args_list} == {True, False}
        assert not preempt.called
    else:
        assert preempt.called
        assert not rollback.called


# A prefix, the prompts, then 19 tokens of each. With 4, some prompts begin in a pass of their own.
# If every pass were split in two, there would be some forty.
@pytest.mark.parametrize(("min_split", "max_steps"), [(256, 21), (4, 29)])
def test_few_tokens_go_in_one_pass(
    min_split: int, max_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_MIN_SPLIT_TOKENS", min_split)
    engine = Watched(tiny_model("llama"), max_num_seqs=6, passes=2)
    engine.run(autoregressive(prompt, 20, never) for prompt in prompts_of(3, 6, 20))
    assert engine.steps <= max_steps
