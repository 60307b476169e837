"""Writes tiny GGUF files with the package of llama.cpp."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from tests.tiny import EOS, tiny_model, tiny_tokenizer

Types = Iterator[gguf.GGMLQuantizationType]
# Architectures of llama.cpp for transformers' types of model, where they have another name.
_ARCHITECTURES = {
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
# Their norms are stored with the 1 that transformers adds.
_OFFSET_NORMS = ("gemma2", "gemma3_text", "qwen3_5_text", "qwen3_5_moe_text")
# Keys of llama.cpp that some architectures have, and what the configuration calls them.
_KEYS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "shortconv.l_cache": "conv_L_cache",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}


def write_gguf(
    file: Path,
    kind: str = "llama",
    quantization: gguf.GGMLQuantizationType | Types = gguf.GGMLQuantizationType.Q8_0,
    tensors: dict[str, np.ndarray[Any, Any]] | None = None,
    raw_tensors: dict[str, tuple[np.ndarray[Any, Any], gguf.GGMLQuantizationType]] | None = None,
    texts: dict[str, str] | None = None,
    numbers: dict[str, float] | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """Write a tiny model and its tokenizer.

    Args:
        file: The file.
        kind: transformers' type of the model: a dense or a mixture of Llama's kind, Gemma 2 or 3,
            Phi-3, LFM2, or Qwen3.5.
        quantization: The type of the matrices, or that of each in turn.
        tensors: More tensors.
        raw_tensors: More tensors, with the type of their blocks.
        texts: More keys with texts; an empty text leaves a key out.
        numbers: More keys with numbers.
        overrides: Keys of the model's configuration.

    Returns:
        The model, with the weights that the file holds after rounding.
    """
    model = tiny_model(kind, **overrides)
    config = model.config
    architecture = _ARCHITECTURES.get(kind, kind)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("tiny")
    _add_sizes(writer, config, architecture)
    _add_tokenizer(writer, texts or {})
    for key, number in (numbers or {}).items():
        writer.add_float32(key, number)
    names = _names(architecture, config.num_hidden_layers)
    types = quantization
    if isinstance(types, gguf.GGMLQuantizationType):
        types = itertools.repeat(types)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _add_weight(writer, names, kind, config, name, weight, types)
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    for name, (blocks, number_type) in (raw_tensors or {}).items():
        writer.add_tensor(name, blocks, raw_dtype=number_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_sizes(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    kv_heads = config.num_key_value_heads
    if architecture == "lfm2":
        # Layers without attention have none.
        kv_heads = [kv_heads if kind != "conv" else 0 for kind in config.layer_types]
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if architecture != "qwen35moe":
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(kv_heads)
    if architecture == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config.vocab_size)
    if architecture.startswith("qwen35"):
        inner_size = config.linear_num_value_heads * config.linear_value_head_dim
        writer.add_uint32(f"{architecture}.ssm.inner_size", inner_size)
        writer.add_uint32(f"{architecture}.full_attention_interval", 4)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    for key, name in _KEYS.items():
        value = getattr(config, name, None)
        if architecture == "starcoder2" and name == "sliding_window":
            # llama.cpp leaves it out.
            continue
        if isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif value:
            writer.add_uint32(f"{architecture}.{key}", value)


def _names(architecture: str, layers: int) -> Any:
    """Return the names of llama.cpp for those of transformers, by its own package."""
    (number,) = [number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    return gguf.get_tensor_name_map(number, layers)


def _add_weight(
    writer: gguf.GGUFWriter,
    names: Any,
    kind: str,
    config: Any,
    name: str,
    weight: torch.Tensor,
    types: Types,
) -> None:
    """Write a weight as llama.cpp stores it, and round it in the model likewise."""
    stem = name.removesuffix(".weight").removesuffix(".bias")
    suffix = name.removeprefix(stem)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    projection = stem.rpartition(".")[2]
    data = weight.numpy().copy()
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(data, 2, axis=1)
        for part, half in (("gate", gate), ("up", up)):
            stored = f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight"
            half[:] = _add_rounded(writer, stored, half, types)
        weight.copy_(torch.from_numpy(np.concatenate([gate, up], axis=1)))
        return
    if name.endswith("experts.down_proj"):
        stored = f"blk.{name.split('.')[2]}.ffn_down_exps.weight"
        weight.copy_(torch.from_numpy(_add_rounded(writer, stored, data, types)))
        return
    if ".linear_attn." in name:
        _add_delta_weight(writer, names, config, name, weight, types)
        return
    stored = names.get_name(stem) + suffix
    if kind in _OFFSET_NORMS and "norm" in name:
        writer.add_tensor(stored, data + 1)
    elif name.endswith("shared_expert_gate.weight"):
        writer.add_tensor(stored, data[0])
    elif "conv.conv" in name:
        writer.add_tensor(stored, data[:, 0])
    elif kind == "llama" and projection in heads:
        permuted = _permuted(data, heads[projection])
        rounded = _add_rounded(writer, stored, permuted, types)
        weight.copy_(torch.from_numpy(_unpermuted(rounded, heads[projection])))
    else:
        weight.copy_(torch.from_numpy(_add_rounded(writer, stored, data, types)))


def _add_delta_weight(
    writer: gguf.GGUFWriter,
    names: Any,
    config: Any,
    name: str,
    weight: torch.Tensor,
    types: Types,
) -> None:
    """Write a weight of a gated delta rule, whose value heads llama.cpp has in another order.

    It has the first value head of all key heads, then the second one of all.
    """
    stem = name.removesuffix(".weight")
    part = stem.rpartition(".")[2]
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    heads = np.arange(value_heads).reshape(key_heads, -1).T.flatten()
    dim = config.linear_value_head_dim
    numbers = (heads[:, None] * dim + np.arange(dim)).flatten()
    before = 2 * key_heads * config.linear_key_head_dim
    order = {
        "A_log": heads,
        "dt_bias": heads,
        "in_proj_a": heads,
        "in_proj_b": heads,
        "in_proj_z": numbers,
        "out_proj": numbers,
        "in_proj_qkv": np.concatenate([np.arange(before), before + numbers]),
        "conv1d": np.concatenate([np.arange(before), before + numbers]),
        "norm": np.arange(dim),
    }[part]
    data = weight.numpy().copy()
    if part == "dt_bias":
        stored = names.get_name(stem.replace("dt_bias", "dt_proj")) + ".bias"
    else:
        stored = names.get_name(stem) + name.removeprefix(stem)
    if part == "A_log":
        writer.add_tensor(stored, -np.exp(data[order]))
    elif part == "conv1d":
        writer.add_tensor(stored, data[order, 0])
    elif part in ("dt_bias", "norm"):
        writer.add_tensor(stored, data[order])
    elif part == "out_proj":
        data[:, order] = _add_rounded(writer, stored, data[:, order].copy(), types)
        weight.copy_(torch.from_numpy(data))
    else:
        data[order] = _add_rounded(writer, stored, data[order].copy(), types)
        weight.copy_(torch.from_numpy(data))


def _add_rounded(
    writer: gguf.GGUFWriter,
    name: str,
    data: np.ndarray[Any, Any],
    types: Types,
) -> np.ndarray[Any, Any]:
    """Write a tensor, a matrix in the next type, and return what the file holds."""
    if data.ndim < 2 or "ffn_gate_inp" in name:
        writer.add_tensor(name, data)
        return data
    quantization = next(types)
    blocks = _blocks(data, quantization)
    writer.add_tensor(name, blocks, raw_dtype=quantization)
    return gguf.quants.dequantize(blocks, quantization)


def _blocks(
    data: np.ndarray[Any, Any], quantization: gguf.GGMLQuantizationType
) -> np.ndarray[Any, Any]:
    """Return a matrix in a type; for types that the package only reads, any numbers instead."""
    try:
        return gguf.quants.quantize(data, quantization)
    except NotImplementedError:
        pass
    numbers, size = gguf.GGML_QUANT_SIZES[quantization]
    generator = np.random.default_rng(data.size)
    blocks = np.zeros((data.size // numbers, size), dtype=np.uint8)
    missing = np.arange(len(blocks))
    # The scales of a block are in halves somewhere in it: draw until its numbers are weights.
    while len(missing):
        drawn = generator.integers(256, size=(len(missing), size), dtype=np.uint8)
        if quantization is gguf.GGMLQuantizationType.NVFP4:
            # Four scales of a byte, of which few are below 1/12.
            drawn[:, :4] %= 32
        largest = np.abs(gguf.quants.dequantize(drawn, quantization)).max(axis=-1)
        usable = largest < 1
        blocks[missing[usable]] = drawn[usable]
        missing = missing[~usable]
    return blocks.reshape(*data.shape[:-1], -1)


def _add_tokenizer(writer: gguf.GGUFWriter, texts: dict[str, str]) -> None:
    tokenizer = tiny_tokenizer()
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    # The list of merges must not be empty. UTF-8 does not have the last byte.
    tokens[-1] = "QQ"
    keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", **texts}
    for key, text in keys.items():
        if text:
            writer.add_string(key, text)
    writer.add_token_list(tokens)
    control = [gguf.TokenType.CONTROL] * 3
    writer.add_token_types([*control, *[gguf.TokenType.NORMAL] * (len(tokens) - 3)])
    writer.add_token_merges(["Q Q"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS)
    writer.add_eot_token_id(10)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.chat_template)


def _permuted(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Orders rows as llama.cpp rotates them: pairs that are neighbours."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _unpermuted(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
