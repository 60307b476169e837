"""What a grammar leaves few of is picked as from the logits of all tokens."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from raypd.decoding import few_tokens, native
from raypd.decoding.attention import avx512
from raypd.decoding.engine import Engine
from raypd.decoding.grammar import Grammar, OneOf, Vocabulary
from raypd.decoding.linear import is_possible
from raypd.decoding.llama import Llama
from raypd.decoding.methods.hyper_parallel import Slot, SlottedPrompt, hyper_parallel
from raypd.decoding.pack import pack
from raypd.decoding.program import Feed, Predictions, Program
from raypd.decoding.sampling import AllowedTokens, Sampling
from tests.tiny import VOCABULARY, tiny_model

MOST = VOCABULARY // 8


def asking(seed: int, steps: int = 4) -> Program[list[Predictions]]:
    """Asks behind random tokens for one of a few, one of many and one of all, also of several that have one outcome."""
    rng, found, at = random.Random(seed), [], 0
    for _ in range(steps):
        count = rng.randint(1, 9)
        sample_at = sorted(rng.sample(range(count), rng.randint(1, count)))
        allowed = [_allowed(rng, size) for size in rng.choices((1, 3, MOST, MOST + 1, None), k=len(sample_at))]
        tokens = [rng.randrange(3, VOCABULARY) for _ in range(count)]
        asks = {"sample_at": sample_at, "allowed_token_ids": allowed, "want_logits": rng.random() < 0.1}
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
    """One that computes few logits where it can, one that never does, and how many rows the first computed so."""
    sizes = {"max_num_seqs": 7, "max_num_batched_tokens": 40}
    one, other, rows = Engine(model, **sizes), Engine(model, **sizes), []
    assert one.few is not None
    other.few, sample = None, one.few.sample

    def noted(hidden: torch.Tensor, requests: list[Any]) -> Any:
        rows.append(len(requests))
        return sample(hidden, requests)

    one.few.sample = noted  # type: ignore[method-assign]
    return one, other, rows


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_few_are_picked_as_from_all(kind: str, tied: bool, temperature: float) -> None:
    one, other, rows = engines(tiny_model(kind, tie_word_embeddings=tied).double())
    for (tokens, logprobs), (same, as_likely) in zip(said(one, temperature), said(other, temperature), strict=True):
        assert tokens == same
        assert logprobs == pytest.approx(as_likely, abs=1e-9)
    assert sum(rows) > 100


@pytest.mark.skipif(native.refusal() is not None or not is_possible(), reason="no AVX-512 BF16, or no C compiler")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_in_bfloat16_they_are_the_same_bits(temperature: float, monkeypatch) -> None:
    monkeypatch.setattr(avx512, "is_best", lambda device, dtype: True)  # on processors with AMX, too
    one, other, rows = engines(pack(tiny_model("llama", head_dim=32).bfloat16()))
    assert list(said(one, temperature)) == list(said(other, temperature))
    assert sum(rows) > 100


def test_rows_are_kept_until_they_are_too_many(monkeypatch) -> None:
    made, narrowed = [], few_tokens.narrowed
    monkeypatch.setattr(few_tokens, "narrowed", lambda head, ids: made.append(ids.tolist()) or narrowed(head, ids))
    engine = Engine(tiny_model("llama"))

    def program(*sets: range) -> Program[None]:
        for at, ids in enumerate(sets):
            predictions = yield Feed([5], [at], sample_at=[0], allowed_token_ids=[AllowedTokens(np.array(ids))])
            assert predictions.tokens[0] in ids

    engine.run([program(range(9), range(4, 8), range(9, 20), range(9), range(100, 120), range(100, 101))])
    assert made == [[*range(9)], [*range(20)], [*range(100, 120)]]


def test_values_of_a_type_ask_for_few() -> None:
    vocabulary = Vocabulary([chr(n) for n in range(VOCABULARY)])
    choices = {4: ["true", "false"], 8: ['"a"', '"b"']}
    slots = [Slot(end, Grammar(OneOf(texts), vocabulary)) for end, texts in choices.items()]
    one, other, rows = engines(tiny_model("llama"))
    found, same = (e.run([hyper_parallel(SlottedPrompt(range(40, 49), slots), 6)])[0] for e in (one, other))
    assert [value.completion for value in found] == [value.completion for value in same]
    assert {value.completion for value in found} <= {"true", "false", '"a"', '"b"'}
    assert sum(rows) == sum(len(value.tokens) for value in found)


def test_other_models_compute_all_logits() -> None:
    """gemma2 caps its logits behind the output embeddings; a bias is not taken along."""
    assert Engine(tiny_model("gemma2")).few is None
    model = tiny_model("llama")
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCABULARY))
    few = Engine(model).few
    assert few.takes(AllowedTokens(np.arange(3))) is False
