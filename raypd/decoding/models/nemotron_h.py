"""Nemotron-H: layers of one part each, which is Mamba-2, attention without rotation, an MLP or a
mixture of experts.

hidden += part(norm(hidden))
"""

from collections.abc import Callable
from typing import Any

import torch

from raypd.decoding.attention.step import Step
from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.recurrent import Recurrence
from raypd.decoding.layers.sources import Linears, NormStyle, Rope
from raypd.decoding.models.decoder import ONE_ROPE, DecoderLayer, DecoderModel, Family, needed
from raypd.decoding.models.llama import attention_of
from raypd.decoding.models.recurrences import build_recurrence, is_recurrent


class NemotronMlp(torch.nn.Module):
    """An MLP without a gate: down(activation(up(x)))."""

    def __init__(self, mlp: Any, builder: Builder) -> None:
        """
        Args:
            mlp: The transformers module.
            builder: Builds its products.
        """
        super().__init__()
        self.activation: Callable[[torch.Tensor], torch.Tensor] = mlp.act_fn
        self.up = builder.product(Linears(mlp, "up_proj"))
        self.down = builder.product(Linears(mlp, "down_proj"))

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return residual + MLP(x), [tokens, hidden size]. It may overwrite `residual`."""
        return self.down.add(self.activation(self.up(x)), residual)


class Mixture(torch.nn.Module):
    """A mixture of experts without gates, computed by transformers' code."""

    def __init__(self, module: Any, builder: Builder) -> None:
        """
        Args:
            module: The transformers module.
            builder: Builds the products of the MLP that all tokens go through.
        """
        super().__init__()
        self.router = module.gate
        self.experts = module.experts
        self.into_latent = module.fc1_latent_proj
        self.out_of_latent = module.fc2_latent_proj
        self.shared = NemotronMlp(module.shared_experts, builder)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return residual + the mixture, [tokens, hidden size]."""
        _, weights, numbers = self.router(x)
        mixed = self.out_of_latent(self.experts(self.into_latent(x), numbers, weights))
        return self.shared.add(x, residual + mixed)


class NemotronLayer(DecoderLayer):
    """A layer of Nemotron-H."""

    def __init__(self, source: Any, builder: Builder) -> None:
        """
        Args:
            source: The transformers layer.
            builder: Builds its parts.
        """
        super().__init__()
        module = source.mixer
        self.recurrence: Recurrence | None = None
        self.mlp: NemotronMlp | Mixture | None = None
        if is_recurrent(module):
            self.recurrence = build_recurrence(module, builder)
            self.output = builder.product(Linears(module, "out_proj"))
        elif hasattr(module, "q_proj"):
            self.attention = builder.attention(attention_of(module, rotated=False))
            self.output = builder.product(Linears(module, "o_proj"))
        elif hasattr(module, "experts"):
            self.mlp = Mixture(module, builder)
        else:
            self.mlp = NemotronMlp(module, builder)
        self.norm = builder.norm(source.norm, NormStyle.ROUND_ONCE)

    def forward(
        self,
        hidden: torch.Tensor,
        ropes: dict[str, Rope],
        step: Step,
        sample_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.mlp is not None:
            if sample_rows is not None:
                hidden = hidden[sample_rows]
            return self.mlp.add(self.norm(hidden), hidden) if len(hidden) else hidden
        normed = self.norm(hidden)
        if self.recurrence is None:
            mixed = self.attention(normed, ropes[ONE_ROPE], step)
        else:
            mixed = self.recurrence(normed, step)
        mixed, hidden = needed(mixed, hidden, sample_rows)
        return self.output.add(mixed, hidden) if len(hidden) else hidden


class NemotronH(DecoderModel):
    """What Nemotron-H computes around its layers."""

    norm_style = NormStyle.ROUND_ONCE
    embedding_name = "embeddings"
    norm_name = "norm_f"


NEMOTRON_H = Family(
    "Nemotron-H",
    ("NemotronHForCausalLM",),
    NemotronLayer,
    NemotronH,
    small={
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
        "n_groups": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 256,
    },
    layer_types=frozenset({"linear_attention", "mlp", "moe"}),
)
