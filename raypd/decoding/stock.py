"""Models of other families than Llama's: transformers' own, unmodified but for the attention
function.
"""

from contextlib import nullcontext

import torch
from transformers import AttentionInterface, PreTrainedModel

from raypd.decoding.attention.kernels import NAME, attention
from raypd.decoding.attention.step import Step


class Stock(torch.nn.Module):
    """A model of transformers, which is not to be called otherwise afterwards."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        AttentionInterface.register(NAME, attention)
        model.set_attn_implementation(NAME)
        self.model, self.config, self.head = model, model.config, model.get_output_embeddings()

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        step: Step,
        full: int | None = None,
        want_hidden: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `Llama.forward`; last hidden states are there if they are wanted."""
        hidden: list[torch.Tensor] = []

        def read(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
            hidden.append(inputs[0][0])
            return inputs[0][:, :full]

        with self.head.register_forward_pre_hook(read) if want_hidden else nullcontext():
            output = self.model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=step.kept,
                step=step,
            )
        return output.logits[0], hidden[0] if hidden else None
