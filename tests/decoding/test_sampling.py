"""Picking tokens: many asks in one call against each by itself; and what a grammar leaves few
of.
"""

import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from raypd.decoding import few_tokens, native, sampling
from raypd.decoding.attention import avx512
from raypd.decoding.engine import Engine
from raypd.decoding.grammar import Grammar, JsonString, OneOf, Vocabulary
from raypd.decoding.linear import is_possible
from raypd.decoding.llama import Llama
from raypd.decoding.methods.hyper_parallel import Slot, SlottedPrompt, hyper_parallel
from raypd.decoding.pack import pack
from raypd.decoding.program import Feed, Predictions, Program
from raypd.decoding.sampling import GREEDY, AllowedTokens, SampleRequests, Sampling, sample
from raypd.decoding.transfer import to_device
from raypd.tasks.automata import json_object
from tests.tiny import VOCABULARY, tiny_model

TEXTS = [
    "true",
    " true",
    "t",
    "false",
    " false",
    " ",
    "null",
    '"',
    ' "',
    '"red',
    '"rose',
    "red",
    "rose",
    "x",
]
BOOLEAN = ["true", "false", "null"]
MOST = VOCABULARY // 8


def picked(logits, asks):
    tokens, logprobs = sample(logits, asks).tolist()
    return [int(token) for token in tokens], logprobs


def greedily(allowed: list[AllowedTokens | None]) -> SampleRequests:
    return SampleRequests([GREEDY] * len(allowed), [0.0] * len(allowed), allowed)


def by_hand(logits, temperature, draw, allowed):
    """Token and log-probability of one ask, in float64."""
    scores = logits.double()
    if allowed is not None:
        scores[np.setdiff1d(np.arange(len(scores)), allowed.ids)] = -torch.inf
    if temperature == 0:
        token = int(scores.argmax())
    else:
        token = int(((scores / temperature).softmax(-1).cumsum(-1) <= draw).sum())
    chance = scores.softmax(-1)
    if allowed is None or allowed.outcomes is None:
        return token, math.log(chance[token])
    sets = {
        int(i): set(range(a, b + 1))
        for i, (a, b) in zip(allowed.ids, allowed.outcomes, strict=True)
    }
    own = sum(float(chance[i]) for i, found in sets.items() if found <= sets[token])
    return token, math.log(
        own / sum(float(chance[i]) for i, found in sets.items() if not found > sets[token])
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_ask_is_answered_as_if_alone(dtype):
    rng = np.random.default_rng(4)
    # More rows than are looked at together.
    logits = torch.from_numpy(rng.normal(size=(77, 2501)) * 4).to(dtype)
    asks = SampleRequests()
    for _ in range(77):
        allowed = None
        if rng.random() < 0.5:
            # Picked out, or masked.
            size = rng.integers(*((1, 40) if rng.random() < 0.5 else (1020, 2400)))
            ids = np.sort(rng.choice(2501, size, replace=False))
            nested = np.array([(0, 5), (0, 2), (3, 5), *((i, i) for i in range(6))])
            allowed = AllowedTokens(
                ids, rng.choice(nested, len(ids)) if rng.random() < 0.5 else None
            )
        asks.sampling.append(Sampling(float(rng.choice([0.0, 0.7, 1.3]))))
        asks.draws.append(float(rng.random()))
        asks.allowed_token_ids.append(allowed)
    tokens, logprobs = picked(logits, asks)
    temperatures = [sampling.temperature for sampling in asks.sampling]
    expected = list(map(by_hand, logits, temperatures, asks.draws, asks.allowed_token_ids))
    assert tokens == [token for token, _ in expected]
    np.testing.assert_allclose(logprobs, [logprob for _, logprob in expected], atol=2e-5)


def test_nothing_asked_and_nothing_allowed():
    assert sample(torch.zeros(0, 9), SampleRequests()).shape == (2, 0)
    with pytest.raises(ValueError, match="allows no token"):
        sample(torch.zeros(1, 9), greedily([AllowedTokens(np.array([], dtype=np.int64))]))


def test_what_a_grammar_allows_goes_to_the_device_once(monkeypatch):
    grammar = Grammar(
        json_object(None),
        Vocabulary([chr(97 + n % 26) * (n // 26 + 1) for n in range(1500)] + ['{"']),
    )
    state, sent = grammar.advance(0, 1500), []
    monkeypatch.setattr(
        sampling, "to_device", lambda a, device: sent.append(a.nbytes) or to_device(a, device)
    )
    for _ in range(3):
        assert (
            sample(torch.randn(8, 1501), greedily([grammar.allowed(state, None)] * 8))[0].max()
            < 1500
        )
    # Places of rows and sets in each pass; a bit a token.
    assert sorted(sent) == [128, 128, 128, 188]


@pytest.mark.parametrize(
    ("automaton", "chances", "confidence"),
    [
        # The model would rather say something else.
        (OneOf(BOOLEAN), {"true": 0.1, "false": 0.098, "x": 0.8}, 0.505),
        # In three ways.
        (OneOf(BOOLEAN), {" true": 0.2, "true": 0.2, "t": 0.1, "false": 0.3, " false": 0.2}, 0.5),
        # " " leaves all open.
        (OneOf(BOOLEAN), {" ": 0.2, " true": 0.3, "false": 0.3, "null": 0.2}, 0.375),
        (OneOf(BOOLEAN), {" ": 0.6, "true": 0.4}, 1.0),
        (OneOf(['"red"', "null"]), {' "': 0.3, '"': 0.2, "x": 0.5}, 1.0),  # an enum of one value
        (
            OneOf(['"red"', "null"]),
            {' "': 0.3, '"': 0.24, "null": 0.18, "x": 0.28},
            0.75,
        ),  # or none
        # What begins.
        (
            OneOf(['"red"', '"rose"', "null"]),
            {'"': 0.5, '"red': 0.2, '"rose': 0.1, "null": 0.2},
            0.8,
        ),
        (
            OneOf(['"red"', '"rose"', "null"]),
            {'"': 0.2, '"red': 0.4, '"rose': 0.1, "null": 0.2},
            4 / 7,
        ),
        (JsonString(), {"null": 0.4, '"': 0.3, ' "': 0.2, '"red': 0.1}, 0.4),
    ],
)
def test_a_choice_has_its_probability_among_what_the_grammar_allows(automaton, chances, confidence):
    logits = torch.full((1, len(TEXTS)), -1e4)
    for text, chance in chances.items():
        logits[0, TEXTS.index(text)] = math.log(chance)
    (token,), (logprob,) = picked(
        logits, greedily([Grammar(automaton, Vocabulary(TEXTS)).allowed(0, 9)])
    )
    assert TEXTS[token] == max((t for t in chances if t != "x"), key=lambda t: chances[t])
    assert math.exp(logprob) == pytest.approx(confidence, abs=1e-3)


@pytest.mark.skipif(native.refusal() is not None, reason=f"the machine {native.refusal()}")
@pytest.mark.parametrize("shape", [(1, 49152), (37, 259), (3, 16), (2, 7)])
def test_greedy_in_bfloat16_is_the_first_of_the_highest(shape):
    torch.manual_seed(0)
    logits = (torch.randn(shape) * 4).bfloat16()
    logits[0, shape[1] // 2] = logits[0, -1] = logits.max() + 1
    logits[-1, 1:3] = -torch.inf
    tokens, logprobs = picked(logits, greedily([None] * len(logits)))
    wanted = logits.double().log_softmax(-1)
    assert [*tokens, shape[1] // 2] == [*logits.float().argmax(-1).tolist(), tokens[0]]
    assert logprobs == pytest.approx(
        [float(row[token]) for row, token in zip(wanted, tokens, strict=True)], abs=2e-6
    )


def asking(seed: int, steps: int = 4) -> Program[list[Predictions]]:
    """Asks behind random tokens for one of a few, one of many and one of all, also of several that
    have one outcome.
    """
    rng, found, at = random.Random(seed), [], 0
    for _ in range(steps):
        count = rng.randint(1, 9)
        sample_at = sorted(rng.sample(range(count), rng.randint(1, count)))
        allowed = [
            _allowed(rng, size)
            for size in rng.choices((1, 3, MOST, MOST + 1, None), k=len(sample_at))
        ]
        tokens = [rng.randrange(3, VOCABULARY) for _ in range(count)]
        asks = {
            "sample_at": sample_at,
            "allowed_token_ids": allowed,
            "want_logits": rng.random() < 0.1,
        }
        predictions = yield Feed(tokens, range(at, at + count), **asks)
        for token, one in zip(predictions.tokens, allowed, strict=True):
            assert one is None or token in one.ids
        at += count
        found.append(predictions)
    return found


def _allowed(rng: random.Random, size: int | None) -> AllowedTokens | None:
    if size is None:
        return None
    ids = np.array(sorted(rng.sample(range(VOCABULARY), size)), dtype=np.int64)
    ends = np.sort(np.array([[rng.randrange(4), rng.randrange(4)] for _ in ids]), axis=1)
    return AllowedTokens(ids, ends if rng.random() < 0.5 else None)


def said(engine: Engine, temperature: float) -> Iterator[tuple[list[int], list[float]]]:
    answers = engine.run((asking(seed) for seed in range(24)), sampling=Sampling(temperature))
    return ((one.tokens, one.logprobs) for answer in answers for one in answer)


def engines(model: PreTrainedModel | Llama) -> tuple[Engine, Engine, list[int]]:
    """One that computes few logits where it can, one that never does, and how many rows the first
    computed so.
    """
    sizes = {"max_num_seqs": 7, "max_num_batched_tokens": 40}
    one, other, rows = Engine(model, **sizes), Engine(model, **sizes), []
    assert one.few is not None
    other.few, sample = None, one.few.sample

    def noted(hidden: torch.Tensor, requests: SampleRequests) -> torch.Tensor:
        rows.append(len(requests))
        return sample(hidden, requests)

    one.few.sample = noted  # type: ignore[method-assign]
    return one, other, rows


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_few_are_picked_as_from_all(kind: str, tied: bool, temperature: float) -> None:
    one, other, rows = engines(tiny_model(kind, tie_word_embeddings=tied).double())
    for (tokens, logprobs), (same, as_likely) in zip(
        said(one, temperature), said(other, temperature), strict=True
    ):
        assert (tokens, logprobs) == (same, pytest.approx(as_likely, abs=1e-9))
    assert sum(rows) > 100


@pytest.mark.skipif(
    native.refusal() is not None or not is_possible(), reason="no AVX-512 BF16, or no C compiler"
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_in_bfloat16_they_are_the_same_bits(temperature: float, monkeypatch) -> None:
    # On processors with AMX, too.
    monkeypatch.setattr(avx512, "is_best", lambda device, dtype: True)
    one, other, rows = engines(pack(tiny_model("llama", head_dim=32).bfloat16()))
    assert list(said(one, temperature)) == list(said(other, temperature))
    assert sum(rows) > 100


def test_rows_are_kept_until_they_are_too_many(monkeypatch) -> None:
    made, narrowed = [], few_tokens.narrowed
    monkeypatch.setattr(
        few_tokens, "narrowed", lambda head, ids: made.append(ids.tolist()) or narrowed(head, ids)
    )
    engine = Engine(tiny_model("llama"))

    def program(*sets: range) -> Program[None]:
        for at, ids in enumerate(sets):
            predictions = yield Feed(
                [5], [at], sample_at=[0], allowed_token_ids=[AllowedTokens(np.array(ids))]
            )
            assert predictions.tokens[0] in ids

    engine.run(
        [program(range(9), range(4, 8), range(9, 20), range(9), range(100, 120), range(100, 101))]
    )
    assert made == [[*range(9)], [*range(20)], [*range(100, 120)]]


def test_values_of_a_type_ask_for_few_and_other_models_compute_all_logits() -> None:
    vocabulary = Vocabulary([chr(n) for n in range(VOCABULARY)])
    choices = {4: ["true", "false"], 8: ['"a"', '"b"']}
    slots = [Slot(end, Grammar(OneOf(texts), vocabulary)) for end, texts in choices.items()]
    one, other, rows = engines(tiny_model("llama"))
    found, same = (
        e.run([hyper_parallel(SlottedPrompt(range(40, 49), slots), 6)])[0] for e in (one, other)
    )
    assert [value.completion for value in found] == [value.completion for value in same]
    assert {value.completion for value in found} <= {"true", "false", '"a"', '"b"'}
    assert sum(rows) == sum(len(value.tokens) for value in found)
    # gemma2 caps its logits behind the output embeddings; a bias is not taken along.
    assert Engine(tiny_model("gemma2")).few is None
    model = tiny_model("llama")
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCABULARY))
    assert Engine(model).few.takes(AllowedTokens(np.arange(3))) is False
