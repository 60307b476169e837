"""What configurations say about recurrent layers, and hybrids that belong to no registered family.

The latter are, for example, transformers models with an adapter that is not merged. Everything
except their attention function and their recurrent layers is left to transformers.
"""

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from raypd.decoding.attention.step import Step
from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.recurrent import Projection, Recurrence
from raypd.decoding.models.recurrences import build_recurrence, is_recurrent
from raypd.decoding.models.registry import FAMILIES
from raypd.decoding.models.stock import Stock
from raypd.decoding.recurrence.plan import RecurrentPass

# The transformers classes with recurrent layers, and the types of layers that each has besides
# attention.
HYBRIDS: dict[str, frozenset[str]] = {
    name: family.layer_types for family in FAMILIES for name in family.classes if family.layer_types
}
# A layer of type "hybrid" has both attention and a recurrence.
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "hybrid"})
_RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "hybrid"})


def is_hybrid(model: torch.nn.Module) -> bool:
    """Return whether a model has recurrent layers that `Hybrid` computes."""
    return any(is_recurrent(module) for module in model.modules())


def has_recurrent_layers(config: PretrainedConfig) -> bool:
    """Return whether a configuration is of a model with recurrent or convolution layers."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    return bool(kinds & _RECURRENT_LAYERS)


def unknown_layers(config: PretrainedConfig, class_name: str) -> list[str]:
    """Return the types of a model's layers that no engine of raypd can compute.

    Args:
        config: The model's configuration.
        class_name: The model's class in transformers.
    """
    known = (_ATTENTION_LAYERS - {"hybrid"}) | HYBRIDS.get(class_name, frozenset())
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    return sorted(kinds - known)


def attention_layers(config: PretrainedConfig) -> list[int]:
    """Return the indices of the layers with attention."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    return [number for number, kind in enumerate(kinds) if kind in _ATTENTION_LAYERS]


class CurrentPass:
    """The pass that a model is computing, if an engine or a training run called it."""

    work: RecurrentPass | None = None


class _LateProjection(torch.nn.Module):
    """The layers that read the hidden states, looked up in the module at each call.

    This is because an adapter may replace them later.
    """

    def __init__(self, module: Any, names: tuple[str, ...], order: torch.Tensor | None) -> None:
        super().__init__()
        # Inside a list, the module does not become a submodule of this one.
        self._owner = [module]
        self.names = names
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden size] -> [tokens, outputs]"""
        parts = [getattr(self._owner[0], name)(x) for name in self.names]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return joined if self.order is None else joined[:, self.order.to(x.device)]


class ReplacedForward:
    """Replaces the `forward` of a recurrent transformers layer."""

    def __init__(self, module: Any, part: Recurrence, current: CurrentPass) -> None:
        """
        Args:
            module: The transformers module.
            part: Computes the layer up to its output product.
            current: The pass that the model is computing.
        """
        self.module = module
        self.part = part
        self.current = current
        self.alone = module.forward
        if isinstance(module.forward, ReplacedForward):
            # An engine or a training run used the model before.
            self.alone = module.forward.alone

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        """Compute the layer over a pass, or as transformers does outside of one."""
        work = self.current.work
        if work is None:
            out: torch.Tensor = self.alone(hidden_states, *args, **named)
            return out
        mixed: torch.Tensor = self.module.out_proj(self.part.over(hidden_states[0], work))
        return mixed[None]


def replace_recurrent_layers(model: torch.nn.Module, current: CurrentPass) -> list[Recurrence]:
    """Make the recurrent layers of a model follow the runs of a pass.

    Args:
        model: A transformers model, which is changed in place.
        current: Is given the pass before the model is called.

    Returns:
        The parts that compute each of the layers up to its output product.
    """
    builder = Builder()
    for module in list(model.modules()):
        if not is_recurrent(module):
            continue
        part = build_recurrence(module, builder)
        assert isinstance(part.projection, Projection)
        part.projection = _LateProjection(module, part.projection.names, part.projection.order)
        replacement: Any = ReplacedForward(module, part, current)
        module.forward = replacement
    return builder.recurrences


class Hybrid(Stock):
    """A transformers model with recurrent layers, which must be called only through this object."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.current = CurrentPass()
        self.recurrences = replace_recurrent_layers(model, self.current)

    def _logits(self, ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        self.current.work = step.recurrence
        try:
            return super()._logits(ids, positions, step)
        finally:
            self.current.work = None
