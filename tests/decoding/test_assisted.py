"""Assisted generation, the baseline, says what the model says alone, drafts as many tokens as it is told to, and stops
where the program ends."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import candidate_generator

from raypd.answering.components import build
from raypd.decoding import assisted
from raypd.decoding.assisted import AssistedEngine
from raypd.decoding.counts import TokenCounts
from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from raypd.decoding.methods.hyper_parallel import hyper_parallel
from raypd.decoding.methods.space import space
from raypd.decoding.sampling import GREEDY, AllowedTokens, Sampling
from raypd.decoding.sequence import ProgramError
from tests.decoding import reference
from tests.decoding.cases import agree, pair, slotted
from tests.decoding.distribution import chance_of_texts, check_distribution, check_logprobs
from tests.decoding.drivers import never, tokens_of
from tests.tiny import nearly, tiny_model, tiny_tokenizer


def engine_of(model, draft, most=16, ends=(), draft_tokens=5):
    return AssistedEngine(model, draft, draft_tokens=draft_tokens, max_new_tokens=most, ends=ends)


def decode(engine, prompt, most, stops=never, sampling=GREEDY, seed=0):
    """What ended, for one prompt."""
    engine.submit(autoregressive(Prompt(prompt), most, stops), tag="it", sampling=sampling, seed=seed)
    (done,) = engine.step()
    assert (done.tag, done.error, engine.pending) == ("it", None, 0)
    return done


def passes(model):
    """The tokens that each forward pass of a model is given, from now on."""
    given: list[list[int]] = []
    model.register_forward_pre_hook(
        lambda _, args, inputs: given.append(inputs["input_ids"][0].tolist()), with_kwargs=True
    )
    return given


# Transformers' own loop runs here, a pass of its draft model for each token: slow.
OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3", "phi3", "mistral", "gemma2", "olmo2")]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", *OTHERS])
def test_greedy_equals_autoregressive(kind):
    model, stock = pair(kind)
    model.generation_config.repetition_penalty = 1.9  # a checkpoint's preference, which would change the answer
    rng = random.Random(4)
    prompts = [tokens_of(rng, 8, 20) for _ in range(3)]
    steps = tokens = 0
    for spread, draft_tokens in ((0.02, 3), (0.02, 20), (0.5, 5)):  # 20: longer than the window of some
        engine = engine_of(model, nearly(model, spread), draft_tokens=draft_tokens)
        for prompt in prompts:
            want = reference.autoregressive(stock, prompt, 16, never)
            answer = decode(engine, prompt, 16).answer
            agree(want, answer.tokens, answer.logprobs)
            assert not answer.stopped
            steps, tokens = steps + answer.steps, tokens + len(answer.tokens)
    assert tokens == 9 * 16
    assert steps < 0.9 * tokens


@pytest.mark.parametrize(("draft_tokens", "sklearn"), [(1, True), (4, True), (4, False), (20, True)])
def test_every_pass_has_the_drafts_that_were_asked_for(draft_tokens, sklearn, monkeypatch):
    """Whether scikit-learn is there or not, and however unsure the draft model is."""
    monkeypatch.setattr(candidate_generator, "is_sklearn_available", lambda: sklearn)
    model = tiny_model("llama")
    draft = nearly(model, 0.1)
    engine = engine_of(model, draft, most=200, draft_tokens=draft_tokens)
    given, drafting = passes(model), passes(draft)
    prompt = tokens_of(random.Random(2), 9, 9)
    done = decode(engine, prompt, 60)
    drafts = [given[0][len(prompt) :], *(tokens[1:] for tokens in given[1:])]
    assert [len(tokens) for tokens in drafts] == [draft_tokens] * len(given)
    assert len(drafting) == done.answer.drafted == draft_tokens * len(given)  # a pass of the draft model for each
    at = accepted = 0
    for tokens in drafts:
        right = 0
        while right < len(tokens) and done.answer.tokens[at + right : at + right + 1] == [tokens[right]]:
            right += 1
        at, accepted = at + right + 1, accepted + right
    assert 0 < accepted == done.answer.accepted < done.answer.drafted
    assert done.answer.steps == len(given)
    assert done.counts == TokenCounts(prefill_tokens=9, decode_tokens=60, steps=len(given))
    given.clear()
    decode(engine_of(model, draft, most=3, draft_tokens=draft_tokens), prompt, 3)
    assert len(given[0]) - len(prompt) == min(draft_tokens, 2)  # a draft of which more could not be taken is shorter


def test_without_a_number_a_draft_ends_where_the_draft_model_is_unsure():
    """The passes of both models are those of transformers' own assisted generation as it is by default."""
    pytest.importorskip("sklearn")
    model = tiny_model("llama")
    draft = nearly(model, 0.1)
    stock, stock_draft = copy.deepcopy(model), copy.deepcopy(draft)
    engine = engine_of(model, draft, most=60, draft_tokens=None)
    ours, theirs = (passes(model), passes(draft)), (passes(stock), passes(stock_draft))
    prompt = tokens_of(random.Random(2), 9, 9)
    answer = decode(engine, prompt, 60).answer
    config = GenerationConfig(max_new_tokens=60, do_sample=False, pad_token_id=0)
    output = stock.generate(torch.tensor([prompt]), assistant_model=stock_draft, generation_config=config)
    assert answer.tokens == output[0, len(prompt) :].tolist()
    assert ours == theirs
    assert len({len(tokens) for tokens in ours[0][1:]}) > 2, "drafts of many lengths"


def test_the_generation_stops_where_the_program_ends():
    """No pass behind a stop, or behind the program's own most tokens, and what is counted was decoded."""
    model, stock = pair("llama")
    prompt = tokens_of(random.Random(6), 9, 9)
    full = [t for t, _, _ in reference.autoregressive(stock, prompt, 200, never)]
    draft = copy.deepcopy(model)  # always right: five tokens a pass
    engine = engine_of(model, draft, most=200, draft_tokens=4)
    given = passes(model)
    for count in (1, 2, 6, 8, 13):
        for most, stops in ((200, lambda tokens, count=count: len(tokens) == count), (count, never)):
            given.clear()
            done = decode(engine, prompt, most, stops)
            assert (done.answer.tokens, done.answer.stopped) == (full[:count], most == 200)
            assert len(done.answer.logprobs) == count
            assert len(given) == -(-count // 5)
            assert done.counts == TokenCounts(prefill_tokens=9, decode_tokens=count, steps=len(given))
            assert done.answer.accepted == count - count // 5
            assert done.answer.drafted == 4 * len(given)
    for token in full[:12]:
        cut = full[: full.index(token) + 1]
        for ends in ([token], []):
            stops = lambda tokens, end=token: tokens[-1] == end  # noqa: E731
            answer = decode(engine_of(model, draft, 12, ends), prompt, 12, stops).answer
            assert (answer.tokens, answer.stopped, len(answer.logprobs)) == (cut, True, len(cut))


def test_sampled_texts_have_the_model_s_distribution():
    model, stock = pair("llama", seed=4, vocab_size=16)
    sampling, prompt, runs = Sampling(1.5, top_k=3), [1, 9, 5], 120
    chances = chance_of_texts(stock, prompt, 2, sampling)
    engine = engine_of(model, nearly(model, 0.3), most=3)  # 3: the second token of a text can be a draft
    answers = [decode(engine, prompt, 2, sampling=sampling, seed=seed).answer for seed in range(runs)]
    for answer in answers[:9]:
        check_logprobs(stock, prompt, answer)
    check_distribution(answers, chances, 3)
    assert decode(engine, prompt, 2, sampling=sampling, seed=7).answer.tokens == answers[7].tokens


def test_programs_of_other_methods_and_their_errors_end_alone():
    model = tiny_model("llama")
    engine = engine_of(model, nearly(model, 0.1), most=8)
    prompt = Prompt(tokens_of(random.Random(1), 9, 9))

    def fails(tokens):
        raise KeyError("a stop that fails")

    alone = "runs autoregressive programs alone"
    few = AllowedTokens(np.arange(9))
    for program, kind, words in (
        (hyper_parallel(slotted(random.Random(3), 2, shared=False), 5), ProgramError, alone),
        (space(prompt, 8, 2, 3), ProgramError, alone),
        (autoregressive(prompt, 8, never, allowed_token_ids=lambda tokens: few), ProgramError, alone),
        (autoregressive(prompt, 8, never, lambda tokens: few if tokens else None), ProgramError, alone),
        (autoregressive(prompt, 9, never), ProgramError, "more tokens than assisted generation may decode"),
        (autoregressive(prompt, 8, fails), KeyError, "a stop that fails"),
    ):
        engine.submit(program)
        (done,) = engine.step()
        assert isinstance(done.error, kind), done.error
        assert words in str(done.error)
    assert len(decode(engine, prompt.tokens, 8).answer.tokens) == 8


def test_models_that_do_not_fit_are_refused(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(assisted, "is_sklearn_available", lambda: False)
    with pytest.raises(ValueError, match="scikit-learn"):
        engine_of(model, copy.deepcopy(model), draft_tokens=None)

    def refused(words, draft, **tokenizers):
        with pytest.raises(ValueError, match=words):
            AssistedEngine(model, draft, draft_tokens=5, max_new_tokens=8, ends=[], **tokenizers)

    refused("vocabulary of 99 tokens and the model one of 256", tiny_model("llama", vocab_size=99))
    refused("is the model itself", model)
    tokenizers = {"tokenizer": tiny_tokenizer(), "draft_tokenizer": tiny_tokenizer()}
    tokenizers["draft_tokenizer"].add_tokens(["[Fork]"])
    refused(r"'\[Fork\]' is 256 there and None in the model's", tiny_model("qwen3"), **tokenizers)
    engine_of(model, tiny_model("qwen3"))
    Engine(draft := tiny_model("gemma2"))
    refused("belongs to a raypd engine", draft)


def test_a_worker_leaves_its_models_as_transformers_has_them(config):
    """Packed layers have no cache of transformers, which assisted generation needs."""
    run = config("in.jsonl")
    keys = {"method": "speculative", "draft_model": "draft", "draft_tokens": 3}
    run = run.model_copy(update={"decoding": run.decoding.model_copy(update=keys)})
    others = {"tokenizer": tiny_tokenizer(), "context_length": 4096, "packed": None}
    load = lambda _: SimpleNamespace(model=tiny_model("llama", head_dim=32).bfloat16(), **others)  # noqa: E731
    models = [build(run, None, load).engine.model, tiny_model("llama")]
    assert len({tuple(type(module) for module in model.modules()) for model in models}) == 1
