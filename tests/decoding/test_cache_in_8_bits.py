"""The KV cache in 8 bits: its numbers, attention to them, and every method with them.

The reference is the unmodified model, whose keys and values are rounded before it attends.
"""

import math
import statistics
from unittest import mock

import pytest
import torch

from raypd.decoding.attention import avx512, sdpa
from raypd.decoding.attention.check import HeadSizes, error_of
from raypd.decoding.engine import Engine
from raypd.decoding.kv_cache import KVCache
from raypd.decoding.methods.autoregressive import autoregressive
from raypd.decoding.pack import pack_model
from tests.decoding.cases import CASES, pair
from tests.decoding.drivers import never, preempt_at_random, prompts_of
from tests.decoding.kernel_cases import compare
from tests.decoding.reference import round_keys_and_values
from tests.decoding.test_hybrid import hybrid_case
from tests.tiny import in_float64, tiny_model

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
needs_avx512 = pytest.mark.skipif(
    not avx512.is_best(CPU, torch.bfloat16), reason="needs AVX-512 BF16, no AMX"
)


def numbers_of_the_format() -> list[float]:
    """Return all finite numbers of E4M3, by its definition, in rising order."""
    magnitudes = []
    for code in range(127):  # The code 127 is NaN.
        exponent, mantissa = divmod(code, 8)
        if exponent == 0:
            magnitudes.append(math.ldexp(mantissa / 8, -6))
        else:
            magnitudes.append(math.ldexp(1 + mantissa / 8, exponent - 7))
    return sorted({-magnitude for magnitude in magnitudes} | {*magnitudes})


def written(dtype: torch.dtype, numbers: torch.Tensor) -> KVCache:
    """Return a cache in 8 bits whose slots 3, 4, 5, ... hold numbers [tokens, dim]."""
    cache = KVCache(64, None, CPU, dtype=FP8)
    slots = torch.arange(3, 3 + len(numbers))
    rows = numbers.to(dtype)[:, None]
    cache.write(0, slots, rows, -rows)
    return cache


def held(cache: KVCache, start: int, count: int) -> torch.Tensor:
    """Return what some slots hold, and check that the values are the negative keys."""
    keys = cache.keys[0][start : start + count, 0].double()
    values = cache.values[0][start : start + count, 0].double()
    assert torch.equal(keys, -values)
    return keys


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_rounded_to_the_nearest_and_large_ones_to_the_largest(dtype):
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-12, 12, (20, 16), generator=generator)
    numbers = torch.randn(20, 16, generator=generator) * 2.0**exponents
    numbers[0, :4] = torch.tensor([0.0, 448.0, -449.0, 60000.0])
    numbers = numbers.to(dtype).double()
    table = torch.tensor(numbers_of_the_format(), dtype=torch.float64)
    assert len(table) == 253
    distances = (numbers[..., None] - table).abs()
    found = held(written(dtype, numbers), 3, 20)
    assert torch.equal((numbers - found).abs(), distances.amin(-1))
    assert found.abs().max() == 448


def test_a_number_that_is_none_stays_none():
    numbers = torch.tensor([[1.0, math.nan, math.inf, -math.inf]])
    keys = written(torch.float32, numbers).keys[0][3, 0].double()
    assert keys[1].isnan()
    assert keys[[0, 2, 3]].tolist() == [1.0, 448.0, -448.0]


def test_regions_move_and_close_up_and_the_cache_grows():
    numbers = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    cache = written(torch.bfloat16, numbers)
    assert cache.slot_bytes == 2 * 16
    before = held(cache, 3, 8)
    cache.move(3, 8, 20)
    assert torch.equal(held(cache, 20, 8), before)
    cache.compact(20, torch.tensor([0, 3, 7]).numpy())
    assert torch.equal(held(cache, 20, 3), before[[0, 3, 7]])
    cache.alloc(64)
    generation = cache.generation
    cache.alloc(64)
    assert cache.generation > generation
    assert len(cache.keys[0]) == 128
    assert cache.keys[0].dtype == FP8
    assert torch.equal(held(cache, 3, 8), before)


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize("seed", range(4))
def test_attention_in_torch_is_that_to_the_rounded_keys(seed, dtype, atol, latent):
    sizes = (
        {
            "latent": True,
            "kv_heads": 1,
            "dim": 40,
            "value_dim": 24,
        }
        if latent
        else {}
    )
    compare(
        sdpa.attend,
        sdpa.attend,
        seed,
        CPU,
        dtype,
        atol,
        cache_dtype=FP8,
        **sizes,
    )


@pytest.mark.parametrize("latent_dim", [None, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_in_torch_is_that_of_einsum(dtype, latent_dim):
    sizes = HeadSizes(4, 1 if latent_dim else 2, 48, latent_dim)
    assert error_of(sdpa.attend, CPU, dtype, sizes, FP8) <= 1
    # The keys themselves are much farther off.
    assert error_of(rounding_twice, CPU, torch.float32, sizes, FP8) > 1000


def rounding_twice(step, layer, query, key, value):
    """An attention that loses a bit of each key."""
    for store in (*step.cache.keys.values(), *step.cache.values.values()):
        store.copy_(store.to(torch.float8_e5m2).to(store.dtype))
    return sdpa.attend(step, layer, query, key, value)


def rounded_pair(kind: str):
    """Return a tiny model in float64 with a cache in 8 bits, and the reference."""
    model, stock = (in_float64(loaded) for loaded in pair(kind))
    round_keys_and_values(stock)
    return model, stock


@pytest.mark.parametrize("method", CASES)
def test_every_method_answers_as_the_unmodified_model_with_rounded_keys(method):
    model, stock = rounded_pair("qwen3")
    case = CASES[method](stock)
    engine = Engine(model, max_num_seqs=3, max_num_batched_tokens=30, kv_cache="fp8")
    case.check(engine.run(case.programs()), 1e-9)
    stores = [*engine.cache.keys.values(), *engine.cache.values.values()]
    assert {store.dtype for store in stores} == {FP8}


# Windows, soft caps, sinks, and layers that read the keys of others.
@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gpt_oss", "gemma3n_text", "gemma4_text"])
def test_families_answer_as_the_unmodified_model_with_rounded_keys(kind):
    model, stock = rounded_pair(kind)
    if hasattr(stock.config, "num_experts_per_tok"):
        stock.set_experts_implementation("eager")
        model.set_experts_implementation("eager")
    case = CASES["hyper_parallel"](stock)
    engine = Engine(model, max_num_seqs=3, max_num_batched_tokens=30, kv_cache="fp8")
    # Some parts of these compute in float32 in any precision.
    atol = 1e-5 if kind in ("gpt_oss", "gemma3n_text") else 1e-9
    case.check(engine.run(case.programs()), atol)


def test_the_reference_is_another_model_than_the_unmodified_one():
    model, stock = (in_float64(loaded) for loaded in pair("qwen3"))
    case = CASES["autoregressive"](stock)
    engine = Engine(model, kv_cache="fp8")
    with pytest.raises(AssertionError):
        case.check(engine.run(case.programs()), 1e-4)


@pytest.mark.parametrize("method", ["hyper_parallel", "apar", "pasta", "intra_prompt"])
def test_forks_and_lost_caches_change_no_answer(method, monkeypatch):
    model, stock = rounded_pair("llama")
    case = CASES[method](stock)
    engine = Engine(model, max_num_seqs=3, max_num_batched_tokens=30, kv_cache="fp8")
    lost = preempt_at_random(engine, monkeypatch)
    case.check(engine.run(case.programs()), 1e-9)
    assert sum(lost) > 60


def test_a_region_that_is_outgrown_moves_with_its_rounded_keys(monkeypatch):
    model, stock = rounded_pair("llama")
    case = CASES["apar"](stock)
    engine = Engine(model, kv_cache="fp8")
    moves = mock.Mock(wraps=engine.cache.move)
    monkeypatch.setattr(engine.cache, "move", moves)
    case.check(engine.run(case.programs()), 1e-9)
    assert moves.called


@pytest.mark.parametrize("kind", ["qwen3", "youtu"])
def test_chunks_and_whole_prompts_give_the_same_answers(kind):
    case = CASES["hyper_parallel"](in_float64(pair(kind)[1]))
    answers = []
    for tokens, sequences in ((4096, 64), (20, 3)):
        model = in_float64(pair(kind)[0])
        sizes = {"max_num_seqs": sequences, "max_num_batched_tokens": tokens}
        answers.append(
            Engine(
                model,
                **sizes,
                kv_cache="fp8",
            ).run(case.programs())
        )
    for whole, chunked in zip(*answers, strict=True):
        assert [value.tokens for value in whole] == [value.tokens for value in chunked]
        for value, other in zip(whole, chunked, strict=True):
            assert value.logprobs == pytest.approx(other.logprobs, abs=1e-6)


def test_sequences_that_are_preempted_answer_the_same(monkeypatch):
    prompts = prompts_of(3, 6, 40)

    def decoded(engine: Engine) -> list[list[int]]:
        programs = (autoregressive(prompt, 90, never) for prompt in prompts)
        return [answer.tokens for answer in engine.run(programs)]

    roomy = Engine(in_float64(tiny_model("llama")), kv_cache="fp8")
    small = Engine(
        in_float64(tiny_model("llama")),
        cache_tokens=640,
        kv_cache="fp8",
    )
    preempt = mock.Mock(wraps=small.scheduler._preempt)
    monkeypatch.setattr(small.scheduler, "_preempt", preempt)
    assert decoded(small) == decoded(roomy)
    assert preempt.called


@pytest.mark.parametrize("kind", ["qwen3_5_text", "granitemoehybrid"])
def test_attention_layers_of_a_hybrid_use_it_and_states_keep_their_type(kind):
    answers = []
    engines = []
    for kv_cache in ("auto", "fp8"):
        engine = Engine(pair(kind)[0], kv_cache=kv_cache)
        answers.append(engine.run(hybrid_case("hyper_parallel", kind).programs()))
        engines.append(engine)
    exact, rounded = engines
    assert 4 * rounded.cache.slot_bytes == exact.cache.slot_bytes
    assert rounded.states.state_bytes == exact.states.state_bytes
    assert {store.dtype for store in rounded.states.inputs} == {torch.float32}
    errors = []
    for exact_values, values in zip(*answers, strict=True):
        for exact_value, value in zip(exact_values, values, strict=True):
            errors.append(abs(exact_value.logprobs[0] - value.logprobs[0]))
    assert 0 < statistics.median(errors) < 0.1


@needs_avx512
@torch.inference_mode()
def test_a_packed_model_leaves_attention_to_torch():
    packed = pack_model(tiny_model("llama", head_dim=32).bfloat16())
    assert Engine(packed).attend is avx512.attend
    assert Engine(packed, kv_cache="fp8").attend is sdpa.attend
    # Where the kernel is named, it leaves such a cache to torch.
    assert error_of(avx512.attend, CPU, torch.bfloat16, HeadSizes(2, 1, 32), FP8) <= 1
    stable = pack_model(tiny_model("llama", head_dim=32).bfloat16(), stable=True)
    with pytest.raises(ValueError, match="stable: its attention has no KV cache in fp8: use auto"):
        Engine(stable, stable=True, kv_cache="fp8")


def test_another_cache_is_refused():
    with pytest.raises(ValueError, match="there is no KV cache 'int4': auto, fp8"):
        Engine(tiny_model("llama"), kv_cache="int4")
