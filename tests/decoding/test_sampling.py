"""Picking tokens: many requests in one call against each one alone; and few allowed tokens."""

import math
import random

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from raypd.decoding import few_tokens, native, sampling
from raypd.decoding.attention import avx512
from raypd.decoding.automata import OneOf
from raypd.decoding.engine import Engine
from raypd.decoding.grammar import Grammar
from raypd.decoding.linear import is_possible
from raypd.decoding.methods.hyper_parallel import Slot, SlottedPrompt, hyper_parallel
from raypd.decoding.models.decoder import DecoderModel
from raypd.decoding.pack import pack_model
from raypd.decoding.program import Feed, Predictions, Program
from raypd.decoding.sampling import GREEDY, AllowedTokens, SampleRequests, Sampling, sample
from raypd.decoding.transfer import to_device
from raypd.decoding.value_automata import JsonString
from raypd.decoding.vocabulary import Vocabulary
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
RED = ['"red"', "null"]
RED_OR_ROSE = ['"red"', '"rose"', "null"]
MAX_FEW = VOCABULARY // 8  # The most allowed tokens whose logits alone are computed.


def picked(logits, requests):
    tokens, logprobs = sample(logits, requests).tolist()
    return [int(token) for token in tokens], logprobs


def greedily(allowed: list[AllowedTokens | None]) -> SampleRequests:
    return SampleRequests([GREEDY] * len(allowed), [0.0] * len(allowed), allowed)


def by_hand(logits, temperature, draw, allowed):
    """Return token and log-probability of one request, in float64."""
    scores = logits.double()
    if allowed is not None:
        forbidden = np.setdiff1d(np.arange(len(scores)), allowed.ids)
        scores[forbidden] = -torch.inf
    if temperature == 0:
        token = int(scores.argmax())
    else:
        token = int(((scores / temperature).softmax(-1).cumsum(-1) <= draw).sum())
    chances = scores.softmax(-1)
    if allowed is None or allowed.outcomes is None:
        return token, math.log(chances[token])
    outcomes = {}
    for id, (first, last) in zip(allowed.ids, allowed.outcomes, strict=True):
        outcomes[int(id)] = set(range(first, last + 1))
    within = [id for id in outcomes if outcomes[id] <= outcomes[token]]
    not_wider = [id for id in outcomes if not outcomes[id] > outcomes[token]]
    inside = sum(float(chances[id]) for id in within)
    total = sum(float(chances[id]) for id in not_wider)
    return token, math.log(inside / total)


def random_allowed(rng: np.random.Generator, vocabulary: int) -> AllowedTokens:
    """Return allowed tokens of which some lead to the same outcome.

    They are few enough to be read out of the logits, or so many that they are masked.
    """
    size = rng.integers(1, 40) if rng.random() < 0.5 else rng.integers(1020, 2400)
    ids = np.sort(rng.choice(vocabulary, size, replace=False))
    nested = np.array(
        [
            (0, 5),
            (0, 2),
            (3, 5),
            *((i, i) for i in range(6)),
        ]
    )
    outcomes = rng.choice(nested, len(ids)) if rng.random() < 0.5 else None
    return AllowedTokens(ids, outcomes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_request_is_answered_as_if_alone(dtype):
    rng = np.random.default_rng(4)
    # These are more rows than are processed together.
    logits = torch.from_numpy(rng.normal(size=(77, 2501)) * 4).to(dtype)
    requests = SampleRequests()
    for _ in range(77):
        allowed = random_allowed(rng, 2501) if rng.random() < 0.5 else None
        requests.sampling.append(Sampling(float(rng.choice([0.0, 0.7, 1.3]))))
        requests.draws.append(float(rng.random()))
        requests.allowed_token_ids.append(allowed)
    tokens, logprobs = picked(logits, requests)
    temperatures = [sampling.temperature for sampling in requests.sampling]
    expected = list(map(by_hand, logits, temperatures, requests.draws, requests.allowed_token_ids))
    assert tokens == [token for token, _ in expected]
    np.testing.assert_allclose(logprobs, [logprob for _, logprob in expected], atol=2e-5)


def test_no_request_has_no_result():
    assert sample(torch.zeros(0, 9), SampleRequests()).shape == (2, 0)


def test_a_request_that_allows_no_token_is_an_error():
    nothing = AllowedTokens(np.array([], dtype=np.int64))
    with pytest.raises(ValueError, match="allows no token"):
        sample(torch.zeros(1, 9), greedily([nothing]))


def test_what_a_grammar_allows_goes_to_the_device_once(monkeypatch):
    texts = [chr(97 + n % 26) * (n // 26 + 1) for n in range(1500)]
    grammar = Grammar(json_object(None), Vocabulary([*texts, '{"']))
    state = grammar.advance(0, 1500)
    sent = []

    def noted(array, device):
        sent.append(array.nbytes)
        return to_device(array, device)

    monkeypatch.setattr(sampling, "to_device", noted)
    for _ in range(3):
        requests = greedily([grammar.allowed(state, None)] * 8)
        tokens, _ = sample(torch.randn(8, 1501), requests)
        assert tokens.max() < 1500
    # The rows and sets of each pass take 2 * 8 integers; the set takes a bit per token.
    assert sorted(sent) == [128, 128, 128, 188]


@pytest.mark.parametrize(
    ("automaton", "chances", "confidence"),
    [
        # The model would prefer a token that is not allowed.
        (OneOf(BOOLEAN), {"true": 0.1, "false": 0.098, "x": 0.8}, 0.505),
        # One value is written in three ways.
        (OneOf(BOOLEAN), {" true": 0.2, "true": 0.2, "t": 0.1, "false": 0.3, " false": 0.2}, 0.5),
        # A space leaves all values open.
        (OneOf(BOOLEAN), {" ": 0.2, " true": 0.3, "false": 0.3, "null": 0.2}, 0.375),
        (OneOf(BOOLEAN), {" ": 0.6, "true": 0.4}, 1.0),
        # An enum with one value, then with null beside it.
        (OneOf(RED), {' "': 0.3, '"': 0.2, "x": 0.5}, 1.0),
        (OneOf(RED), {' "': 0.3, '"': 0.24, "null": 0.18, "x": 0.28}, 0.75),
        # A token is the beginning of several values.
        (OneOf(RED_OR_ROSE), {'"': 0.5, '"red': 0.2, '"rose': 0.1, "null": 0.2}, 0.8),
        (OneOf(RED_OR_ROSE), {'"': 0.2, '"red': 0.4, '"rose': 0.1, "null": 0.2}, 4 / 7),
        (JsonString(), {"null": 0.4, '"': 0.3, ' "': 0.2, '"red': 0.1}, 0.4),
    ],
)
def test_a_choice_has_its_probability_among_what_the_grammar_allows(automaton, chances, confidence):
    logits = torch.full((1, len(TEXTS)), -1e4)
    for text, chance in chances.items():
        logits[0, TEXTS.index(text)] = math.log(chance)
    allowed = Grammar(automaton, Vocabulary(TEXTS)).allowed(0, 9)
    (token,), (logprob,) = picked(logits, greedily([allowed]))
    allowed_texts = [text for text in chances if text != "x"]
    assert TEXTS[token] == max(allowed_texts, key=chances.__getitem__)
    assert math.exp(logprob) == pytest.approx(confidence, abs=1e-3)


@pytest.mark.skipif(native.refusal() is not None, reason=f"the machine {native.refusal()}")
@pytest.mark.parametrize("shape", [(1, 49152), (37, 259), (3, 16), (2, 7)])
def test_greedy_in_bfloat16_is_the_first_of_the_highest(shape):
    torch.manual_seed(0)
    logits = (torch.randn(shape) * 4).bfloat16()
    first_best = shape[1] // 2
    logits[0, first_best] = logits.max() + 1
    logits[0, -1] = logits[0, first_best]
    logits[-1, 1:3] = -torch.inf
    tokens, logprobs = picked(logits, greedily([None] * len(logits)))
    assert tokens[0] == first_best
    assert tokens == logits.float().argmax(-1).tolist()
    exact = logits.double().log_softmax(-1)
    expected = [float(row[token]) for row, token in zip(exact, tokens, strict=True)]
    assert logprobs == pytest.approx(expected, abs=2e-6)


def sampling_program(seed: int, steps: int = 4) -> Program[list[Predictions]]:
    """Sample behind random tokens: among one, a few, many or all tokens.

    Some allowed tokens lead to the same outcome.
    """
    rng = random.Random(seed)
    answers: list[Predictions] = []
    position = 0
    for _ in range(steps):
        count = rng.randint(1, 9)
        sample_at = sorted(rng.sample(range(count), rng.randint(1, count)))
        sizes = rng.choices((1, 3, MAX_FEW, MAX_FEW + 1, None), k=len(sample_at))
        allowed = [_random_allowed(rng, size) for size in sizes]
        tokens = [rng.randrange(3, VOCABULARY) for _ in range(count)]
        predictions = yield Feed(
            tokens,
            range(position, position + count),
            sample_at=sample_at,
            allowed_token_ids=allowed,
            want_logits=rng.random() < 0.1,
        )
        for token, token_set in zip(predictions.tokens, allowed, strict=True):
            assert token_set is None or token in token_set.ids
        position += count
        answers.append(predictions)
    return answers


def _random_allowed(rng: random.Random, size: int | None) -> AllowedTokens | None:
    if size is None:
        return None
    ids = np.array(sorted(rng.sample(range(VOCABULARY), size)), dtype=np.int64)
    ends = np.array([[rng.randrange(4), rng.randrange(4)] for _ in ids])
    outcomes = np.sort(ends, axis=1) if rng.random() < 0.5 else None
    return AllowedTokens(ids, outcomes)


def predictions_of(engine: Engine, temperature: float) -> list[Predictions]:
    """Return all predictions of 24 sampling programs."""
    programs = (sampling_program(seed) for seed in range(24))
    answers = engine.run(programs, sampling=Sampling(temperature))
    return [predictions for answer in answers for predictions in answer]


def engines(model: PreTrainedModel | DecoderModel) -> tuple[Engine, Engine, list[int]]:
    """Return an engine that computes few logits if it can, and one that never does.

    The list receives the number of rows that the first one computed so, in each pass.
    """
    narrow = Engine(model, max_num_seqs=7, max_num_batched_tokens=40)
    full = Engine(model, max_num_seqs=7, max_num_batched_tokens=40)
    full.few = None
    assert narrow.few is not None
    sample_few = narrow.few.sample
    rows: list[int] = []

    def noted(hidden: torch.Tensor, requests: SampleRequests) -> torch.Tensor:
        rows.append(len(requests))
        return sample_few(hidden, requests)

    narrow.few.sample = noted  # type: ignore[method-assign]
    return narrow, full, rows


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("tied", [True, False])
# gemma2 caps its logits behind the output embeddings, and cohere2 scales them.
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "cohere2"])
def test_few_are_picked_as_from_all(kind: str, tied: bool, temperature: float) -> None:
    narrow, full, rows = engines(tiny_model(kind, tie_word_embeddings=tied).double())
    predictions = predictions_of(narrow, temperature)
    expected = predictions_of(full, temperature)
    for one, other in zip(predictions, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-9)
    assert sum(rows) > 100


@pytest.mark.skipif(
    native.refusal() is not None or not is_possible(), reason="no AVX-512 BF16, or no C compiler"
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_in_bfloat16_they_are_the_same_bits(temperature: float, monkeypatch) -> None:
    # Processors with AMX would use another path.
    monkeypatch.setattr(avx512, "is_best", lambda device, dtype: True)
    narrow, full, rows = engines(pack_model(tiny_model("llama", head_dim=32).bfloat16()))
    predictions = predictions_of(narrow, temperature)
    expected = predictions_of(full, temperature)
    assert [one.tokens for one in predictions] == [other.tokens for other in expected]
    assert [one.logprobs for one in predictions] == [other.logprobs for other in expected]
    assert sum(rows) > 100


def test_rows_are_kept_until_they_are_too_many(monkeypatch) -> None:
    narrowed = few_tokens.narrowed
    loaded = []

    def noted(head, ids):
        loaded.append(ids.tolist())
        return narrowed(head, ids)

    monkeypatch.setattr(few_tokens, "narrowed", noted)
    engine = Engine(tiny_model("llama"))

    def program(*sets: range) -> Program[None]:
        for position, ids in enumerate(sets):
            allowed = AllowedTokens(np.array(ids))
            predictions = yield Feed(
                [5],
                [position],
                sample_at=[0],
                allowed_token_ids=[allowed],
            )
            assert predictions.tokens[0] in ids

    sets = [
        range(9),
        range(4, 8),
        range(9, 20),
        range(9),
        range(100, 120),
        range(100, 101),
    ]
    engine.run([program(*sets)])
    assert loaded == [
        [*range(9)],
        [*range(20)],
        [*range(100, 120)],
    ]


def test_values_of_a_type_need_few_logits() -> None:
    vocabulary = Vocabulary([chr(n) for n in range(VOCABULARY)])
    booleans = Grammar(OneOf(["true", "false"]), vocabulary)
    letters = Grammar(OneOf(['"a"', '"b"']), vocabulary)
    prompt = SlottedPrompt(range(40, 49), [Slot(4, booleans), Slot(8, letters)])
    narrow, full, rows = engines(tiny_model("llama"))
    (values,) = narrow.run([hyper_parallel(prompt, 6)])
    (expected,) = full.run([hyper_parallel(prompt, 6)])
    completions = [value.completion for value in values]
    assert completions == [value.completion for value in expected]
    assert completions[0] in ("true", "false")
    assert completions[1] in ('"a"', '"b"')
    assert sum(rows) == sum(len(value.tokens) for value in values)


def test_models_of_no_registered_family_compute_all_logits() -> None:
    assert Engine(tiny_model("olmo")).few is None


def test_output_embeddings_with_a_bias_compute_all_logits() -> None:
    model = tiny_model("llama")
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCABULARY))
    few = Engine(model).few
    assert few is not None
    assert few.takes(AllowedTokens(np.arange(3))) is False
