"""Assisted generation, the baseline, says what the model says alone."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from raypd.decoding.assisted import AssistedGenerator
from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from raypd.decoding.sampling import Sampling
from tests.decoding import reference
from tests.decoding.test_exactness import agree, pair, tokens_of
from tests.decoding.test_space import chance_of_texts, chi_square, likely, never, rarely
from tests.tiny import tiny_model, tiny_tokenizer


def nearly(model, spread):
    """The model with its weights moved a little: a draft model that is often right."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += spread * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)
    return draft


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3", "mistral", "gemma2", "olmo2"])
def test_greedy_equals_autoregressive(kind):
    model, stock = pair(kind)
    model.generation_config.repetition_penalty = 1.9  # a checkpoint's preference, which would change the answer
    rng = random.Random(4)
    prompts = [tokens_of(rng, 8, 20) for _ in range(3)]
    steps = tokens = 0
    for spread in (0.02, 0.5):
        generator = AssistedGenerator(model, nearly(model, spread))
        for prompt in prompts:
            want = reference.autoregressive(stock, prompt, 16, never)
            answer = generator.generate(prompt, 16, [])
            agree(want, answer.tokens, answer.logprobs)
            assert not answer.stopped
            steps, tokens = steps + answer.steps, tokens + len(answer.tokens)
    assert tokens == 6 * 16
    assert steps < 0.9 * tokens
    ours = Engine(pair(kind)[0]).run([autoregressive(Prompt(prompts[0]), 16, never)])[0]
    agree(reference.autoregressive(stock, prompts[0], 16, never), ours.tokens, ours.logprobs)


def test_ends_stops_and_most_tokens_cut_inside_a_pass():
    model, stock = pair("llama")
    prompt = tokens_of(random.Random(6), 9, 9)
    full = [t for t, _, _ in reference.autoregressive(stock, prompt, 12, never)]
    generator = AssistedGenerator(model, copy.deepcopy(model))  # always right: many tokens a pass
    assert generator.generate(prompt, 12, []).average_accepted_tokens >= 2.5
    for most in (1, 2, 5, 12):
        answer = generator.generate(prompt, most, [])
        assert (answer.tokens, answer.stopped, len(answer.logprobs)) == (full[:most], False, most)
    for token in full:
        cut = full[: full.index(token) + 1]
        for ends, stops in (([token], None), ([], lambda tokens, end=token: tokens[-1] == end)):
            answer = generator.generate(prompt, 12, ends, stops)
            assert (answer.tokens, answer.stopped, len(answer.logprobs)) == (cut, True, len(cut))
    assert generator.generate(prompt, 12, [], stops=rarely).stopped == any(t % 41 == 0 for t in full)


def test_sampled_texts_have_the_model_s_distribution():
    model, stock = pair("llama", seed=4, vocab_size=16)
    sampling, prompt, runs = Sampling(1.5, top_k=3), [1, 9, 5], 120
    chances = chance_of_texts(stock, prompt, 2, sampling)
    generator = AssistedGenerator(model, nearly(model, 0.3))
    answers = [generator.generate(prompt, 2, [], sampling=sampling, seed=seed) for seed in range(runs)]
    counts: dict[tuple[int, ...], int] = {}
    for answer in answers:
        counts[tuple(answer.tokens)] = counts.get(tuple(answer.tokens), 0) + 1
    statistic, freedom = chi_square(counts, chances, runs)
    assert freedom > 3
    assert likely(statistic, freedom), (statistic, freedom)
    assert generator.generate(prompt, 2, [], sampling=sampling, seed=7).tokens == answers[7].tokens


def test_models_that_do_not_fit_are_refused():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="vocabulary of 99 tokens and the model one of 256"):
        AssistedGenerator(model, tiny_model("llama", vocab_size=99))
    ours, theirs = tiny_tokenizer(), tiny_tokenizer()
    theirs.add_tokens(["[Fork]"])
    with pytest.raises(ValueError, match=r"'\[Fork\]' is 256 there and None in the model's"):
        AssistedGenerator(model, tiny_model("qwen3"), ours, theirs)
    AssistedGenerator(model, tiny_model("qwen3"), ours, tiny_tokenizer())
    Engine(model)
    with pytest.raises(ValueError, match="belongs to a raypd engine"):
        AssistedGenerator(model, tiny_model("qwen3"))
