"""Models of no registered family: transformers' own, with only the attention function replaced."""

import torch
from transformers import AttentionInterface, PreTrainedModel

from raypd.decoding.attention.kernels import NAME, attention
from raypd.decoding.attention.step import Step
from raypd.decoding.layers.recurrent import Recurrence


class Stock(torch.nn.Module):
    """A transformers model, which must be called only through this object from now on."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        AttentionInterface.register(NAME, attention)
        model.set_attn_implementation(NAME)
        self.model = model
        self.config = model.config
        self.head = model.get_output_embeddings()
        self.recurrences: list[Recurrence] = []

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        step: Step,
        full_count: int | None = None,
        want_hidden: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute as `DecoderModel.forward` does, but return hidden states only if wanted."""
        if not want_hidden:
            return self._logits(ids, positions, step), None
        hidden: list[torch.Tensor] = []

        def read_inputs(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
            # The output embeddings read the last hidden states, [1, samples, hidden size].
            hidden.append(inputs[0][0])
            return inputs[0][:, :full_count]

        with self.head.register_forward_pre_hook(read_inputs):
            logits = self._logits(ids, positions, step)
        return logits, hidden[0]

    def _logits(self, ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        output = self.model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=step.sample_rows,
            step=step,
        )
        return output.logits[0]
