"""Count the sizes of a model from its configuration, without its weights.

The transformers model is built on the meta device, which holds only shapes. Its weights are counted
there, and one forward pass of a few tokens records the attention of each layer, so nothing has to
be known about the family.
"""

import copy
from collections import Counter
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from raypd.decoding.models.hybrid import Hybrid, is_hybrid
from raypd.decoding.models.registry import find_family
from raypd.decoding.sizes import AttentionSizes, ModelSizes

# The name under which the function that records attention is registered with transformers.
_RECORDER = "raypd_recorder"
# The number of tokens of the forward pass that records attention.
_TOKENS = 4
# Configuration keys for the number of routed experts that a token goes through.
_ACTIVE_EXPERTS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
    "top_k_experts",
)
# The number of kernels that the engine launches per layer: in a family, in a family with experts,
# and in a model that is computed by transformers' own layers. tests/decoding/test_gpu_counts.py
# counts the first two.
_LAUNCHES = 12
_EXPERT_LAUNCHES = 20
_STOCK_LAUNCHES = 40


def model_sizes(config: PretrainedConfig) -> ModelSizes:
    """Return the sizes of the model that a configuration describes.

    Args:
        config: A transformers configuration. For a model that also reads images or sound, only the
            text part counts.

    Raises:
        ValueError: If transformers has no causal language model for it, or its layers cannot be
            counted.
    """
    # The model's attention is changed below, which also changes its configuration.
    text_config = copy.deepcopy(config.get_text_config())
    kind = text_config.model_type
    if type(text_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"transformers has no causal language model of type {kind}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text_config, dtype=torch.bfloat16)
    try:
        return sizes_of(model)
    except (RuntimeError, NotImplementedError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"the layers of model type {kind} cannot be counted: {error}") from error


@torch.inference_mode()
def sizes_of(model: PreTrainedModel) -> ModelSizes:
    """Return the sizes of a model on the meta device, which must not be used afterwards.

    Args:
        model: A transformers model whose weights have only shapes.

    Raises:
        ValueError: If its layers cannot be found.
    """
    config = model.config.get_text_config()
    layers = _layers(model, config.num_hidden_layers)
    experts = [module for module in layers.modules() if _is_experts(module)]
    expert_ids = {id(weight) for module in experts for weight in module.parameters()}
    expert_weights = 0
    dense_weights = 0
    for weight in layers.parameters():
        if id(weight) in expert_ids:
            expert_weights += weight.numel()
        elif weight.dim() > 1:
            dense_weights += weight.numel()
    head = model.get_output_embeddings()
    is_family = find_family(model) is not None
    launches = _STOCK_LAUNCHES
    if is_family:
        launches = _EXPERT_LAUNCHES if experts else _LAUNCHES
    attention = _attention(model, experts, is_family)
    state_bytes = 0
    if is_hybrid(model):
        state_bytes = sum(part.state.nbytes for part in Hybrid(model).recurrences)
    return ModelSizes(
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        weights=sum(weight.numel() for weight in model.parameters()),
        dense_weights=dense_weights,
        head_weights=head.weight.numel(),
        attention=attention,
        expert_weights=expert_weights,
        experts=_expert_count(experts[0]) if experts else 0,
        experts_per_token=_active_experts(config) if experts else 0,
        state_bytes=state_bytes,
        launches=launches,
    )


def _layers(model: PreTrainedModel, count: int) -> torch.nn.ModuleList:
    """Return the list of a model's layers."""
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"{type(model).__name__} has no list of {count} layers")


def _is_experts(module: torch.nn.Module) -> bool:
    """Return whether a module holds the routed experts of a layer in sequence."""
    if not type(module).__name__.endswith("Experts"):
        return False
    return any(weight.dim() == 3 for weight in module.parameters(recurse=False))


def _expert_count(module: torch.nn.Module) -> int:
    return max(len(weight) for weight in module.parameters() if weight.dim() == 3)


def _active_experts(config: Any) -> int:
    for key in _ACTIVE_EXPERTS:
        count = getattr(config, key, None)
        if isinstance(count, (list, tuple)):
            count = max(count)
        if count:
            return int(count)
    raise ValueError(f"{config.model_type} does not say how many experts a token goes through")


def _attention(
    model: PreTrainedModel, experts: list[torch.nn.Module], is_family: bool
) -> tuple[AttentionSizes, ...]:
    """Return the attention of all layers, recorded in a forward pass over a few tokens."""
    recorded: Counter[AttentionSizes] = Counter()

    def record(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        sliding_window: int | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        heads = query.shape[1]
        value_dim = value.shape[3]
        sizes = AttentionSizes(1, heads, key.shape[1], key.shape[3], value_dim, sliding_window)
        if is_family:
            sizes = _as_a_family(module, sizes)
        recorded[sizes] += 1
        return query.new_zeros(1, query.shape[2], heads, value_dim), None

    def skip(module: torch.nn.Module, hidden: torch.Tensor, *_: object, **__: object) -> Any:
        # What experts compute depends on values, which the meta device does not have.
        return hidden

    for module in experts:
        module.forward = MethodType(skip, module)
    AttentionInterface.register(_RECORDER, record)
    model.set_attn_implementation(_RECORDER)
    ids = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    positions = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    model.eval()(input_ids=ids, position_ids=positions, use_cache=False)
    return tuple(replace(sizes, layers=layers) for sizes, layers in recorded.items())


def _as_a_family(module: Any, sizes: AttentionSizes) -> AttentionSizes:
    """Return the sizes of a transformers attention module as the families compute it."""
    if getattr(module, "is_kv_shared_layer", False):
        # It reads the keys and values of an earlier layer.
        return replace(sizes, cached_dim=0)
    latent_dim = getattr(module, "kv_lora_rank", None)
    if latent_dim is None:
        return sizes
    # Queries attend to the latents, which the cache holds together with a rotated key.
    key_dim = latent_dim + module.qk_rope_head_dim
    return replace(sizes, kv_heads=1, key_dim=key_dim, value_dim=latent_dim, cached_dim=key_dim)
