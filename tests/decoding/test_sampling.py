"""Picking tokens: many asks of all kinds in one call, against each ask worked out by itself."""

import math

import numpy as np
import pytest
import torch

from raypd.decoding import native, sampling
from raypd.decoding.grammar import Grammar, JsonString, OneOf, Vocabulary
from raypd.decoding.sampling import AllowedTokens, SampleRequest, Sampling, sample
from raypd.decoding.transfer import to_device
from raypd.tasks.automata import json_object


def picked(logits, asks):
    tokens, logprobs = sample(logits, asks).tolist()
    return [int(token) for token in tokens], logprobs


def by_hand(logits, ask):
    """Token and log-probability of one ask, in float64."""
    scores, allowed = logits.double(), ask.allowed_token_ids
    if allowed is not None:
        scores[np.setdiff1d(np.arange(len(scores)), allowed.ids)] = -torch.inf
    if ask.sampling.temperature == 0:
        token = int(scores.argmax())
    else:
        cumulative = (scores / ask.sampling.temperature).softmax(-1).cumsum(-1)
        token = int((cumulative <= ask.draw).sum())
    chance = scores.softmax(-1)
    if allowed is None or allowed.outcomes is None:
        return token, math.log(chance[token])
    sets = {int(i): set(range(a, b + 1)) for i, (a, b) in zip(allowed.ids, allowed.outcomes, strict=True)}
    own = sum(float(chance[i]) for i, found in sets.items() if found <= sets[token])
    return token, math.log(own / sum(float(chance[i]) for i, found in sets.items() if not found > sets[token]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_ask_is_answered_as_if_alone(dtype):
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.normal(size=(77, 2501)) * 4).to(dtype)  # more rows than are looked at together
    asks = []
    for _ in range(77):
        allowed = None
        if rng.random() < 0.5:
            size = rng.integers(*((1, 40) if rng.random() < 0.5 else (1020, 2400)))  # picked out, or masked
            ids = np.sort(rng.choice(2501, size, replace=False))
            nested = np.array([(0, 5), (0, 2), (3, 5), *((i, i) for i in range(6))])
            allowed = AllowedTokens(ids, rng.choice(nested, len(ids)) if rng.random() < 0.5 else None)
        asks.append(SampleRequest(Sampling(float(rng.choice([0.0, 0.7, 1.3]))), float(rng.random()), allowed))
    tokens, logprobs = picked(logits, asks)
    expected = [by_hand(row, ask) for row, ask in zip(logits, asks, strict=True)]
    assert tokens == [token for token, _ in expected]
    np.testing.assert_allclose(logprobs, [logprob for _, logprob in expected], atol=2e-5)


def test_nothing_asked_and_nothing_allowed():
    assert sample(torch.zeros(0, 9), []).shape == (2, 0)
    with pytest.raises(ValueError, match="allows no token"):
        sample(torch.zeros(1, 9), [SampleRequest(allowed_token_ids=AllowedTokens(np.array([], dtype=np.int64)))])


def test_what_a_grammar_allows_goes_to_the_device_once(monkeypatch):
    grammar = Grammar(json_object(None), Vocabulary([chr(97 + n % 26) * (n // 26 + 1) for n in range(1500)] + ['{"']))
    state, sent = grammar.advance(0, 1500), []
    monkeypatch.setattr(sampling, "to_device", lambda a, device: sent.append(a.nbytes) or to_device(a, device))
    for _ in range(3):
        drawn = sample(torch.randn(8, 1501), [SampleRequest(allowed_token_ids=grammar.allowed(state, None))] * 8)
        assert drawn[0].max() < 1500
    assert sorted(sent) == [128, 128, 128, 188]  # places of rows and sets in each pass; a bit a token


TEXTS = ["true", " true", "t", "false", " false", " ", "null", '"', ' "', '"red', '"rose', "red", "rose", "x"]
BOOLEAN = ["true", "false", "null"]


@pytest.mark.parametrize(
    ("automaton", "chances", "confidence"),
    [
        (OneOf(BOOLEAN), {"true": 0.1, "false": 0.098, "x": 0.8}, 0.505),  # the model would rather say something else
        (OneOf(BOOLEAN), {" true": 0.2, "true": 0.2, "t": 0.1, "false": 0.3, " false": 0.2}, 0.5),  # in three ways
        (OneOf(BOOLEAN), {" ": 0.2, " true": 0.3, "false": 0.3, "null": 0.2}, 0.375),  # " " leaves all open
        (OneOf(BOOLEAN), {" ": 0.6, "true": 0.4}, 1.0),
        (OneOf(['"red"', "null"]), {' "': 0.3, '"': 0.2, "x": 0.5}, 1.0),  # an enum of one value
        (OneOf(['"red"', "null"]), {' "': 0.3, '"': 0.24, "null": 0.18, "x": 0.28}, 0.75),  # or none
        (OneOf(['"red"', '"rose"', "null"]), {'"': 0.5, '"red': 0.2, '"rose': 0.1, "null": 0.2}, 0.8),  # what begins
        (OneOf(['"red"', '"rose"', "null"]), {'"': 0.2, '"red': 0.4, '"rose': 0.1, "null": 0.2}, 4 / 7),
        (JsonString(), {"null": 0.4, '"': 0.3, ' "': 0.2, '"red': 0.1}, 0.4),
    ],
)
def test_a_choice_has_its_probability_among_what_the_grammar_allows(automaton, chances, confidence):
    logits = torch.full((1, len(TEXTS)), -1e4)
    for text, chance in chances.items():
        logits[0, TEXTS.index(text)] = math.log(chance)
    allowed = Grammar(automaton, Vocabulary(TEXTS)).allowed(0, 9)
    (token,), (logprob,) = picked(logits, [SampleRequest(allowed_token_ids=allowed)])
    assert TEXTS[token] == max((t for t in chances if t != "x"), key=lambda t: chances[t])
    assert math.exp(logprob) == pytest.approx(confidence, abs=1e-3)


@pytest.mark.skipif(native.refusal() is not None, reason=f"the machine {native.refusal()}")
@pytest.mark.parametrize("shape", [(1, 49152), (37, 259), (3, 16), (2, 7)])
def test_greedy_in_bfloat16_is_the_first_of_the_highest(shape):
    torch.manual_seed(0)
    logits = (torch.randn(shape) * 4).bfloat16()
    logits[0, shape[1] // 2] = logits[0, -1] = logits.max() + 1
    logits[-1, 1:3] = -torch.inf
    tokens, logprobs = picked(logits, [SampleRequest()] * len(logits))
    wanted = logits.double().log_softmax(-1)
    assert [*tokens, shape[1] // 2] == [*logits.float().argmax(-1).tolist(), tokens[0]]
    assert logprobs == pytest.approx([float(row[token]) for row, token in zip(wanted, tokens, strict=True)], abs=2e-6)
