"""The keys of a GGUF file that describe its model, compared with the configuration made from them.

transformers ignores keys that it does not know and uses the defaults of its configuration class
instead, which are those of a different model. The answers would be wrong without an error. So the
configuration is completed here, and each remaining key must agree with it.
"""

import math
from collections.abc import Callable
from typing import Any

# Architectures of llama.cpp whose files are read exactly (tests/models/test_gguf.py).
ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen3moe",
    "qwen35",
    "qwen35moe",
    "gemma2",
    "gemma3",
    "phi3",
    "lfm2",
    "starcoder2",
)
# Keys that do not say what is computed, or that transformers reads into something else.
_UNCHECKED = {
    "block_count",
    "tensor_data_layout",
    "pooling_type",
    "rope.dimension_sections",
    "full_attention_interval",
    "nextn_predict_layers",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
_UNCHECKED_PREFIX = "ssm."
# Keys that transformers leaves out, and the attributes of a configuration that hold what they say.
_LEFT_OUT = {
    "vocab_size": "vocab_size",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
}
# Layers of the models of Gemma whose scores are scaled by the hidden size of a head, and not by the
# size of a head. Files do not give this; llama.cpp recognizes them by this number, too.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


# The window of all published StarCoder2 models. Files do not give it.
_STARCODER2_WINDOW = 4096


def keys_of_model(reader: Any) -> dict[str, Any]:
    """Return the keys of a file that describe its model, without the name of the architecture.

    Args:
        reader: The reader of the package gguf.
    """
    prefix = f"{architecture_of(reader)}."
    return {
        key.removeprefix(prefix): field.contents()
        for key, field in reader.fields.items()
        if key.startswith(prefix)
    }


def architecture_of(reader: Any) -> str:
    """Return the architecture that a file names."""
    return str(reader.fields["general.architecture"].contents())


def complete(config: Any, architecture: str, keys: dict[str, Any]) -> None:
    """Add what transformers leaves out to a configuration.

    Args:
        config: The configuration, which is changed.
        architecture: The architecture of the file.
        keys: The keys of the file that describe its model.
    """
    for key, attribute in _LEFT_OUT.items():
        if keys.get(key) and hasattr(config, attribute):
            setattr(config, attribute, keys[key])
    rope = full_rope(config)
    if "rope.freq_base" in keys:
        rope["rope_theta"] = keys["rope.freq_base"]
    if architecture == "phi3":
        rotated = keys.get("rope.dimension_count", _head_dim(config))
        rope["partial_rotary_factor"] = rotated / _head_dim(config)
    if architecture == "starcoder2":
        config.sliding_window = _STARCODER2_WINDOW
    if architecture in _GEMMA_27B_LAYERS:
        config.query_pre_attn_scalar = _head_dim(config)
        if config.num_hidden_layers == _GEMMA_27B_LAYERS[architecture]:
            config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads


def full_rope(config: Any) -> dict[str, Any]:
    """Return the parameters of the rotary embedding of layers without a window."""
    rope: dict[str, Any] = config.rope_parameters
    by_layer_type: dict[str, Any] = rope.get("full_attention", rope)
    return by_layer_type


def reason_in_keys(config: Any, keys: dict[str, Any]) -> str | None:
    """Return which key of a file contradicts a configuration; None if none does.

    Args:
        config: The configuration.
        keys: The keys of the file that describe its model.
    """
    for key, value in keys.items():
        if key in _UNCHECKED or key.startswith(_UNCHECKED_PREFIX):
            continue
        expected = _EXPECTED[key](config) if key in _EXPECTED else None
        if expected is None and not value:
            continue
        if expected is None:
            return f"{key} is {value!r}, and transformers has no place for it"
        if not _agree(value, expected):
            return f"{key} is {value!r}, and transformers makes {expected!r} of it"
    return None


def _agree(value: Any, expected: Any) -> bool:
    """Return whether the value of a key is the expected one.

    A list has one for each layer, which is 0 in layers without any.
    """
    if isinstance(expected, list) and isinstance(value, int):
        # Every layer of this number sees the whole text.
        value = [bool((layer + 1) % value) for layer in range(len(expected))]
    if isinstance(value, list) and not isinstance(expected, list):
        return all(_agree(of_layer, expected) for of_layer in value if of_layer)
    if isinstance(value, float) or isinstance(expected, float):
        return math.isclose(value, expected, rel_tol=1e-5)
    return bool(value == expected)


def _attribute(*names: str) -> Callable[[Any], Any]:
    """Return a function that reads the first of some attributes that a configuration has."""

    def read(config: Any) -> Any:
        for name in names:
            value = getattr(config, name, None)
            if value is not None:
                return value
        return None

    return read


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda config: value


def _head_dim(config: Any) -> int:
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        return int(head_dim)
    return int(config.hidden_size // config.num_attention_heads)


def _rotated(config: Any) -> int:
    return round(_head_dim(config) * full_rope(config).get("partial_rotary_factor", 1.0))


def _base(config: Any) -> float:
    return float(full_rope(config)["rope_theta"])


def _has_window(config: Any) -> list[bool] | None:
    kinds = getattr(config, "layer_types", None)
    return None if kinds is None else [kind == "sliding_attention" for kind in kinds]


def _base_in_windows(config: Any) -> float | None:
    rope = config.rope_parameters.get("sliding_attention")
    return None if rope is None else float(rope["rope_theta"])


# What the configuration says of a key; None if it has no place for it.
_EXPECTED: dict[str, Callable[[Any], Any]] = {
    "context_length": _attribute("max_position_embeddings"),
    "embedding_length": _attribute("hidden_size"),
    "feed_forward_length": _attribute("intermediate_size"),
    "vocab_size": _attribute("vocab_size"),
    "attention.head_count": _attribute("num_attention_heads"),
    "attention.head_count_kv": _attribute("num_key_value_heads"),
    "attention.layer_norm_rms_epsilon": _attribute("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": _attribute("norm_epsilon"),
    "attention.key_length": _head_dim,
    "attention.value_length": _head_dim,
    "attention.causal": _always(True),
    "attention.sliding_window": _attribute("sliding_window"),
    "attention.sliding_window_pattern": _has_window,
    "attn_logit_softcapping": _attribute("attn_logit_softcapping"),
    "final_logit_softcapping": _attribute("final_logit_softcapping"),
    "rope.freq_base": _base,
    "rope.freq_base_swa": _base_in_windows,
    "rope.dimension_count": _rotated,
    "rope.scale_linear": _always(1.0),
    "rope.scaling.yarn_ext_factor": _always(1.0),
    "logit_scale": _always(1.0),
    "embedding_scale": _always(1.0),
    "residual_scale": _always(1.0),
    "expert_count": _attribute("num_experts"),
    "expert_used_count": _attribute("num_experts_per_tok"),
    "expert_feed_forward_length": _attribute("moe_intermediate_size"),
    "expert_shared_feed_forward_length": _attribute("shared_expert_intermediate_size"),
    "expert_weights_norm": _attribute("norm_topk_prob"),
    "shortconv.l_cache": _attribute("conv_L_cache"),
}
