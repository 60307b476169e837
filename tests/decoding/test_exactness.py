"""Every method through the engine against prompts alone through the unmodified model, token for
token.
"""

import dataclasses
import random

import pytest
import torch

from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import autoregressive
from raypd.decoding.methods.space import space
from raypd.decoding.sampling import Sampling
from tests.decoding.cases import CASES, FAMILIES, MASK, case_of, pair, run_all
from tests.decoding.drivers import never, prompts_of
from tests.decoding.reference import Replay, check_logprobs
from tests.tiny import in_float64

# Their feeds differ from those of the other methods in their trees alone, not in what a family
# computes.
BY_TREES, SLOW = (
    {"apar", "pasta", "space", "medusa", "apar_medusa"},
    {"qwen3", "phi3", "gemma2", "olmo2"},
)


def methods_and(families: list[str], slow: set[str]) -> list:
    return [
        pytest.param(method, kind, marks=[pytest.mark.slow] * (method in BY_TREES and kind in slow))
        for method in CASES
        for kind in families
    ]


@pytest.mark.parametrize(("method", "kind"), methods_and(FAMILIES, SLOW))
def test_exact_beside_other_programs(method, kind):
    engine = Engine(pair(kind)[0], max_num_seqs=4, max_num_batched_tokens=24)
    run_all(
        engine,
        {name: case_of(name, kind) for name in ("autoregressive", method, "hyper_parallel")},
        1e-3,
    )


@pytest.mark.parametrize(("method", "kind"), methods_and(["qwen3", "gemma2"], {"gemma2"}))
def test_float64_is_exact_in_the_engine_and_in_an_independent_interpreter_of_feeds(method, kind):
    model, stock = (in_float64(one) for one in pair(kind))
    case = CASES[method](stock)
    answers = Engine(model, max_num_seqs=3, max_num_batched_tokens=30).run(case.programs())
    case.check(answers, 1e-9)
    replayed = [Replay(stock).run(program) for program in case.programs()]
    case.check(replayed, 1e-9)
    assert [figures(answer) for answer in answers] == [figures(answer) for answer in replayed]


def figures(answer) -> dict:
    """Passes, accepted and rejected drafts, tokens in the cache."""
    counted = dataclasses.asdict(answer) if dataclasses.is_dataclass(answer) else {}
    return {
        name: value for name, value in counted.items() if isinstance(value, int) or name == "cost"
    }


@pytest.mark.parametrize("method", CASES)
def test_a_program_that_loses_its_cache_is_fed_again_and_answers_the_same(method, monkeypatch):
    engine, rng, lost = (
        Engine(pair("llama")[0], max_num_seqs=3, max_num_batched_tokens=30),
        random.Random(1),
        [],
    )
    step = engine.step

    def step_and_preempt():
        done = step()
        for sequence in engine.sequences:
            if rng.random() < 0.25:
                lost.append(sequence.cached)
                sequence.release(engine.cache)
        return done

    monkeypatch.setattr(engine, "step", step_and_preempt)
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
    sizes = {"max_num_seqs": batch, "max_num_batched_tokens": budget, "cache_tokens": cache_tokens}
    engine, preempted = Engine(pair("qwen3")[0].to(device), **sizes), []
    preempt = engine.scheduler._preempt
    monkeypatch.setattr(
        engine.scheduler, "_preempt", lambda *args: preempted.append(args) or preempt(*args)
    )
    run_all(engine, {method: case_of(method, "qwen3") for method in CASES}, 1e-3)
    assert bool(preempted) == bool(cache_tokens)


@pytest.mark.parametrize("method", ["autoregressive", "space"])
def test_a_sampled_text_depends_on_its_seed_alone_and_has_the_models_log_probabilities(method):
    (model, stock), warm, prompts = pair("llama"), Sampling(0.8, 40, 0.95), prompts_of(8, 6)

    def answers(batch, seed):
        spaced = [
            space(prompt, 10, 2, MASK, warm, seed + number) for number, prompt in enumerate(prompts)
        ]
        programs = (
            spaced
            if method == "space"
            else [autoregressive(prompt, 10, never) for prompt in prompts]
        )
        return Engine(model, max_num_seqs=batch, max_num_batched_tokens=31).run(
            programs, sampling=warm, seed=seed
        )

    alone, together = answers(1, 0), answers(6, 0)
    assert [answer.tokens for answer in alone] == [answer.tokens for answer in together]
    assert [answer.tokens for answer in alone] != [answer.tokens for answer in answers(6, 99)]
    for prompt, answer in zip(prompts, together, strict=True):
        check_logprobs(stock, prompt.tokens, answer)
