"""The text part of models that also see or hear, which is all that raypd computes.

A checkpoint such as Qwen3-VL or Mistral Small 3.2 contains a language model and an image encoder.
The language model is loaded as a plain one: its tensors get the names that they have in that class.
The tensors of the encoder are not read.
"""

import re

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from raypd.models.checkpoints.tensors import Tensor, Tensors
from raypd.models.unexpected_keys import is_other_part

# Types of models whose text part is used. Others either mix text and images in their layers
# (Llama 3.2 Vision), or read a prompt in both directions (PaliGemma).
_WITH_TEXT_PART = {
    "aya_vision",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4_unified",
    "idefics3",
    "internvl",
    "lfm2_vl",
    "llava",
    "llava_next",
    "llava_onevision",
    "mistral3",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
}
# Text parts without a class of their own. They rotate by three positions of each token, which are
# equal for text, and so compute what a plain model does.
_PLAIN_TYPE = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
_ROTATION_OF_IMAGES = ("mrope_section", "mrope_interleaved", "type")
# The prefixes of names in the text part, in older and newer files, and what they become.
KEY_MAPPING = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.text_model\.": "model.",
}
# Qwen3-VL has the weights of all experts of a layer in one tensor, and published ones transposed.
_FUSED_EXPERTS = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$")


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the text part, as of a plain language model.

    Args:
        config: The configuration in config.json.

    Returns:
        `config` itself if it is of a plain language model, or of an unknown one.
    """
    text = config.get_text_config()
    if text.model_type == "mistral4":
        # transformers does not list it, because it is published with an image encoder.
        from transformers import Mistral4Config, Mistral4ForCausalLM

        AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
    if config.model_type not in _WITH_TEXT_PART:
        return config
    plain_type = _PLAIN_TYPE.get(text.model_type)
    if plain_type is not None:
        text = _plain_config(text, plain_type)
    else:
        text = type(text).from_dict(text.to_dict())
    text.architectures = config.architectures
    text.tie_word_embeddings = config.tie_word_embeddings
    text.dtype = text.dtype or config.dtype
    text._name_or_path = config._name_or_path
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        text.quantization_config = quantization
    # `has_text_part` reads this when the files are read.
    text.text_part_of = config.model_type
    return text


def has_text_part(config: PretrainedConfig) -> bool:
    """Return whether a configuration from `text_config` is that of a part of a model."""
    return hasattr(config, "text_part_of")


def _plain_config(text: PretrainedConfig, plain_type: str) -> PretrainedConfig:
    settings = text.to_dict()
    for key in ("model_type", "transformers_version", "architectures"):
        settings.pop(key, None)
    rope = dict(settings.get("rope_parameters") or {})
    for key in _ROTATION_OF_IMAGES:
        rope.pop(key, None)
    settings["rope_parameters"] = rope
    if plain_type == "qwen3_moe":
        # Its router always normalizes, and has no key for this.
        settings["norm_topk_prob"] = True
    return AutoConfig.for_model(plain_type, **settings)


def text_tensors(tensors: Tensors, config: PretrainedConfig) -> Tensors:
    """Return the tensors of the text part by the names that a plain language model has for them.

    Args:
        tensors: All tensors of the checkpoint.
        config: What `text_config` returned.
    """
    of_text: Tensors = {}
    for name, tensor in tensors.items():
        if is_other_part(name):
            continue
        for pattern, replacement in KEY_MAPPING.items():
            renamed, count = re.subn(pattern, replacement, name)
            if count:
                name = renamed
                break
        experts = _FUSED_EXPERTS.search(name)
        if config.model_type == "qwen3_moe" and experts is not None:
            hidden, inner = config.hidden_size, config.moe_intermediate_size
            expected = (2 * inner, hidden) if experts[1] == "gate_up_proj" else (hidden, inner)
            if tensor.shape[1:] != expected:
                tensor = _transposed(tensor)
        of_text[name] = tensor
    return of_text


def _transposed(tensor: Tensor) -> Tensor:
    """Return a tensor [experts, inputs, outputs] as [experts, outputs, inputs]."""
    experts, inputs, outputs = tensor.shape

    def read() -> torch.Tensor:
        return tensor.read().transpose(1, 2).contiguous()

    return Tensor(tensor.name, (experts, outputs, inputs), tensor.dtype, read)
