"""Predict the speed of a GPU from its data sheet.

The seconds of a document have four parts: matrix products, memory traffic that they do not hide,
attention, and the host. The result is an order of magnitude, and shows which part dominates.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import raypd.estimation.bootstrap as bootstrap
from raypd.billing import INSTANCES
from raypd.config import MOST_SEQS, EngineConfig, ModelConfig
from raypd.errors import ConfigError
from raypd.estimation.machines import MethodSpeed


class DataSheet(NamedTuple):
    tflops: float  # dense, in bfloat16
    gigabytes_per_second: float


# GPU of instance types -> rates by NVIDIA's data sheets (for the A10G: by AWS).
GPUS = {
    "A10G": DataSheet(70, 600),
    "L4": DataSheet(121, 300),
    "L40S": DataSheet(362, 864),
    "A100 40GB": DataSheet(312, 1555),
    "A100 80GB": DataSheet(312, 2039),
    "H100": DataSheet(989, 3350),
    "H200": DataSheet(989, 4800),
    "B200": DataSheet(2250, 7700),
    "B300": DataSheet(2250, 8000),
}
# The shares of these rates that large products and large copies are assumed to reach.
_PRODUCTS_EFFICIENCY = 0.7
_MEMORY_EFFICIENCY = 0.85
_PASS_TOKENS = EngineConfig().batched_tokens(gpu=True)
# Memory traffic in bytes per token, layer and hidden dimension, beside products and attention.
_TRAFFIC = 200e3 / 4096
_HOST_SECONDS = 6e-3  # per pass
_LAUNCH_SECONDS = 5e-6  # per kernel
_LAUNCHES = 12  # kernels per layer
# Keys of a config.json that show a mixture of experts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Fields of `Shape` that only models with latent attention have.
_LATENT_SIZES = (
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
# Bytes of a GPU's memory that a pass needs beside weights and cache.
_MARGIN = 2 << 30


@dataclass(frozen=True)
class Shape:
    """Sizes of a dense decoder with gated layers, as in its config.json.

    A model with latent attention (MLA) has the sizes from `kv_lora_rank` on.
    """

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = False
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    @property
    def layers_weights(self) -> int:
        """Weights of all layers."""
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_hidden_layers * (self._attention_weights + mlp)

    @property
    def _attention_weights(self) -> int:
        """Weights of the attention of a layer."""
        heads = self.num_attention_heads
        if not self.kv_lora_rank:
            return 2 * self.hidden_size * self.head_dim * (heads + self.num_key_value_heads)
        query_outputs = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        queries = self.hidden_size * query_outputs
        if self.q_lora_rank:
            queries = self.q_lora_rank * (self.hidden_size + query_outputs)
        latents = self.hidden_size * self._cached_numbers
        expansion = self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        output = heads * self.v_head_dim * self.hidden_size
        return queries + latents + expansion + output

    @property
    def _cached_numbers(self) -> int:
        """Numbers of a token in the KV cache of a layer."""
        if self.kv_lora_rank:
            return self.kv_lora_rank + self.qk_rope_head_dim
        return 2 * self.num_key_value_heads * self.head_dim

    @property
    def score_products(self) -> int:
        """Products of a query and a key in a layer, and of its weight and a value."""
        heads = self.num_attention_heads
        if self.kv_lora_rank:
            # Queries attend to the latents themselves.
            return heads * (2 * self.kv_lora_rank + self.qk_rope_head_dim)
        return 2 * heads * self.head_dim

    @property
    def head_weights(self) -> int:
        """Weights of the output layer."""
        return self.hidden_size * self.vocab_size

    @property
    def weights(self) -> int:
        """All weights except norms and biases."""
        embeddings = 2
        if self.tie_word_embeddings:
            embeddings = 1
        return self.layers_weights + self.head_weights * embeddings

    @property
    def cache_bytes(self) -> int:
        """Bytes of a token in the KV cache, in bfloat16."""
        return 2 * self.num_hidden_layers * self._cached_numbers


# The models of the HPD paper, so that they can be predicted without a network.
SHAPES = {
    "Qwen/Qwen3-1.7B": Shape(28, 2048, 6144, 16, 8, 128, 151_936, True),
    "Qwen/Qwen3-4B": Shape(36, 2560, 9728, 32, 8, 128, 151_936, True),
    "Qwen/Qwen3-8B": Shape(36, 4096, 12288, 32, 8, 128, 151_936),
    "microsoft/phi-4": Shape(40, 5120, 17920, 40, 10, 128, 100_352),
}


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


def shape_of(name: str) -> Shape:
    """Return the sizes of a model.

    Raises:
        ModelError: If config.json cannot be fetched.
        ConfigError: If the model is not dense with gated layers.
    """
    if name in SHAPES:
        return SHAPES[name]
    # This import loads torch.
    from raypd.models import find_source, read_config

    config = read_config(find_source(ModelConfig(name=name))).get_text_config()
    # Where layers differ, only the configuration of a layer says its sizes.
    first = config.per_layer_config[0]
    sizes: dict[str, Any] = {key: getattr(first, key, None) for key in Shape.__annotations__}
    for key in _LATENT_SIZES:
        sizes[key] = sizes[key] or 0
    heads = sizes["num_attention_heads"]
    if sizes["hidden_size"] and heads:
        sizes["head_dim"] = sizes["head_dim"] or sizes["hidden_size"] // heads
        sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or heads
    has_experts = any(getattr(first, key, None) for key in _EXPERTS)
    if None in sizes.values() or has_experts or config.is_heterogeneous:
        raise ConfigError(
            f"{name}: only dense models with gated layers of one size can be predicted (Llama, "
            "Mistral, Qwen, Phi)"
        )
    return Shape(**sizes)


def seconds_of(
    shape: Shape, gpu: str, tokens: DocumentTokens, parallel: bool
) -> dict[str, float] | None:
    """Predict the seconds of a document, by part.

    Args:
        shape: The sizes of the model.
        gpu: A key of `GPUS`.
        tokens: The tokens of the document.
        parallel: Whether values are decoded in parallel; otherwise token by token.

    Returns:
        Seconds by part; None if the model does not fit into the GPU's memory.
    """
    flops = GPUS[gpu].tflops * 1e12 * _PRODUCTS_EFFICIENCY
    bandwidth = GPUS[gpu].gigabytes_per_second * 1e9 * _MEMORY_EFFICIENCY
    if parallel:
        prefilled = tokens.own + tokens.keys
        decoded = tokens.values
        passes = tokens.passes
    else:
        prefilled = tokens.own
        decoded = tokens.values + tokens.keys
        passes = decoded
    computed = prefilled + decoded
    sequences = _max_sequences(shape, gpu, tokens.shared, computed)
    if sequences < 1:
        return None
    # The share of its passes that a document pays for.
    share = max(computed / _PASS_TOKENS, passes / sequences)
    layers = shape.num_hidden_layers
    products = 2 * (shape.layers_weights * computed + shape.head_weights * decoded) / flops
    weight_reads = share * 2 * (shape.layers_weights + shape.head_weights) / bandwidth
    traffic = _TRAFFIC * shape.hidden_size * layers * computed / bandwidth
    prefill_keys = prefilled * (tokens.shared + prefilled / 2)
    mean_context = tokens.shared + prefilled + decoded / 2
    keys = prefill_keys + decoded * mean_context
    scores = 2 * shape.score_products * layers * keys / flops
    cache_reads = passes * mean_context * shape.cache_bytes / bandwidth
    return {
        "products": products,
        "memory": traffic + max(0.0, weight_reads - products),
        "attention": scores + cache_reads,
        "host": share * (_HOST_SECONDS + _LAUNCH_SECONDS * _LAUNCHES * layers),
    }


def _max_sequences(shape: Shape, gpu: str, shared: float, computed: float) -> int:
    """Return how many sequences of `computed` tokens fit into a GPU beside the weights."""
    memory_gib = min(
        instance.gpu_memory_gib for instance in INSTANCES.values() if instance.gpu == gpu
    )
    cache = 0.9 * memory_gib * 2**30 - _MARGIN - 2 * shape.weights
    sequences = (cache - shape.cache_bytes * shared) / (shape.cache_bytes * computed)
    return min(MOST_SEQS, math.floor(sequences))


def speeds(
    model: str, counts: Sequence[float], types: Iterable[str]
) -> tuple[list[MethodSpeed], list[MethodSpeed]]:
    """Predict the speed of a model in bfloat16 on each GPU that it fits.

    Args:
        model: The name of the model.
        counts: The fields of `DocumentTokens`.
        types: Instance types whose GPUs are considered.

    Returns:
        The speeds with values decoded in parallel, and the speeds of autoregressive decoding.

    Raises:
        ConfigError: If the model or the document fits no GPU, or if the counts make no sense.
        ModelError: If the model's config.json cannot be fetched.
    """
    tokens = DocumentTokens(*counts)
    if not (tokens.own > 0 and tokens.passes > 0 and min(tokens) >= 0 and sum(tokens) < 1e9):
        raise ConfigError(
            f"--tokens {' '.join(f'{count:g}' for count in tokens)}: no document has such counts"
        )
    shape = shape_of(model)
    gpus = sorted({INSTANCES[name].gpu for name in types} & GPUS.keys())
    parallel = _speeds(shape, gpus, tokens, "hyper_parallel")
    if not parallel:
        names = ", ".join(gpus) or "GPU of these instance types"
        raise ConfigError(f"{model}: fits in bfloat16 into the memory of no {names}")
    return parallel, _speeds(shape, gpus, tokens, "autoregressive")


def _speeds(
    shape: Shape, gpus: Sequence[str], tokens: DocumentTokens, method: str
) -> list[MethodSpeed]:
    """Predict the speed on each GPU that the model fits."""
    predicted = []
    for gpu in gpus:
        parts = seconds_of(shape, gpu, tokens, method == "hyper_parallel")
        if parts is None:
            continue
        total = sum(parts.values())
        shares = ", ".join(f"{part} {seconds / total:.0%}" for part, seconds in parts.items())
        source = f"PREDICTED for {gpu}, not measured: {shares}"
        predicted.append(MethodSpeed(method, bootstrap.exact(total), source, gpu))
    return predicted
