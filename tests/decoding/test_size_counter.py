"""The sizes of every family, counted on the meta device, against the model that runs."""

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, PreTrainedModel

from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import autoregressive
from raypd.decoding.size_counter import model_sizes
from tests.decoding.drivers import never, prompts_of
from tests.decoding.test_families import KINDS, LATENT, tiny
from tests.tiny import HYBRIDS, tiny_model

TOKENS = 40
# Families that transformers' own layers compute, with what their tiny models have beside the sizes.
STOCK: dict[str, dict] = {"gpt_neox": {}, "phimoe": {}}


def model_of(kind: str) -> PreTrainedModel:
    if kind in KINDS:
        return tiny(kind)
    model = tiny_model(kind, **STOCK.get(kind, {}))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("kind", [*KINDS, *STOCK])
def test_sizes_are_those_of_the_model_that_runs(kind: str) -> None:
    model = model_of(kind)
    before = model.config.to_dict()
    sizes = model_sizes(model.config)
    assert model.config.to_dict() == before
    assert model.config._attn_implementation != "raypd_recorder"
    assert sizes.weights == sum(weight.numel() for weight in model.parameters())
    engine = Engine(copy.deepcopy(model))
    engine.run([autoregressive(prompts_of(3, 1)[0], 4, never)])
    # The engine runs in float32 here.
    assert 2 * sizes.cache_bytes == engine.cache.slot_bytes
    states = 0 if engine.states is None else engine.states.state_bytes
    # Inputs of convolutions are in the model's precision, which is bfloat16 where it is counted.
    assert 0.5 * states <= sizes.state_bytes <= states


# The scans of recurrent layers are products of states, which are not counted. The streams of Gemma
# 3n are made and gathered around its layers, by products that are not counted either. They are a
# sixth of a tiny model's, and under a hundredth of a real one's.
@pytest.mark.parametrize(
    "kind",
    [kind for kind in [*KINDS, *STOCK] if kind not in HYBRIDS and kind != "gemma3n_text"],
)
@torch.no_grad()
def test_products_are_those_that_torch_counts(kind: str) -> None:
    model = model_of(kind)
    model.set_attn_implementation("eager")
    sizes = model_sizes(model.config)
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(5, 5 + TOKENS)[None], use_cache=False)
    attended = 0
    for attention in sizes.attention:
        dims = attention.key_dim + attention.value_dim
        if kind in LATENT:
            # transformers makes keys and values of the latents.
            dims = model.config.qk_nope_head_dim + model.config.qk_rope_head_dim
            dims += model.config.v_head_dim
        attended += 2 * attention.layers * attention.heads * dims * TOKENS * TOKENS
    counted = sizes.product_flops(fed=TOKENS, sampled=TOKENS) + attended
    # Rotary embeddings are small products, too.
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_windows_and_experts_are_told() -> None:
    gemma = model_sizes(model_of("gemma3_text").config)
    assert {(kind.layers, kind.window) for kind in gemma.attention} == {(1, 7), (1, None)}
    mixture = model_sizes(model_of("qwen3_moe").config)
    assert (mixture.experts, mixture.experts_per_token) == (4, 2)
    assert mixture.expert_weights == 2 * 4 * 3 * 64 * 64


def test_latent_attention_is_counted_as_the_cache_holds_it() -> None:
    (attention,) = model_sizes(model_of("deepseek_v3").config).attention
    assert (attention.heads, attention.kv_heads) == (4, 1)
    assert (attention.key_dim, attention.value_dim) == (64 + 32, 64)
    # Two layers of a latent and a rotated key.
    assert attention.cached_numbers == 2 * (64 + 32)


def test_a_token_of_deepseek_v3_takes_70_kilobytes() -> None:
    assert model_sizes(AutoConfig.for_model("deepseek_v3")).cache_bytes == 61 * 576 * 2


# Billions of weights, and of those that a token goes through, as publishers name them. Those of
# gpt-oss leave out its embeddings, 0.58.
PUBLISHED = {
    "Qwen3-30B-A3B": (30.5, 3.3),
    "gpt-oss-20b": (20.9, 3.61 + 0.58),
    "Gemma-3-4B": (3.88, 3.88),
    "Qwen3.5-4B": (4.2, 4.2),
    "SmolLM2-135M": (0.1345, 0.1345),
    "Qwen3-0.6B": (0.6, 0.6),
    "Qwen3-1.7B": (1.7, 1.7),
    "Qwen3-8B": (8.2, 8.2),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_have_the_sizes_that_their_publishers_name(name: str) -> None:
    from benchmarks.gpu.shapes import SHAPES

    sizes = model_sizes(SHAPES[name].config())
    weights, active = PUBLISHED[name]
    assert sizes.weights / 1e9 == pytest.approx(weights, rel=0.03)
    embeddings = sizes.weights - sizes.dense_weights - sizes.expert_weights
    assert (sizes.active_weights + embeddings) / 1e9 == pytest.approx(active, rel=0.12)


def test_what_has_no_language_model_is_an_error() -> None:
    with pytest.raises(ValueError, match="no causal language model of type vit"):
        model_sizes(AutoConfig.for_model("vit"))
