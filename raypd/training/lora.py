"""LoRA on all linear layers of a model, on the experts of a mixture, and on control tokens."""

from typing import Any

import torch
from transformers import PreTrainedModel

from raypd.config import RunConfig
from raypd.models import CONTROL_TOKENS, LoadedModel, experts_are_parameters
from raypd.training.layers import expert_parameters, experts_per_token, routers_of

# The experts of a mixture had linear layers of these names in transformers 4. For many mixtures,
# peft takes every target with such a name for an expert, and then leaves out linear layers with
# that name outside the experts.
_EARLIER_EXPERTS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


def with_lora(loaded: LoadedModel, config: RunConfig) -> Any:
    """Return a model with LoRA matrices. The model itself is changed.

    Args:
        loaded: The model.
        config: The configuration, whose section `training` has the settings.
    """
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    training = config.training
    model: Any = loaded.model
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
        trainable_token_indices=control or None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=config.model.name,
        **_targets(model, config),
    )
    with experts_are_parameters():
        return get_peft_model(model, lora)


def _targets(model: PreTrainedModel, config: RunConfig) -> dict[str, Any]:
    """Return the peft settings that say which modules get matrices, and of which rank."""
    experts = expert_parameters(model)
    if experts:
        return _targets_of_mixture(model, config, experts)
    fields: dict[str, Any] = {"target_modules": "all-linear"}
    if not config.training.train_routers:
        # Here experts are linear layers, as routers may be.
        fields["exclude_modules"] = sorted(routers_of(model)) or None
    return fields


def _targets_of_mixture(
    model: PreTrainedModel, config: RunConfig, experts: set[str]
) -> dict[str, Any]:
    """Return the same for a mixture whose experts are parameters of three dimensions.

    An expert sees few of the tokens. The experts of a token have as many matrices together as a
    linear layer has: the rank of each is that of a layer divided by the experts of a token.
    """
    routers = routers_of(model)
    modules: set[str] = set()
    parameters = set(experts)
    for name, module in model.named_modules():
        is_output = module is model.get_output_embeddings()
        if not isinstance(module, torch.nn.Linear) or is_output or name in routers:
            continue
        parent, _, leaf = name.rpartition(".")
        if leaf in _EARLIER_EXPERTS:
            parameters.add(f"{parent.rpartition('.')[2]}.{leaf}.weight")
        else:
            modules.add(leaf)
    if config.training.train_routers:
        parameters |= {f"{name}.weight" for name in routers}
    options = config.training.lora_options
    rank = max(1, options.rank // experts_per_token(model))
    return {
        "target_modules": sorted(modules),
        "target_parameters": sorted(parameters),
        "rank_pattern": dict.fromkeys(sorted(experts), rank),
        # The product of two matrices has the same factor, alpha / rank, as in other layers.
        "alpha_pattern": dict.fromkeys(sorted(experts), options.alpha * rank / options.rank),
    }
