"""Medusa heads on a frozen model (APAR, appendix A.2): head d learns the token d further along the path of a text."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from raypd.decoding.methods.medusa import MedusaHeads


class HeadsOnModel(torch.nn.Module):
    """A model whose heads alone are trained and saved; its logits are those of the heads, one head after the other."""

    def __init__(self, model: PreTrainedModel, heads: MedusaHeads) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        self.heads = heads.float().requires_grad_(True)
        self.config = model.config

    def forward(self, input_ids: torch.Tensor, logits_to_keep: torch.Tensor, **named: Any) -> CausalLMOutput:
        """input_ids: [1, tokens]; logits_to_keep: [targets]. Logits [1, heads * targets, vocabulary]."""
        with torch.no_grad():
            hidden = self.model.base_model(input_ids=input_ids, **named).last_hidden_state[0, logits_to_keep]
        return CausalLMOutput(logits=self.heads(hidden).flatten(0, 1)[None])

    def state_dict(self, *args: Any, **named: Any) -> Any:
        """The weights of the heads alone."""
        return self.heads.state_dict(*args, **named)

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads the weights of the heads alone."""
        return self.heads.load_state_dict(state, strict, assign)
