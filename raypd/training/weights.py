"""Which weights are trained and written.

These are all weights of a model, LoRA matrices, or Medusa heads on a frozen model.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel, set_seed
from transformers.modeling_outputs import CausalLMOutput

import raypd.training.attention as attention
from raypd.config import RunConfig
from raypd.decoding import REGISTRY, MedusaHeads
from raypd.errors import ModelError
from raypd.models import (
    CONTROL_TOKENS,
    LoadedModel,
    find_source,
    load_heads,
    load_model,
    load_tokenizer,
    quiet,
    read_config,
    save_heads,
    untrainable,
)


def load_for_training(config: RunConfig) -> LoadedModel:
    """Load the model that is trained, with gradients for the weights that change.

    Args:
        config: The configuration.

    Returns:
        For `training.weights: full`, the model in float32 with model.adapter merged; otherwise the
        model without the adapter, and with new LoRA matrices or Medusa heads.

    Raises:
        ModelError: If the model cannot be loaded or trained.
        UserError: Whatever else `load_model` raises.
    """
    set_seed(config.training.seed)  # which draws the LoRA matrices
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
    changes: dict[str, Any] = {"dtype": "float32"} if full else {"adapter": None}
    loaded = load_model(config.model.model_copy(update=changes), purpose="train")
    _check_attention(loaded.model, loaded.name)
    make_trainable(loaded, config)
    return loaded


def make_trainable(loaded: LoadedModel, config: RunConfig) -> None:
    """Replace a model's attention by that of training passes, and enable gradients.

    Args:
        loaded: The model, which is changed in place or replaced.
        config: The configuration, which says which weights are trained.
    """
    AttentionInterface.register(attention.NAME, attention.attention)
    loaded.model.set_attn_implementation(attention.NAME)
    if REGISTRY[config.decoding.method].heads:
        heads = load_heads(str(config.decoding.heads), loaded.model)
        loaded.model = HeadsOnModel(loaded.model, heads)
        return
    if config.training.weights == "full":
        loaded.model.requires_grad_(True)
    else:
        loaded.model = _with_lora(loaded, config)
    if config.training.trainer.get("gradient_checkpointing"):
        loaded.model.gradient_checkpointing_enable({"use_reentrant": False})
        loaded.model.enable_input_require_grads()


def _with_lora(loaded: LoadedModel, config: RunConfig) -> Any:
    """Return a model with LoRA matrices on all linear layers and on its control tokens."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    training = config.training
    model = loaded.model
    if config.model.quantization != "none":
        model = prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=training.trainer.get("gradient_checkpointing", False)
        )
        # In evaluation mode bitsandbytes packs weights for a CPU; packed ones have no gradients.
        for module in model.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
                module.state_dict()  # unpacks the weight
    vocabulary = loaded.tokenizer.get_vocab()
    control = [
        vocabulary[name]
        for name in CONTROL_TOKENS.get(config.decoding.method, ())
        if name in vocabulary
    ]
    lora = LoraConfig(
        r=training.lora_options.rank,
        lora_alpha=training.lora_options.alpha,
        lora_dropout=training.lora_options.dropout,
        target_modules="all-linear",
        trainable_token_indices=control or None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=config.model.name,
    )
    return get_peft_model(model, lora)


def _check_attention(model: PreTrainedModel, name: str) -> None:
    """Raise ModelError for a model whose attention training does not compute."""
    feature = untrainable(model.config.get_text_config())
    if feature is not None:
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
        """Compute the logits of every head.

        Args:
            input_ids: [1, tokens].
            logits_to_keep: [targets], the indices at which the heads predict.
            **named: Whatever else the model's forward pass takes.

        Returns:
            Logits [1, heads * targets, vocabulary].
        """
        with torch.no_grad():
            states = self.model.base_model(input_ids=input_ids, **named).last_hidden_state
            hidden = states[0, logits_to_keep]
        return CausalLMOutput(logits=self.heads(hidden).flatten(0, 1)[None])

    def state_dict(self, *args: Any, **named: Any) -> Any:
        return self.heads.state_dict(*args, **named)

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return self.heads.load_state_dict(state, strict, assign)


def kind_of_weights(config: RunConfig) -> str:
    """Return the name of the folder of weights: "adapter", "heads" or "model"."""
    if REGISTRY[config.decoding.method].heads:
        return "heads"
    return "adapter" if config.training.weights == "lora" else "model"


def export(config: RunConfig, checkpoint: Path, target: Path) -> None:
    """Write the weights of a checkpoint in the dtype of the base model.

    Args:
        config: The configuration of the training.
        checkpoint: The folder that Trainer wrote.
        target: A new folder, which gets an adapter, heads or a whole model.
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
        converted = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        save_file(converted, target / "adapter_model.safetensors")
    else:
        with quiet():
            AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).save_pretrained(target)
        load_tokenizer(config.model).save_pretrained(target)
