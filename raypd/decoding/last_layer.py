"""A model's last layer computes its MLP only for the tokens whose predictions are wanted.

Of the others a pass needs the keys and values alone: of a document, most tokens. What comes after the layer, the final
norm and the output embeddings, then sees no others, either.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel

# Their layers are attention and MLP one after the other, each with a norm before it, added to what came in.
PLAIN = {f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mistral", "qwen2", "qwen3")}


def shorten(model: PreTrainedModel) -> bool:
    """Changes the last layer of a model of a plain family, in place.

    Returns:
        Whether the model, called with a `Step`, now gives logits for `Step.kept` alone.
    """
    layers: list[Any] = [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]
    if not layers or type(layers[-1]).__module__ not in PLAIN:
        return False
    layers[-1].forward = MethodType(_forward, layers[-1])
    return True


def _forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """[1, tokens, hidden size] -> [1, kept tokens, hidden size]; of a call without a pass of the engine, all tokens."""
    kept = kwargs["step"].kept if "step" in kwargs else slice(None)
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    hidden_states = (hidden_states + attended)[:, kept]
    if not hidden_states.shape[1]:  # the MLP has nothing to do
        return hidden_states
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
