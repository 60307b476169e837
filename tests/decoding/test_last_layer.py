"""The last layer's MLP is for the tokens whose predictions are wanted; the answers stay those of the whole layer."""

from __future__ import annotations

import pytest

from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import autoregressive
from tests.decoding.drivers import never, prompts_of
from tests.tiny import tiny_model


@pytest.mark.parametrize(("kind", "kept"), [("llama", True), ("qwen3", True), ("mistral", True), ("gemma2", False)])
def test_what_goes_through_each_mlp(kind: str, kept: bool) -> None:
    model = tiny_model(kind)
    fed: list[list[int]] = [[], []]
    for layer, seen in zip((model.model.layers[0], model.model.layers[-1]), fed, strict=True):
        layer.mlp.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0].shape[1]))
    prompts = prompts_of(3, 20, 40)
    engine = Engine(model, max_num_batched_tokens=30)
    answers = engine.run(autoregressive(prompt, 4, never) for prompt in prompts)
    assert sum(fed[0]) > 100
    assert sum(fed[1]) == (len(prompts) * 4 if kept else sum(fed[0]))
    engine._shortened = False
    for layer in model.model.layers:
        layer.__dict__.pop("forward", None)
    whole = engine.run(autoregressive(prompt, 4, never) for prompt in prompts)
    assert [one.tokens for one in answers] == [one.tokens for one in whole]
    for one, other in zip(answers, whole, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
