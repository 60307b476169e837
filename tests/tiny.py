"""Small random models for tests: made in milliseconds, of the families that people run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCABULARY = 256
EOS = 2
HEAD_DIM = 16

# The families whose names of the sizes differ from llama's.
_OWN_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 2048,
    },
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "mpt": {
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "max_seq_len": 2048,
    },
    "falcon": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
    },
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    "opt": {
        "hidden_size": 64,
        "ffn_dim": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 64,
    },
}
_DELTA_NET = {
    "num_hidden_layers": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# transformers pads a text to whole chunks, so that a chunk of 256 tokens would take most of a test.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_head": 16, "mamba_chunk_size": 32}
_LFM2 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
}
# Families with recurrent or convolution layers.
_HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_next": {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "granitemoehybrid": {
        **_MAMBA,
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "num_local_experts": 4,
        "shared_intermediate_size": 64,
    },
    "bamba": {**_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "attention", "moe", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "chunk_size": 32,
        "n_groups": 2,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "lfm2": _LFM2,
    "lfm2_moe": {**_LFM2, **_EXPERTS, "num_dense_layers": 1},
}
HYBRIDS = list(_HYBRIDS)
# Latent attention, and experts that are chosen in groups.
_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 32,
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
_GROUPED_EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
# Layers of which the last ones read the keys and values of earlier ones.
_SHARING = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
}
_EXTRA: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": HEAD_DIM},
    "gemma3_text": {"query_pre_attn_scalar": HEAD_DIM},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0},
    **_HYBRIDS,
    "afmoe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "num_shared_experts": 1,
        "global_attn_every_n_layers": 2,
        "mup_enabled": True,
    },
    "axk1": {**_LATENT, **_GROUPED_EXPERTS},
    "deepseek_v2": {**_LATENT, **_GROUPED_EXPERTS, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**_LATENT, **_GROUPED_EXPERTS},
    "glm4_moe_lite": {**_LATENT, **_GROUPED_EXPERTS, "n_group": 1},
    "mistral4": {**_LATENT, **_GROUPED_EXPERTS, "head_dim": 96},
    "minicpm3": _LATENT,
    "youtu": {**_LATENT, "q_lora_rank": None},
    "dots1": _GROUPED_EXPERTS,
    "exaone_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "sliding_window_pattern": 2,
    },
    "gemma3n_text": {
        **_SHARING,
        "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0],
        "laurel_rank": 16,
    },
    "gemma4_text": {**_SHARING, "global_head_dim": 2 * HEAD_DIM},
    "gemma4_unified_text": {"global_head_dim": 2 * HEAD_DIM},
    "hy_v3": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "solar_open": _GROUPED_EXPERTS,
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64},
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "use_qk_norm": True,
    },
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "smollm3": {"no_rope_layer_interval": 2},
    "exaone4": {"sliding_window_pattern": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}


def tiny_model(kind: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random causal language model of transformers' type `kind`, float32 on the CPU in eval();
    keys of its configuration over it. Attention is peaked and logits deviate by about 3: a wrong
    mask or position shows.
    """
    sizes: dict[str, Any] = _OWN_SIZES.get(kind) or {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
    }
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS}
    settings = {
        **sizes,
        **_EXTRA.get(kind, {}),
        **tokens,
        "tie_word_embeddings": False,
        **overrides,
    }
    config = AutoConfig.for_model(kind, **settings)
    if kind == "mistral4":
        # transformers does not list it, as it is published with an encoder of images.
        AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
    # Some families draw biases and sinks at random, near which `_draw_weights` leaves them.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _draw_weights(model, seed)
    return model.eval()


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """The model in float64 from end to end, in place: float32 norms of transformers differ between
    layouts by 1e-6.
    """

    def wide(forward: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **named: Any) -> Any:
            with _Wide():
                return forward(*args, **named)

        return inside

    for module in model.double().modules():
        if module is model or type(module).__name__.endswith(("RMSNorm", "RotaryEmbedding")):
            module.forward = wide(module.forward)
    return model


class _Wide(TorchFunctionMode):
    """Takes every float32 that is asked for as float64."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {
            k: torch.float64 if value is torch.float32 else value
            for k, value in (kwargs or {}).items()
        }
        return function(*args, **kwargs)


@torch.no_grad()
def _draw_weights(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    for _, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if weight is embedding:
            weight.copy_(noise if head is None or head.weight is not embedding else noise * 0.4)
        elif head is not None and weight is head.weight:
            weight.copy_(noise * 3 / weight.shape[1] ** 0.5)
        elif weight.dim() >= 2:
            weight.copy_(noise * 1.5 / weight.shape[-1] ** 0.5)
        else:  # norms (around 1, or 0 in gemma) and biases: near what they were
            weight.add_(noise * 0.1)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 256 ids for `tiny_model`, with a chat template.

    Ids 0, 1 and 2 are <pad>, <s> and <|im_end|>; ids 3 to 255 are those bytes (0, 1 and 2 cannot be
    written).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    vocabulary = {"<pad>": 0, "<s>": 1, "<|im_end|>": EOS}
    vocabulary |= {letters[byte]: byte for byte in range(3, VOCABULARY)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] + '\\n' + message['content'] + "
        "'<|im_end|>' + '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
    )
    return tokenizer


def save_tiny(folder: Path, kind: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """Saves a tiny model and its tokenizer where `model.name` can point; returns the folder."""
    tiny_model(kind, seed, **overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
