"""Predict the seconds of a document from the counts of a model and the rates of a GPU.

The parts of the seconds are matrix products, memory traffic that they do not hide, attention,
recurrent states, and the host. The result is an order of magnitude, and shows which part dominates.
"""

import math
from typing import NamedTuple

from raypd.decoding import AttentionSizes, ModelSizes
from raypd.estimation.data_sheets import DataSheet

# The shares of a data sheet's rates that large products and large copies are assumed to reach.
_PRODUCTS_EFFICIENCY = 0.7
_MEMORY_EFFICIENCY = 0.85
# Memory traffic in bytes per token, layer and hidden dimension, besides products and attention.
_TRAFFIC = 200e3 / 4096
_HOST_SECONDS = 6e-3  # per pass
_LAUNCH_SECONDS = 5e-6  # per kernel
# The share of a GPU's memory that weights, cache and passes may take together.
_MEMORY_SHARE = 0.9
# Bytes of a GPU's memory that a pass needs besides weights and cache.
_MARGIN = 2 << 30
# The share of the free memory that recurrent states may take (models/hybrid.py in decoding).
_STATE_SHARE = 0.5
# Tokens of a text that a recurrent layer reads together, with its state read and written once.
_STATE_CHUNK = 64
# The rows of a product with an expert are padded to this number.
_EXPERT_ROWS = 64


class DocumentTokens(NamedTuple):
    """Tokens of a document, and the passes in which its values are decoded.

    The defaults are workload W1 of docs/benchmark.md.
    """

    shared: float = 400
    own: float = 300
    keys: float = 80
    values: float = 80
    passes: float = 5

    def describe(self) -> str:
        """Return the tokens in words."""
        return (
            f"{self.shared:g} tokens that all prompts share, {self.own:g} of its own, "
            f"{self.keys:g} of keys, {self.values:g} of values in {self.passes:g} passes"
        )


class PassLimits(NamedTuple):
    """The limits of a pass."""

    tokens: int  # Tokens of a pass.
    sequences: int  # Documents that decode at the same time.


class _Work(NamedTuple):
    """What is computed for a document."""

    shared: float  # Tokens that are computed once for all documents.
    prefilled: float
    decoded: float
    passes: float
    branches: float  # Values that are decoded at the same time.

    @property
    def computed(self) -> float:
        """Tokens that go through the layers."""
        return self.prefilled + self.decoded

    @property
    def mean_context(self) -> float:
        """Tokens before a decoded one, on average."""
        return self.shared + self.prefilled + self.decoded / 2


def seconds_of(
    sizes: ModelSizes,
    sheet: DataSheet,
    tokens: DocumentTokens,
    parallel: bool,
    limits: PassLimits,
    fp8: bool = False,
) -> dict[str, float] | None:
    """Predict the seconds of a document, by part.

    Args:
        sizes: The sizes of the model.
        sheet: The rates of the GPU.
        tokens: The tokens of the document.
        parallel: Whether values are decoded in parallel; otherwise token by token.
        limits: The limits of a pass.
        fp8: Whether products with weights are in FP8 instead of bfloat16.

    Returns:
        Seconds by part; None if the model does not fit into the GPU's memory, or the GPU has no
        FP8.
    """
    work = _work_of(tokens, parallel)
    weight_bytes = 1 if fp8 else 2
    sequences = _max_sequences(sizes, sheet, work, limits, weight_bytes)
    tflops = sheet.fp8_tflops if fp8 else sheet.tflops
    if sequences < 1 or tflops is None:
        return None
    flops = tflops * 1e12 * _PRODUCTS_EFFICIENCY
    attention_flops = sheet.tflops * 1e12 * _PRODUCTS_EFFICIENCY
    bandwidth = sheet.gigabytes_per_second * 1e9 * _MEMORY_EFFICIENCY
    # The number of passes, or the fraction of one, that a document accounts for.
    share = max(work.computed / limits.tokens, work.passes / sequences)
    products = sizes.product_flops(work.computed, work.decoded) / flops
    products += _padding_flops(sizes, work, sequences, limits) / flops
    read_weights = float(sizes.dense_weights + sizes.head_weights)
    read_weights += sizes.expert_weights * _touched_share(sizes, work.computed / share)
    weight_reads = share * weight_bytes * read_weights / bandwidth
    traffic = _TRAFFIC * sizes.hidden_size * sizes.layers * work.computed / bandwidth
    scores = 0.0
    cache_reads = 0.0
    for kind in sizes.attention:
        pairs = _prefill_pairs(kind, work) + work.decoded * _seen(kind, work.mean_context)
        key_and_value = kind.key_dim + kind.value_dim
        scores += 2 * kind.layers * kind.heads * key_and_value * pairs / attention_flops
        key_bytes = sizes.cached_number_bytes * kind.layers * kind.kv_heads * key_and_value
        cache_reads += work.passes * _seen(kind, work.mean_context) * key_bytes / bandwidth
    parts = {
        "products": products,
        "memory": traffic + max(0.0, weight_reads - products),
        "attention": scores + cache_reads,
        "host": share * (_HOST_SECONDS + _LAUNCH_SECONDS * sizes.launches * sizes.layers),
    }
    if sizes.state_bytes:
        # A pass reads and writes the state of each text that it continues.
        moves = work.prefilled / _STATE_CHUNK + work.decoded
        parts["states"] = 2 * moves * sizes.state_bytes / bandwidth
    return parts


def _work_of(tokens: DocumentTokens, parallel: bool) -> _Work:
    if parallel:
        branches = max(1.0, tokens.values / tokens.passes)
        prefilled = tokens.own + tokens.keys
        return _Work(tokens.shared, prefilled, tokens.values, tokens.passes, branches)
    decoded = tokens.values + tokens.keys
    return _Work(tokens.shared, tokens.own, decoded, decoded, 1.0)


def _max_sequences(
    sizes: ModelSizes, sheet: DataSheet, work: _Work, limits: PassLimits, weight_bytes: int
) -> int:
    """Return how many documents fit into a GPU at the same time besides the weights."""
    free = _MEMORY_SHARE * sheet.gigabytes * 1e9 - _MARGIN - weight_bytes * sizes.weights
    sequences = float(limits.sequences)
    if sizes.state_bytes:
        branches = work.branches + 1
        sequences = min(sequences, _STATE_SHARE * free / (sizes.state_bytes * branches))
        free *= 1 - _STATE_SHARE
    if sizes.cache_bytes:
        for_own = free - sizes.cache_bytes * work.shared
        sequences = min(sequences, for_own / (sizes.cache_bytes * work.computed))
    return math.floor(sequences)


def _touched_share(sizes: ModelSizes, tokens: float) -> float:
    """Return the share of the experts that at least one of a number of tokens goes through."""
    return 1 - (1 - sizes.expert_share) ** tokens


def _padding_flops(sizes: ModelSizes, work: _Work, sequences: int, limits: PassLimits) -> float:
    """Return the operations for the rows with which products with experts are padded."""
    if not sizes.experts:
        return 0.0
    pass_tokens = min(limits.tokens, sequences * work.decoded / work.passes)
    # On average, half of a block is padding. A large pass, as of prompts, fills its blocks.
    decoded_rows = _EXPERT_ROWS / 2 * _touched_share(sizes, pass_tokens) * sizes.experts
    prefilled_rows = _EXPERT_ROWS / 2 * sizes.experts
    padded = work.decoded * decoded_rows / pass_tokens
    padded += work.prefilled * prefilled_rows / limits.tokens
    return 2 * padded * sizes.expert_weights / sizes.experts


def _seen(kind: AttentionSizes, context: float) -> float:
    """Return the tokens that a query sees after `context` tokens."""
    if kind.window is None:
        return context
    return min(float(kind.window), context)


def _prefill_pairs(kind: AttentionSizes, work: _Work) -> float:
    """Return the pairs of a token of the prompt and a token that it sees."""
    first = work.shared
    last = work.shared + work.prefilled
    if kind.window is None or kind.window >= last:
        return work.prefilled * (first + last) / 2
    if kind.window <= first:
        return work.prefilled * kind.window
    growing = kind.window - first
    return growing * (first + kind.window) / 2 + (last - kind.window) * kind.window
