"""What the engine can decode exactly passes, and what it cannot is refused."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from raypd.decoding import llama
from raypd.errors import ModelError
from raypd.models.guard import check_decodable, reason_in_rope
from tests.tiny import tiny_model

FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "phi", "phi3", "mistral", "gemma", "gemma2", "gemma3_text", "olmo",
            "olmo2", "olmo3", "smollm3", "granite", "starcoder2", "cohere", "cohere2", "glm4", "gpt_neox", "ernie4_5",
            "exaone4", "seed_oss", "arcee", "gpt2", "opt"]  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}


def refusal(model: PreTrainedModel) -> str:
    with pytest.raises(ModelError) as error:
        check_decodable(model, "owner/model")
    assert "'owner/model'" in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", FAMILIES)
def test_families_that_pass(kind: str) -> None:
    model = tiny_model(kind)
    before = model.config._attn_implementation
    check_decodable(model)
    check_decodable(model.to(torch.bfloat16))
    assert model.config._attn_implementation == model.base_model.config._attn_implementation == before


REFUSED = dict.fromkeys(("falcon", "bloom", "mpt", "stablelm"), "AttentionInterface")
REFUSED |= {"mamba": "layers of type linear_attention", "llama4_text": "layers of type chunked_attention"}
REFUSED |= {"gpt_oss": "attention has sinks"}


@pytest.mark.parametrize(("kind", "reason"), REFUSED.items())
def test_families_that_are_refused(kind: str, reason: str) -> None:
    model = tiny_model(kind)
    before = model.config._attn_implementation
    assert reason in refusal(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(("kind", "settings"), [
    ("gemma2", {"sliding_window": 3}),  # windows shorter than the rows of the self-test
    ("mistral", {"sliding_window": 3}),
    ("phi3", {"rope_parameters": {**LONG, "short_factor": [1.5] * 8, "long_factor": [1.5] * 8}}),
    ("llama", {"rope_parameters": {**DYNAMIC, "rope_type": "linear"}}),
    ("qwen3", {"rope_parameters": {**DYNAMIC, "rope_type": "yarn", "original_max_position_embeddings": 2048}}),
])  # fmt: skip
def test_settings_that_pass(kind: str, settings: dict[str, Any]) -> None:
    check_decodable(tiny_model(kind, **settings))
    check_decodable(tiny_model(kind, seed=1, **settings).double())


def test_rope_that_depends_on_the_longest_row() -> None:
    assert "dynamic RoPE" in refusal(tiny_model("llama", rope_parameters=DYNAMIC))
    unequal = {**LONG, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    assert "long-rope" in refusal(tiny_model("phi3", rope_parameters=unequal))
    by_layer: Any = SimpleNamespace(rope_parameters={"full_attention": DYNAMIC, "sliding_attention": {}})
    assert "dynamic RoPE" in str(reason_in_rope(by_layer))


def ignore_positions(model: PreTrainedModel) -> None:
    forward = model.model.forward

    def without(input_ids: torch.Tensor, position_ids: torch.Tensor, **arguments: Any) -> Any:
        return forward(input_ids=input_ids, position_ids=torch.arange(input_ids.shape[1])[None], **arguments)

    model.model.forward = without


def mix_neighbours(model: PreTrainedModel) -> None:
    forward = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: forward(x + 0.1 * x.roll(1, 1))


def drop_arguments(model: PreTrainedModel) -> None:
    forward = model.model.layers[1].self_attn.forward
    model.model.layers[1].self_attn.forward = lambda *a, step=None, **arguments: forward(*a, **arguments)


def skip_attention(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)


SPOILT = [(kind, spoil, "other logits than apart") for spoil in (ignore_positions, mix_neighbours)
          for kind in ("granite", "gemma", "phi3", "olmo2")]  # fmt: skip


@pytest.mark.parametrize(("kind", "spoil", "reason"), [
    *SPOILT, ("granite", drop_arguments, "must hand unknown keyword arguments on"),
    ("granite", skip_attention, r"called for the layers [0]"),
    ("granite", lambda model: model.lm_head.weight.data.mul_(torch.inf), "not finite")])  # fmt: skip
def test_the_self_test_sees(kind: str, spoil: Callable[[PreTrainedModel], None], reason: str) -> None:
    model = tiny_model(kind)
    spoil(model)
    assert reason in refusal(model)
    if (kind, spoil) == ("granite", ignore_positions):
        assert reason in refusal(model.to(torch.bfloat16))


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_it_holds_the_own_code_of_a_family_to_transformers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "_rotated", lambda x, cos, sin: x)
    assert "other logits than apart" in refusal(tiny_model(kind))
