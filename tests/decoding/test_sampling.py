"""Picking tokens: many asks of all kinds in one call, against each ask worked out by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raypd.decoding.sampling import SampleRequest, Sampling, sample


def by_hand(logits, ask):
    """Token and log-probability of one ask, in float64."""
    model = logits.double().log_softmax(-1)
    scores = logits.double()
    if ask.allowed_token_ids is not None:
        kept = torch.full_like(scores, -torch.inf)
        kept[ask.allowed_token_ids] = scores[ask.allowed_token_ids]
        scores = kept
    if ask.sampling.temperature == 0:
        token = int(scores.argmax())
    else:
        cumulative = (scores / ask.sampling.temperature).softmax(-1).cumsum(-1)
        token = int((cumulative <= ask.draw).sum())
    return token, float(model[token])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_ask_is_answered_as_if_alone(dtype):
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.normal(size=(77, 300)) * 4).to(dtype)  # more rows than are looked at together
    asks = []
    for _ in range(77):
        allowed_token_ids = np.sort(rng.choice(300, rng.integers(1, 40), replace=False)) if rng.random() < 0.4 else None
        sampling = Sampling(float(rng.choice([0.0, 0.7, 1.3])))
        asks.append(SampleRequest(sampling, float(rng.random()), allowed_token_ids))
    tokens, logprobs = sample(logits, asks)
    expected = [by_hand(row, ask) for row, ask in zip(logits, asks, strict=True)]
    assert tokens == [token for token, _ in expected]
    np.testing.assert_allclose(logprobs, [logprob for _, logprob in expected], atol=2e-5)


def test_nothing_asked_and_nothing_allowed():
    assert sample(torch.zeros(0, 9), []) == ([], [])
    with pytest.raises(ValueError, match="allows no token"):
        sample(torch.zeros(1, 9), [SampleRequest(allowed_token_ids=np.array([], dtype=np.int64))])
