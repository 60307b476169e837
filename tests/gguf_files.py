"""Writes tiny GGUF files with the package of llama.cpp."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from tests.tiny import EOS, tiny_model, tiny_tokenizer

# Names of llama.cpp for those of transformers.
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    file: Path,
    kind: str = "llama",
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0,
    tensors: dict[str, np.ndarray[Any, Any]] | None = None,
    texts: dict[str, str] | None = None,
    numbers: dict[str, float] | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """Write a tiny model and its tokenizer.

    Args:
        file: The file.
        kind: "llama" or "qwen3".
        quantization: The type of the matrices.
        tensors: More tensors.
        texts: More keys with texts; an empty text leaves a key out.
        numbers: More keys with numbers.
        overrides: Keys of the model's configuration.

    Returns:
        The model, with the weights that the file holds after rounding.
    """
    model = tiny_model(kind, **overrides)
    config = model.config
    writer = gguf.GGUFWriter(file, kind)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, texts or {})
    for key, number in (numbers or {}).items():
        writer.add_float32(key, number)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            data = weight.numpy()
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            projection = name.split(".")[-2]
            if kind == "llama" and projection in heads:
                data = _permuted(data, heads[projection])
            if data.ndim == 2:
                blocks = gguf.quants.quantize(data, quantization)
                data = gguf.quants.dequantize(blocks, quantization)
                writer.add_tensor(_renamed(name), blocks, raw_dtype=quantization)
                if kind == "llama" and projection in heads:
                    data = _unpermuted(data, heads[projection])
                weight.copy_(torch.from_numpy(data))
            else:
                writer.add_tensor(_renamed(name), data)
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


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


def _renamed(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, part = name.split(".", 3)
    stem, _, last = part.rpartition(".")
    return f"blk.{layer}.{_NAMES[stem]}.{last}"


def _permuted(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Orders rows as llama.cpp rotates them: pairs that are neighbours."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _unpermuted(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
