"""What training changes in the layers of a model, so that a pass is computed as in decoding.

Attention follows the layout of the pass, recurrent layers follow its chains, and the routers of a
mixture of experts choose as they do in decoding.
"""

from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

import raypd.training.attention as attention
from raypd.decoding import CurrentPass, GradientPass, replace_recurrent_layers

# What a router or a block with experts is called in a transformers layer.
_ROUTERS = ("gate", "router")
_EXPERTS = "experts"
# Attributes of modules whose noise in training changes what routers choose.
_NOISES = ("router_jitter_noise", "input_jitter_noise", "jitter_noise")


def use_training_layers(model: PreTrainedModel, keeps_routers: bool) -> None:
    """Change a model in place. Called without a layout, it computes as before.

    Args:
        model: The model.
        keeps_routers: Whether routers are not trained. If so, they choose without the noise that
            some have in training.
    """
    AttentionInterface.register(attention.NAME, attention.attention)
    model.set_attn_implementation(attention.NAME)
    routers: list[torch.nn.Module] = []
    if keeps_routers:
        routers = list(routers_of(model).values())
        for module in model.modules():
            for name in _NOISES:
                # Phi-MoE's router has a threshold of the same name, which is not noise.
                if hasattr(module, name) and module not in routers:
                    setattr(module, name, 0.0)
    current = CurrentPass()
    mixers = replace_recurrent_layers(model, current)
    shapes = [mixer.state for mixer in mixers]

    def before(_: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        for router in routers:
            router.eval()
        layout = named.get("layout")
        current.work = None
        if layout is not None and mixers:
            device = layout.positions.device
            current.work = GradientPass(layout.runs, layout.tokens, device, shapes)

    # An adapter calls the model's `forward` without its hooks, but that calls the decoder's.
    model.base_model.register_forward_pre_hook(before, with_kwargs=True)


def routers_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return what chooses the experts of each layer, by its name in the model."""
    routers: dict[str, torch.nn.Module] = {}
    for block_name, block in model.named_modules():
        if not hasattr(block, _EXPERTS):
            continue
        for name in _ROUTERS:
            router = getattr(block, name, None)
            if isinstance(router, torch.nn.Module):
                routers[f"{block_name}.{name}"] = router
    return routers


def expert_parameters(model: torch.nn.Module) -> set[str]:
    """Return the names of experts' matrices, from `experts` on, such as "experts.down_proj".

    Those of all experts of a layer are one parameter of three dimensions.
    """
    names: set[str] = set()
    for module_name, module in model.named_modules():
        if module_name.rpartition(".")[2] != _EXPERTS:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3:
                names.add(f"{_EXPERTS}.{name}")
    return names


def experts_per_token(model: torch.nn.Module) -> int:
    """Return how many experts compute each token; 1 for a model that does not say."""
    for router_name, router in routers_of(model).items():
        block = model.get_submodule(router_name.rpartition(".")[0])
        for module in (router, block):
            count = getattr(module, "top_k", None)
            if isinstance(count, int):
                return count
    return 1
