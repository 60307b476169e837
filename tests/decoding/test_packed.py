"""Packed linear layers give what they gave, but for the order of sums in float32."""

from __future__ import annotations

import copy

import pytest
import torch

from raypd.decoding.attention import avx512
from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import Prompt, autoregressive
from raypd.decoding.packed import PackedLinear, is_possible, pack
from tests.decoding.drivers import never
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(not is_possible(), reason="this processor has no products in bfloat16")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 3, 70, 900])
@torch.inference_mode()
def test_a_layer_gives_what_it_gave(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 200, bias=bias, dtype=torch.bfloat16)
    packed = PackedLinear(linear)
    exact = copy.deepcopy(linear).double()
    for x in (torch.randn(1, rows, 96), torch.randn(1, 96, rows).transpose(1, 2)):
        found = packed(x.bfloat16())
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), exact(x.bfloat16().double()), atol=1e-5, rtol=2**-8)
    torch.testing.assert_close(packed.weight, linear.weight, atol=0, rtol=0)


def test_a_model_answers_as_before_and_its_embedding_is_left_alone() -> None:
    model = tiny_model("llama").bfloat16()
    packed = copy.deepcopy(model)
    for _ in range(2):  # what is packed stays as it is
        pack(packed)
    assert not any(type(module) is torch.nn.Linear for module in packed.modules())
    assert isinstance(packed.get_output_embeddings(), PackedLinear)
    torch.testing.assert_close(packed.get_input_embeddings().weight, model.get_input_embeddings().weight)
    ids = torch.arange(5, 60)[None]
    with torch.inference_mode():
        torch.testing.assert_close(packed(ids).logits, model(ids).logits, atol=0.02, rtol=0.02)
    prompts = [Prompt(list(range(5 + n, 40 + 3 * n))) for n in range(5)]
    answers = Engine(packed).run(autoregressive(p, 12, never) for p in prompts)
    assert [len(answer.tokens) for answer in answers] == [12] * 5


@pytest.mark.skipif(avx512.refusal(torch.device("cpu")) is not None, reason="needs the C functions")
@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"num_key_value_heads": 4}),
        ("mistral", {"sliding_window": 7, "num_key_value_heads": 1}),
    ],
)
def test_an_attention_layer_in_fewer_steps_is_as_near_to_float64(kind, extra, monkeypatch) -> None:
    monkeypatch.setattr(avx512, "is_best", lambda device, dtype: True)  # on processors with AMX, too
    model = tiny_model(kind, head_dim=64, **extra).bfloat16()
    exact, packed = copy.deepcopy(model).double(), copy.deepcopy(model)
    pack(packed)
    names = {name for name, _ in packed.model.layers[0].self_attn.named_children()}
    assert names - {"q_norm", "k_norm"} == {"qkv_proj", "o_proj"}
    ids = torch.arange(5, 125).view(2, 60)
    with torch.inference_mode():
        wanted = exact(ids).logits
        found, before = ((one(ids).logits - wanted).abs() for one in (packed, model))
    assert found.mean() < 1.1 * before.mean()
    assert found.max() < 1.5 * before.max()


def test_other_types_are_left_alone() -> None:
    model = tiny_model("llama")
    pack(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
