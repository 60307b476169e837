"""The recurrent and convolution layers of transformers, by module class."""

from typing import Any

import torch

from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.recurrent import Recurrence
from raypd.decoding.layers.sources import Linears, RecurrentSource

# Gated delta nets with four projections, and with two.
_DELTA = {"Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"}
_DELTA_NEXT = {"Qwen3NextGatedDeltaNet"}
_MAMBA2 = {
    "BambaMixer",
    "FalconH1Mixer",
    "GraniteMoeHybridMambaLayer",
    "NemotronHMamba2Mixer",
}
_CONVOLUTIONS = {"Lfm2ShortConv", "Lfm2MoeShortConv"}
_ALL = _DELTA | _DELTA_NEXT | _MAMBA2 | _CONVOLUTIONS


def is_recurrent(module: torch.nn.Module) -> bool:
    """Return whether a transformers module is a recurrent or convolution layer."""
    kind = type(module)
    return kind.__module__.startswith("transformers.models.") and kind.__name__ in _ALL


def build_recurrence(module: Any, builder: Builder) -> Recurrence:
    """Build a recurrent or convolution layer, up to its output product.

    Args:
        module: The transformers module.
        builder: Builds the part.
    """
    name = type(module).__name__
    if name in _DELTA:
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        return builder.gated_delta(RecurrentSource(module, Linears(module, *names)))
    if name in _DELTA_NEXT:
        linears = Linears(module, "in_proj_qkvz", "in_proj_ba")
        return builder.gated_delta(RecurrentSource(module, linears, _order_by_kind(module)))
    source = RecurrentSource(module, Linears(module, "in_proj"))
    if name in _CONVOLUTIONS:
        return builder.short_convolution(source)
    assert name in _MAMBA2
    if hasattr(module, "mup_vector"):
        # Falcon-H1 scales the inputs and the outputs.
        source.input_factor = float(module.ssm_in_multiplier)
        source.factors = module.mup_vector.detach().flatten()
    return builder.mamba2(source)


def _order_by_kind(module: Any) -> torch.Tensor:
    """Return the order of Qwen3-Next's projections in which those of the same kind are contiguous.

    The original order is by key head: queries, keys, values, gates; then the rates of writing and
    of forgetting.
    """
    key_heads = module.num_k_heads
    repeat = module.num_v_heads // key_heads
    value_size = repeat * module.head_v_dim
    first = _regrouped(key_heads, [module.head_k_dim, module.head_k_dim, value_size, value_size])
    second = _regrouped(key_heads, [repeat, repeat])
    return torch.cat([first, second + len(first)])


def _regrouped(groups: int, sizes: list[int]) -> torch.Tensor:
    """Return the order in which parts with the same index in each group are contiguous.

    Args:
        groups: The number of groups.
        sizes: The sizes of the parts of a group.
    """
    numbers = torch.arange(groups * sum(sizes)).view(groups, -1)
    return torch.cat([part.flatten() for part in numbers.split(sizes, 1)])
