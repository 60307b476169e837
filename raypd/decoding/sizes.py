"""The sizes of a model, and what a token costs in it, as counts. This module needs no torch."""

from dataclasses import dataclass

# The bytes of an element in bfloat16 and float16.
_HALF_BYTES = 2
# The bytes of an element in the KV cache, by `model.kv_cache`.
_CACHE_BYTES = {"auto": _HALF_BYTES, "fp8": 1}


@dataclass(frozen=True)
class AttentionSizes:
    """Layers that attend in the same way."""

    layers: int
    heads: int
    kv_heads: int  # The key heads that the cache holds.
    key_dim: int
    value_dim: int
    window: int | None = None  # The largest number of tokens that a query sees.
    # The number of elements in the cache per token and key head, if these are not a key and a
    # value.
    cached_dim: int | None = None

    @property
    def cached_numbers(self) -> int:
        """The number of elements of a token in the cache of these layers."""
        cached_dim = self.cached_dim
        if cached_dim is None:
            cached_dim = self.key_dim + self.value_dim
        return self.layers * self.kv_heads * cached_dim


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model.

    Attributes:
        hidden_size: The size of a hidden state.
        layers: The number of all layers.
        weights: The number of all stored weights, including embeddings and experts.
        dense_weights: The number of weights in the layers by which every token is multiplied.
        head_weights: The number of weights of the output embeddings.
        attention: The layers that attend, by kind.
        expert_weights: The number of weights of all routed experts in all layers.
        experts: The number of routed experts of a layer; 0 for none.
        experts_per_token: The number of routed experts that a token goes through in a layer.
        state_bytes: The bytes that the recurrent layers remember of one text.
        launches: The number of kernels that the engine launches per layer.
        kv_cache: What the KV cache holds, as `model.kv_cache` says.
    """

    hidden_size: int
    layers: int
    weights: int
    dense_weights: int
    head_weights: int
    attention: tuple[AttentionSizes, ...]
    expert_weights: int = 0
    experts: int = 0
    experts_per_token: int = 0
    state_bytes: int = 0
    launches: int = 12
    kv_cache: str = "auto"

    @property
    def expert_share(self) -> float:
        """The share of the routed experts that a token goes through."""
        if not self.experts:
            return 0.0
        return self.experts_per_token / self.experts

    @property
    def active_weights(self) -> float:
        """The number of weights in the layers by which one token is multiplied."""
        return self.dense_weights + self.expert_weights * self.expert_share

    @property
    def cached_number_bytes(self) -> int:
        """The bytes of an element in the KV cache of a model in bfloat16."""
        return _CACHE_BYTES[self.kv_cache]

    @property
    def cache_bytes(self) -> int:
        """The bytes of a token in the KV cache; layers with windows keep all tokens."""
        return self.cached_number_bytes * sum(kind.cached_numbers for kind in self.attention)

    def product_flops(self, fed: float, sampled: float) -> float:
        """Return the operations of all products with weights, without those of attention.

        Args:
            fed: The number of tokens that go through the layers.
            sampled: The number of tokens for which a next token is predicted.
        """
        return 2 * (self.active_weights * fed + self.head_weights * sampled)


def dense_sizes(
    layers: int,
    hidden_size: int,
    intermediate_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocabulary: int,
    tied: bool = False,
) -> ModelSizes:
    """Return the sizes of a dense decoder with gated layers, without its norms and biases."""
    attention = 2 * hidden_size * head_dim * (heads + kv_heads)
    mlp = 3 * hidden_size * intermediate_size
    dense = layers * (attention + mlp)
    head = hidden_size * vocabulary
    embeddings = head if tied else 2 * head
    return ModelSizes(
        hidden_size=hidden_size,
        layers=layers,
        weights=dense + embeddings,
        dense_weights=dense,
        head_weights=head,
        attention=(AttentionSizes(layers, heads, kv_heads, head_dim, head_dim),),
    )
