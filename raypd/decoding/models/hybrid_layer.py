"""A layer with attention or a recurrence, whose MLP reads a second norm.

hidden += output(attention or recurrence(norm(hidden)))
hidden += mlp(norm(hidden))
"""

from typing import Any

import torch

from raypd.decoding.attention.step import Step
from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.recurrent import Recurrence
from raypd.decoding.layers.sources import Linears, Rope
from raypd.decoding.models.llama import PreNormLayer
from raypd.decoding.models.recurrences import build_recurrence


class HybridLayer(PreNormLayer):
    """A layer of a hybrid, which has attention or a recurrence."""

    # The name of the recurrence in the transformers layer.
    recurrence_name = "mamba"

    def build_mixer(self, source: Any, builder: Builder) -> Any:
        self.recurrence: Recurrence | None = None
        module = getattr(source, self.recurrence_name, None)
        if module is None:
            return super().build_mixer(source, builder)
        self.recurrence = build_recurrence(module, builder)
        self.output = builder.product(Linears(module, "out_proj"))
        return self.recurrence

    def forward(
        self,
        hidden: torch.Tensor,
        ropes: dict[str, Rope],
        step: Step,
        sample_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.recurrence is None:
            return super().forward(hidden, ropes, step, sample_rows)
        return self.added(self.recurrence(self.input_norm(hidden), step), hidden, sample_rows)
