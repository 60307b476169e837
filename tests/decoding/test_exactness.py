"""Every method in the engine against the unmodified model on each prompt alone, token for token."""

import dataclasses
from unittest import mock

import pytest
import torch

from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import autoregressive
from raypd.decoding.methods.space import space
from raypd.decoding.sampling import Sampling
from tests.decoding.cases import CASES, FAMILIES, MASK, case_of, methods_and, pair, run_all
from tests.decoding.drivers import never, preempt_at_random, prompts_of
from tests.decoding.reference import Replay, check_logprobs
from tests.tiny import in_float64


@pytest.mark.parametrize(("method", "kind"), methods_and(FAMILIES))
def test_exact_beside_other_programs(method, kind):
    model, _ = pair(kind)
    engine = Engine(model, max_num_seqs=4, max_num_batched_tokens=24)
    names = ("autoregressive", method, "hyper_parallel")
    run_all(engine, {name: case_of(name, kind) for name in names}, 1e-3)


@pytest.mark.parametrize(
    ("method", "kind"), methods_and(["qwen3", "gemma2"], slow_families={"gemma2"})
)
def test_float64_is_exact_in_the_engine_and_in_an_independent_interpreter_of_feeds(method, kind):
    model, stock = (in_float64(loaded) for loaded in pair(kind))
    case = CASES[method](stock)
    engine = Engine(model, max_num_seqs=3, max_num_batched_tokens=30)
    answers = engine.run(case.programs())
    case.check(answers, 1e-9)
    replayed = [Replay(stock).run(program) for program in case.programs()]
    case.check(replayed, 1e-9)
    assert [figures(answer) for answer in answers] == [figures(answer) for answer in replayed]


def figures(answer) -> dict:
    """Return an answer's passes, accepted and rejected drafts, and tokens in the cache."""
    if not dataclasses.is_dataclass(answer):
        return {}
    fields = dataclasses.asdict(answer)
    return {
        name: value for name, value in fields.items() if isinstance(value, int) or name == "cost"
    }


@pytest.mark.parametrize("method", CASES)
def test_a_program_that_loses_its_cache_is_fed_again_and_answers_the_same(method, monkeypatch):
    model, _ = pair("llama")
    engine = Engine(model, max_num_seqs=3, max_num_batched_tokens=30)
    lost = preempt_at_random(engine, monkeypatch)
    run_all(engine, {method: case_of(method, "llama")}, 1e-3)
    assert sum(lost) > 60


@pytest.mark.parametrize(
    ("batch", "budget", "cache_tokens", "device"),
    [
        (64, 4096, None, "cpu"),
        (16, 19, None, "cpu"),
        (8, 33, 640, "cpu"),
        pytest.param(
            16,
            19,
            None,
            "mps",
            marks=pytest.mark.skipif(not torch.mps.is_available(), reason="needs MPS"),
        ),
    ],
)
def test_all_methods_at_once(batch, budget, cache_tokens, device, monkeypatch):
    model, _ = pair("qwen3")
    engine = Engine(
        model.to(device),
        max_num_seqs=batch,
        max_num_batched_tokens=budget,
        cache_tokens=cache_tokens,
    )
    preempt = mock.Mock(wraps=engine.scheduler._preempt)
    monkeypatch.setattr(engine.scheduler, "_preempt", preempt)
    run_all(engine, {method: case_of(method, "qwen3") for method in CASES}, 1e-3)
    assert preempt.called == (cache_tokens is not None)


@pytest.mark.parametrize("method", ["autoregressive", "space"])
def test_a_sampled_text_depends_on_its_seed_alone_and_has_the_models_log_probabilities(method):
    model, stock = pair("llama")
    warm = Sampling(0.8, 40, 0.95)
    prompts = prompts_of(8, 6)

    def answers(batch, seed):
        programs = []
        for number, prompt in enumerate(prompts):
            if method == "space":
                programs.append(space(prompt, 10, 2, MASK, warm, seed + number))
            else:
                programs.append(autoregressive(prompt, 10, never))
        engine = Engine(model, max_num_seqs=batch, max_num_batched_tokens=31)
        return engine.run(programs, sampling=warm, seed=seed)

    alone = answers(1, 0)
    together = answers(6, 0)
    with_other_seed = answers(6, 99)
    tokens = [answer.tokens for answer in alone]
    assert [answer.tokens for answer in together] == tokens
    assert [answer.tokens for answer in with_other_seed] != tokens
    for prompt, answer in zip(prompts, together, strict=True):
        check_logprobs(stock, prompt.tokens, answer)
