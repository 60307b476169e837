"""Which weights are trained and written: all of a model, LoRA matrices, or Medusa heads on a frozen
model.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel, set_seed
from transformers.modeling_outputs import CausalLMOutput

from raypd.config import RunConfig
from raypd.decoding.methods.medusa import MedusaHeads
from raypd.decoding.methods.registry import REGISTRY
from raypd.errors import ModelError
from raypd.models.control_tokens import CONTROL_TOKENS
from raypd.models.embedded import quiet
from raypd.models.load import LoadedModel, load_model, load_tokenizer
from raypd.models.medusa_heads import load_heads, save_heads
from raypd.models.source import find_source, read_config
from raypd.training import attention


def load_for_training(config: RunConfig) -> LoadedModel:
    """The model in float32 with model.adapter merged, or without it and with LoRA.

    Raises as `load_model`.
    """
    set_seed(config.training.seed)  # LoRA matrices are drawn
    full = config.training.weights == "full" and not REGISTRY[config.decoding.method].heads
    quantization = config.model.quantization
    if full and quantization != "none":
        raise ModelError(
            "training.weights full: quantized weights cannot be trained; use lora, or "
            "quantization none"
        )
    if quantization in ("w8a8", "fp8"):
        raise ModelError(
            f"model.quantization {quantization} is for decoding: train with none, or nf4 or "
            "int8 and lora"
        )
    loaded = load_model(
        config.model.model_copy(update={"dtype": "float32"} if full else {"adapter": None}),
        purpose="train",
    )
    _check_attention(loaded.model, loaded.name)
    make_trainable(loaded, config)
    return loaded


def make_trainable(loaded: LoadedModel, config: RunConfig) -> None:
    """Gives a loaded model the attention of training passes, and gradients to the weights that are
    trained.
    """
    AttentionInterface.register(attention.NAME, attention.attention)
    loaded.model.set_attn_implementation(attention.NAME)
    if REGISTRY[config.decoding.method].heads:
        loaded.model = HeadsOnModel(
            loaded.model, load_heads(str(config.decoding.heads), loaded.model)
        )
        return
    if config.training.weights == "full":
        loaded.model.requires_grad_(True)
    else:
        loaded.model = _with_lora(loaded, config)
    if config.training.gradient_checkpointing:
        loaded.model.gradient_checkpointing_enable({"use_reentrant": False})
        loaded.model.enable_input_require_grads()


def _with_lora(loaded: LoadedModel, config: RunConfig) -> Any:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    training, model = config.training, loaded.model
    if config.model.quantization != "none":
        model = prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=training.gradient_checkpointing
        )
        # What bitsandbytes packs for a CPU, in evaluation, has no gradients.
        for module in model.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
                module.state_dict()  # which unpacks the weight
    vocabulary = loaded.tokenizer.get_vocab()
    control = [
        vocabulary[name]
        for name in CONTROL_TOKENS.get(config.decoding.method, ())
        if name in vocabulary
    ]
    lora = LoraConfig(
        r=training.lora_rank,
        lora_alpha=training.lora_alpha,
        lora_dropout=training.lora_dropout,
        target_modules="all-linear",
        trainable_token_indices=control or None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=config.model.name,
    )
    return get_peft_model(model, lora)


def _check_attention(model: PreTrainedModel, name: str) -> None:
    text = model.config.get_text_config()
    layers = getattr(text, "layer_types", None)
    windows = (
        "sliding_attention" in layers if layers else bool(getattr(text, "sliding_window", None))
    )
    feature = (
        "layers with sliding-window attention"
        if windows and getattr(text, "use_sliding_window", True)
        else ""
    )
    if getattr(text, "attn_logit_softcapping", None) is not None:
        feature = "a soft cap on attention logits"
    if feature:
        raise ModelError(f"model {name!r} has {feature}: raypd decodes it, but cannot train it yet")


class HeadsOnModel(torch.nn.Module):
    """A model whose Medusa heads alone are trained and saved (APAR, appendix A.2)."""

    def __init__(self, model: PreTrainedModel, heads: MedusaHeads) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        self.heads = heads.float().requires_grad_(True)
        self.config = model.config

    def forward(
        self, input_ids: torch.Tensor, logits_to_keep: torch.Tensor, **named: Any
    ) -> CausalLMOutput:
        """input_ids: [1, tokens]; logits_to_keep: [targets]. Logits of each head [1, heads *
        targets, vocabulary].
        """
        with torch.no_grad():
            hidden = self.model.base_model(input_ids=input_ids, **named).last_hidden_state[
                0, logits_to_keep
            ]
        return CausalLMOutput(logits=self.heads(hidden).flatten(0, 1)[None])

    def state_dict(self, *args: Any, **named: Any) -> Any:
        return self.heads.state_dict(*args, **named)

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return self.heads.load_state_dict(state, strict, assign)


def kind_of_weights(config: RunConfig) -> str:
    """The folder's name of what is trained."""
    if REGISTRY[config.decoding.method].heads:
        return "heads"
    return "adapter" if config.training.weights == "lora" else "model"


def export(config: RunConfig, checkpoint: Path, target: Path) -> None:
    """Writes the weights of a checkpoint in the dtype of the base model: adapter, heads or a whole
    model.
    """
    kind = kind_of_weights(config)
    dtype = getattr(read_config(find_source(config.model)), "dtype", None) or torch.float32
    if kind == "heads":
        heads = load_heads(str(config.decoding.heads))
        heads.load_state_dict(load_file(checkpoint / "model.safetensors"))
        save_heads(heads.to(dtype), target)
    elif kind == "adapter":
        target.mkdir()
        shutil.copy(checkpoint / "adapter_config.json", target)
        tensors = load_file(checkpoint / "adapter_model.safetensors")
        save_file(
            {name: tensor.to(dtype) for name, tensor in tensors.items()},
            target / "adapter_model.safetensors",
        )
    else:
        with quiet():
            AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).save_pretrained(target)
        load_tokenizer(config.model).save_pretrained(target)
