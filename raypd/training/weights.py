"""Which weights are trained and written.

These are all weights of a model, LoRA matrices, or Medusa heads on a frozen model.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed
from transformers.modeling_outputs import CausalLMOutput

from raypd.config import RunConfig
from raypd.decoding import REGISTRY, MedusaHeads
from raypd.errors import ModelError
from raypd.models import (
    LoadedModel,
    check_model_config,
    check_recurrence,
    find_source,
    load_heads,
    load_model,
    load_tokenizer,
    quiet,
    read_config,
    save_heads,
)
from raypd.training.layers import expert_parameters, routers_of, use_training_layers
from raypd.training.lora import with_lora


def check_weights(config: RunConfig) -> None:
    """Check in the driver that the weights of a model can be trained, without any weights.

    Args:
        config: The configuration.

    Raises:
        ModelError: If they cannot. The message names the family and what to do.
    """
    _check_quantization(config)
    check_model_config(config.model, machine=False)
    check_recurrence(config.model, config.decoding, config.task.kind)
    trains_lora = config.training.weights == "lora" and not REGISTRY[config.decoding.method].heads
    if trains_lora and config.training.lora_options.dropout:
        _check_dropout(config)


def _check_quantization(config: RunConfig) -> None:
    """Raise ModelError if quantized weights are to be trained in a way that cannot be."""
    quantization = config.model.quantization
    if _is_full(config) and quantization != "none":
        raise ModelError(
            "training.weights full: quantized weights cannot be trained; use lora, or "
            "quantization none"
        )
    if quantization in ("w8a8", "fp8"):
        raise ModelError(
            f"model.quantization {quantization} is for decoding: train with none, or nf4 or "
            "int8 and lora"
        )


def _is_full(config: RunConfig) -> bool:
    """Return whether all weights of the model are trained."""
    return config.training.weights == "full" and not REGISTRY[config.decoding.method].heads


def _check_dropout(config: RunConfig) -> None:
    """Raise ModelError for dropout in a mixture of experts, where LoRA does not support it."""
    source = find_source(config.model)
    base = read_config(source)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(base, trust_remote_code=source.trust_remote_code)
    if expert_parameters(empty):
        raise ModelError(
            f"training.lora.dropout {config.training.lora_options.dropout:g}: model "
            f"{config.model.name!r} ({base.model_type}) is a mixture of experts, and peft has no "
            "dropout for the matrices of experts; set training.lora.dropout to 0"
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
    _check_quantization(config)
    set_seed(config.training.seed)  # which draws the LoRA matrices
    changes: dict[str, Any] = {"adapter": None}
    if _is_full(config):
        changes = {"dtype": "float32"}
    loaded = load_model(config.model.model_copy(update=changes), purpose="train")
    make_trainable(loaded, config)
    return loaded


def make_trainable(loaded: LoadedModel, config: RunConfig) -> None:
    """Prepare a model for training passes, and enable gradients.

    Args:
        loaded: The model, which is changed in place or replaced.
        config: The configuration, which says which weights are trained.
    """
    use_training_layers(loaded.model, keeps_routers=not config.training.train_routers)
    if REGISTRY[config.decoding.method].heads:
        heads = load_heads(str(config.decoding.heads), loaded.model)
        loaded.model = HeadsOnModel(loaded.model, heads)
        return
    if config.training.weights == "full":
        loaded.model.requires_grad_(True)
        if not config.training.train_routers:
            for router in routers_of(loaded.model).values():
                router.requires_grad_(False)
    else:
        loaded.model = with_lora(loaded, config)
    if config.training.trainer.get("gradient_checkpointing"):
        loaded.model.gradient_checkpointing_enable({"use_reentrant": False})
        loaded.model.enable_input_require_grads()


class HeadsOnModel(torch.nn.Module):
    """A model of which only the Medusa heads are trained and saved (APAR, appendix A.2)."""

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
