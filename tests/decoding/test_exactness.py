"""Methods through the engine against prompts alone through the unmodified model, token for token."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch

from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from raypd.decoding.methods.guided import guided
from raypd.decoding.methods.hyper_parallel import Slot, SlottedPrompt, hyper_parallel
from tests.decoding import reference
from tests.decoding.drivers import INSTRUCTION, never, tokens_of
from tests.tiny import in_float64, tiny_model

FAMILIES = ["llama", "qwen3", "phi3", "mistral", "gemma2", "gemma3_text", "olmo2"]
# For methods whose feeds differ from those of the tests here in their trees alone, not in what a family computes.
FEW_FAMILIES = [
    pytest.param(kind, marks=[] if kind in ("llama", "mistral", "gemma3_text") else pytest.mark.slow)
    for kind in FAMILIES
]
WINDOWED = {"mistral", "gemma2", "gemma3_text"}


class EverySeventh:
    """A slot's rules for random models: done at a multiple of 7; optionally even tokens alone at first."""

    def __init__(self, limited: bool = False) -> None:
        self.limited = limited

    def advance(self, state: int, token: int) -> int:
        return token

    def allowed(self, state: int, left: int) -> np.ndarray | None:
        return np.arange(4, 256, 2) if self.limited and state == 0 else None

    def done(self, state: int) -> bool:
        return state % 7 == 0

    def completion(self, state: int) -> str | None:
        return None


def pair(kind: str, **overrides):
    """A tiny model twice: for the engine, and unmodified for the reference."""
    if kind in WINDOWED:
        overrides.setdefault("sliding_window", 9)
    model = tiny_model(kind, **overrides)
    stock = copy.deepcopy(model)
    stock.set_attn_implementation("eager")
    return model, stock


def agree(expected, tokens, logprobs, atol=1e-3):
    """Equal tokens and log-probabilities; a first divergence is excused only at a gap below `atol`."""
    for i, (token, logprob, gap) in enumerate(expected):
        if i >= len(tokens) or tokens[i] != token:
            assert gap < atol, f"token {i}: {tokens[i : i + 1]} for {token}, gap {gap}"
            return
        assert abs(logprobs[i] - logprob) < atol
    assert len(tokens) == len(expected)


def slotted(rng: random.Random, documents: int, shared: bool) -> SlottedPrompt:
    """A prompt of `documents` stacked documents with ragged skeletons."""
    tokens = list(INSTRUCTION)
    for _ in range(documents):
        tokens += tokens_of(rng, 2, 14)
    slots = []
    for _ in range(documents):
        for _ in range(rng.randint(1, 4)):
            tokens += tokens_of(rng, 1, 4)
            slots.append(Slot(len(tokens) - 1, EverySeventh(limited=rng.random() < 0.5)))
    tokens += tokens_of(rng, 0, 2)  # a closing brace behind the last slot
    return SlottedPrompt(tokens, slots, shared=len(INSTRUCTION) if shared else 0)


def expected_values(stock, prompt: SlottedPrompt, k_max: int, isolate: bool):
    def allowed_token_ids(n, so_far):
        ids = prompt.slots[n].grammar.allowed(0 if not so_far else so_far[-1], 9)
        return None if ids is None else ids.tolist()

    ends = [slot.end for slot in prompt.slots]
    return reference.hyper_parallel(
        stock, prompt.tokens, ends, k_max, isolate, allowed_token_ids, lambda n, t: t[-1] % 7 == 0
    )


def beside_others(engine, stock, programs, prompt: Prompt, stops=never) -> list:
    """Answers of programs that run among an AR and an HPD program, whose answers are checked here."""
    values = slotted(random.Random(3), 2, shared=True)
    first, second, *rest = programs
    answers = engine.run([first, autoregressive(prompt, 9, stops), second, hyper_parallel(values, 5), *rest])
    plain, filled = answers.pop(1), answers.pop(2)
    agree(reference.autoregressive(stock, prompt.tokens, 9, stops), plain.tokens, plain.logprobs)
    for value, expected in zip(filled, expected_values(stock, values, 5, False), strict=True):
        agree(expected, value.tokens, value.logprobs)
    return answers


@pytest.mark.parametrize("kind", FAMILIES)
def test_autoregressive(kind):
    model, stock = pair(kind)
    rng = random.Random(2)
    prompts = [Prompt(INSTRUCTION + tokens_of(rng, 1, 20), shared=23 if i % 2 else 0) for i in range(5)]
    stops = lambda tokens: tokens[-1] % 11 == 0  # noqa: E731
    engine = Engine(model, max_num_seqs=3, max_num_batched_tokens=16)
    answers = engine.run(autoregressive(prompt, 12, stops) for prompt in prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        agree(reference.autoregressive(stock, prompt.tokens, 12, stops), answer.tokens, answer.logprobs)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("isolate", ["none", "documents", "values"])
def test_hyper_parallel_isolation(kind, isolate):
    """J is 1 where documents are isolated: a stack is then rows with a prefix in common."""
    model, stock = pair(kind)
    rng = random.Random(3)
    stack = 3 if isolate == "none" else 1
    prompts = [slotted(rng, stack, shared=isolate != "none") for _ in range(4)]
    engine = Engine(model, max_num_seqs=3, max_num_batched_tokens=4096)
    answers = engine.run(hyper_parallel(p, 6, isolate == "values") for p in prompts)
    lengths = set()
    for prompt, values in zip(prompts, answers, strict=True):
        for value, expected in zip(values, expected_values(stock, prompt, 6, isolate == "values"), strict=True):
            agree(expected, value.tokens, value.logprobs)
            lengths.add(len(value.tokens))
    assert len(lengths) > 1, "slots should end at different steps"


@pytest.mark.parametrize("stack", [1, 2, 6])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("budget", [16, 37, 4096])
def test_hyper_parallel_stack_prefix_chunks(stack, shared, budget):
    """J, the shared prefix and chunked prefill change nothing; ragged batches of different prompts."""
    model, stock = pair("llama")
    rng = random.Random(stack)
    prompts = [slotted(rng, stack, shared) for _ in range(5)]
    engine = Engine(model, max_num_seqs=4, max_num_batched_tokens=budget)
    answers = engine.run(hyper_parallel(p, 5) for p in prompts)
    for prompt, values in zip(prompts, answers, strict=True):
        for value, expected in zip(values, expected_values(stock, prompt, 5, False), strict=True):
            agree(expected, value.tokens, value.logprobs)


def test_float64_logits_are_those_of_the_reference():
    model, stock = pair("qwen3")
    model, stock = in_float64(model), in_float64(stock)
    rng = random.Random(5)
    prompts = [slotted(rng, 2, True) for _ in range(3)]
    answers = Engine(model, max_num_seqs=3, max_num_batched_tokens=50).run(hyper_parallel(p, 6) for p in prompts)
    for prompt, values in zip(prompts, answers, strict=True):
        for value, expected in zip(values, expected_values(stock, prompt, 6, False), strict=True):
            assert value.tokens == [t for t, _, _ in expected]
            np.testing.assert_allclose(value.logprobs, [p for _, p, _ in expected], atol=1e-9)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_answers_do_not_depend_on_the_batch(kind):
    """`isolate: documents` is J = 1: alone, in any batch, under any budget, in any order, the same answer."""
    rng = random.Random(6)
    prompts = [slotted(rng, 1, True) for _ in range(9)]
    first: dict[int, list[list[int]]] = {}
    for batch, budget, order in [(1, 4096, range(9)), (9, 4096, range(9)), (4, 21, reversed(range(9)))]:
        model, _ = pair(kind)
        numbers = list(order)
        answers = Engine(model, max_num_seqs=batch, max_num_batched_tokens=budget).run(
            hyper_parallel(prompts[i], 6) for i in numbers
        )
        for number, values in zip(numbers, answers, strict=True):
            tokens = [value.tokens for value in values]
            assert first.setdefault(number, tokens) == tokens


def test_small_cache_feeds_rows_again():
    """Rows that lost their cache are fed again and answer the same."""
    model, stock = pair("llama")
    rng = random.Random(7)
    prompts = [slotted(rng, 2, shared=True) for _ in range(8)]
    engine = Engine(model, max_num_seqs=8, max_num_batched_tokens=64, cache_tokens=320)
    answers = engine.run(hyper_parallel(p, 8) for p in prompts)
    for prompt, values in zip(prompts, answers, strict=True):
        for value, expected in zip(values, expected_values(stock, prompt, 8, False), strict=True):
            agree(expected, value.tokens, value.logprobs)


def test_sampling_depends_on_the_seed_alone():
    from raypd.decoding.sampling import Sampling

    warm = Sampling(temperature=1.0, top_k=40, top_p=0.95)
    rng = random.Random(8)
    prompts = [Prompt(INSTRUCTION + tokens_of(rng, 1, 9), shared=23) for _ in range(6)]
    model, _ = pair("llama")
    alone = [
        Engine(model, max_num_seqs=1).run([autoregressive(p, 10, never)], sampling=warm, seed=i)[0].tokens
        for i, p in enumerate(prompts)
    ]
    together = Engine(model, max_num_seqs=6, max_num_batched_tokens=31)
    answers = together.run((autoregressive(p, 10, never) for p in prompts), sampling=warm)
    assert alone == [answer.tokens for answer in answers]
    other = Engine(model, max_num_seqs=6).run((autoregressive(p, 10, never) for p in prompts), sampling=warm, seed=99)
    assert alone != [answer.tokens for answer in other]


def test_bfloat16_runs_and_mostly_agrees():
    """Not exact by nature (see the docs); this guards against a path that only breaks in bfloat16."""
    model, _ = pair("llama")
    rng = random.Random(9)
    prompts = [slotted(rng, 1, True) for _ in range(6)]
    full = Engine(model, max_num_seqs=6).run(hyper_parallel(p, 6) for p in prompts)
    half = Engine(pair("llama")[0].to(torch.bfloat16), max_num_seqs=6).run(hyper_parallel(p, 6) for p in prompts)
    firsts = [(a.tokens[0], b.tokens[0]) for x, y in zip(full, half, strict=True) for a, b in zip(x, y, strict=True)]
    assert sum(a == b for a, b in firsts) > 0.7 * len(firsts)


@pytest.mark.parametrize("kind", FAMILIES)
def test_guided(kind):
    """Every value behind all of the answer before it; what `rest` puts behind a value is seen by the next."""
    model, stock = pair(kind)
    rng = random.Random(5)
    prompts = [slotted(rng, 1, shared=bool(i % 2)) for i in range(5)]
    rest = lambda slot, value: [*value.tokens[-1:], 3 + len(value.tokens)]  # noqa: E731
    engine = Engine(model, max_num_seqs=3, max_num_batched_tokens=16)
    answers = engine.run(guided(prompt, 6, rest) for prompt in prompts)
    for prompt, values in zip(prompts, answers, strict=True):
        text, begin = [], 0
        assert len(values) == len(prompt.slots)
        for slot, value in zip(prompt.slots, values, strict=True):
            text += prompt.tokens[begin : slot.end + 1]
            begin = slot.end + 1
            rules = slot.grammar
            expected = reference.autoregressive(
                stock,
                text,
                6,
                lambda tokens: tokens[-1] % 7 == 0,
                lambda tokens, rules=rules: rules.allowed(tokens[-1] if tokens else 0, 9),
            )
            agree(expected, value.tokens, value.logprobs)
            assert value.closed == (value.tokens[-1] % 7 == 0)
            text += [*value.tokens[:-1], *rest(slot, value)]
