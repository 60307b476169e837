"""A model written out in the engine's terms; each family defines what a layer computes.

The tokens of many sequences are packed into one row:

    hidden = embed(ids)                      [tokens, hidden size]
    hidden = layer(hidden, ropes, step)      for each layer
    logits = head(norm(hidden))              [tokens, vocabulary]

In the last layer, everything after attention is computed only for the tokens that need a next-token
prediction; of the other tokens, a pass needs only keys and values.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from raypd.decoding.attention.step import Step
from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.layers.sources import NormStyle, Rope
from raypd.decoding.models.rotation import in_dtype, widened

# The name of the only rotary embedding of most models.
ONE_ROPE = "rope"
# The rotary embedding of a layer that does not rotate. Nothing reads it.
NO_ROPE = Rope(torch.empty(0), torch.empty(0))


class DecoderLayer(torch.nn.Module):
    """A layer of a family. Subclasses build their parts with a `Builder` and compute with them."""

    # The attention part; None in a layer without attention.
    attention: Any

    def __init__(self) -> None:
        super().__init__()
        self.attention = None

    def forward(
        self,
        hidden: torch.Tensor,
        ropes: dict[str, Rope],
        step: Step,
        sample_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the layer.

        Args:
            hidden: [tokens, hidden size]
            ropes: The model's rotary embeddings, by name.
            step: The pass.
            sample_rows: In the last layer, the rows that are needed after attention, [samples].

        Returns:
            [tokens, hidden size], or [samples, hidden size] in the last layer.
        """
        raise NotImplementedError


class DecoderModel(torch.nn.Module):
    """A model of a registered family.

    A subclass overrides whatever its family computes differently around the layers.
    """

    # The style of the last norm; None if it is not an RMS norm.
    norm_style: NormStyle | None = NormStyle.ROUND_FIRST
    # The names of the embedding, the last norm and the rotary embedding in the transformers module.
    # A model that does not rotate has no such embedding.
    embedding_name = "embed_tokens"
    norm_name = "norm"
    rotary_name = "rotary_emb"

    def __init__(
        self, model: Any, layer: Callable[[Any, Builder], DecoderLayer], builder: Builder
    ) -> None:
        """
        Args:
            model: The transformers model, whose modules it uses.
            layer: Builds a layer from a transformers layer.
            builder: Builds the parts of the layers.
        """
        super().__init__()
        self.config = model.config
        self.text_config = model.config.get_text_config()
        self.dtype = model.dtype
        self.builder = builder
        self.embed = getattr(model.model, self.embedding_name)
        self.rotary: Any = getattr(model.model, self.rotary_name, None)
        self.head = model.lm_head
        self.norm = builder.norm(getattr(model.model, self.norm_name), self.norm_style)
        layers = [layer(source, builder) for source in model.model.layers]
        self.layers = torch.nn.ModuleList(layers)
        # The recurrent layers, whose states are numbered in this order.
        self.recurrences = list(builder.recurrences)
        attentions = [made.attention for made in layers if made.attention is not None]
        self.head_dim = int(attentions[0].head_dim) if attentions else 0
        numbers = {int(attention.layer.number) for attention in attentions}
        # The layers that store keys; the others read those of an earlier layer.
        self.stored_layers: list[int] = sorted(numbers)

    @property
    def is_stable(self) -> bool:
        """Whether a token's logits have the same bits in every pass."""
        # Scans add up in chunks, which depend on what else is in the pass.
        return self.builder.is_stable and not self.recurrences

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        step: Step,
        full_count: int | None = None,
        want_hidden: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the model over a pass.

        Args:
            ids: Token ids, [tokens].
            positions: [tokens]
            step: The pass.
            full_count: How many of `step.sample_rows`, starting with the first, need logits; None
                for all.
            want_hidden: Not used, because hidden states are always computed.

        Returns:
            Logits [full_count, vocabulary], and last hidden states [samples, hidden size].
        """
        hidden = self.embedded(ids)  # [tokens, hidden size]
        ropes = self.ropes(hidden, positions)
        hidden = self.through_layers(ids, hidden, ropes, step)
        hidden = self.norm(hidden)  # [samples, hidden size]
        return self.finished(self.head(hidden[:full_count])), hidden

    def through_layers(
        self, ids: torch.Tensor, hidden: torch.Tensor, ropes: dict[str, Rope], step: Step
    ) -> torch.Tensor:
        """Compute the layers.

        Args:
            ids: Token ids, [tokens].
            hidden: What `embedded` returned for them.
            ropes: The rotary embeddings.
            step: The pass.

        Returns:
            [samples, hidden size]
        """
        *first_layers, last_layer = self.layers
        for layer in first_layers:
            hidden = layer(hidden, ropes, step)
        last: torch.Tensor = last_layer(hidden, ropes, step, step.sample_rows)
        return last

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of ids [tokens], [tokens, hidden size]."""
        embedded: torch.Tensor = self.embed(ids)
        return embedded

    def ropes(self, hidden: torch.Tensor, positions: torch.Tensor) -> dict[str, Rope]:
        """Return the rotary embeddings for positions [tokens], by name."""
        if self.rotary is None:
            return {ONE_ROPE: NO_ROPE}
        cos, sin = self.rotary(hidden[None], positions[None])
        rope = in_dtype(Rope(cos[0], sin[0]), hidden.dtype)
        return {ONE_ROPE: widened(rope.cos, rope.sin, self.head_dim)}

    def finished(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale or bound the logits from the output embeddings, [rows, tokens]."""
        return logits


def needed(
    attended: torch.Tensor, hidden: torch.Tensor, sample_rows: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of both tensors that are needed after attention."""
    if sample_rows is None:
        return attended, hidden
    return attended[sample_rows], hidden[sample_rows]


def _takes_all(config: Any) -> bool:
    return True


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: The common name of its models.
        classes: The names of its models' classes in transformers.
        layer: Builds a layer from a transformers layer.
        model: Computes what is around the layers.
        small: Configuration keys of a small model, besides those that all families have.
        layer_types: The types of layers that it has besides attention, as `layer_types` of a
            configuration names them.
        takes: Returns, for a configuration, whether the layer can compute a model of these classes.
    """

    name: str
    classes: tuple[str, ...]
    layer: Callable[[Any, Builder], DecoderLayer]
    model: type[DecoderModel] = DecoderModel
    small: dict[str, Any] = field(default_factory=dict)
    takes: Callable[[Any], bool] = _takes_all
    layer_types: frozenset[str] = frozenset()

    def build(self, model: Any, builder: Builder) -> DecoderModel:
        """Build a model of the family from a transformers model, whose weights are taken."""
        return self.model(model, self.layer, builder)
