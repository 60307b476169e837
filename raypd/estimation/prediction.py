"""Documents a second of a GPU that nobody has measured: counts over the rates of its data sheet.

Four parts are added up: products, memory that they do not hide, attention, host. An order of
magnitude, and which part weighs.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from raypd.billing.prices import INSTANCES
from raypd.config import ModelConfig
from raypd.config.model import MOST_SEQS, EngineConfig
from raypd.errors import ConfigError
from raypd.estimation import bootstrap
from raypd.estimation.machines import MethodSpeed

# GPU of instance types -> (dense bfloat16 TFLOP/s, GB/s) by NVIDIA's data sheets (of the A10G:
# AWS's card)
CARDS = {
    "A10G": (70, 600),
    "L4": (121, 300),
    "L40S": (362, 864),
    "A100 40GB": (312, 1555),
    "A100 80GB": (312, 2039),
    "H100": (989, 3350),
    "H200": (989, 4800),
    "B200": (2250, 7700),
    "B300": (2250, 8000),
}
# Shares of these that large products and large copies reach: assumed.
_PRODUCTS = 0.7
_MEMORY = 0.85
_PASS_TOKENS = EngineConfig().batched_tokens(gpu=True)
# Bytes a token, layer and width of the model, beside products and attention.
_TRAFFIC = 200e3 / 4096
# Of a pass; of a kernel; kernels of a layer.
_HOST_SECONDS = 6e-3
_LAUNCH_SECONDS = 5e-6
_LAUNCHES = 12
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # keys of a config.json
_MARGIN = 2 << 30  # bytes of a card for passes, beside weights and cache


@dataclass(frozen=True)
class Shape:
    """Sizes of a dense decoder with gated layers, as its config.json has them."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = False

    @property
    def layers_weights(self) -> int:
        attention = (
            2
            * self.hidden_size
            * self.head_dim
            * (self.num_attention_heads + self.num_key_value_heads)
        )
        return self.num_hidden_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def weights(self) -> int:
        """All but norms and biases."""
        return self.layers_weights + self.head_weights * (1 if self.tie_word_embeddings else 2)

    @property
    def cache_bytes(self) -> int:
        """Of a token, in bfloat16."""
        return 4 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim


# Those of the HPD paper, which a machine without a network can predict.
SHAPES = {
    "Qwen/Qwen3-1.7B": Shape(28, 2048, 6144, 16, 8, 128, 151_936, True),
    "Qwen/Qwen3-4B": Shape(36, 2560, 9728, 32, 8, 128, 151_936, True),
    "Qwen/Qwen3-8B": Shape(36, 4096, 12288, 32, 8, 128, 151_936),
    "microsoft/phi-4": Shape(40, 5120, 17920, 40, 10, 128, 100_352),
}


class DocumentTokens(NamedTuple):
    """Tokens of a document, and the passes in which its values are decoded.

    Without values: W1 of docs/benchmark.md.
    """

    shared: float = 400
    own: float = 300
    keys: float = 80
    values: float = 80
    passes: float = 5


def shape_of(name: str) -> Shape:
    """Raises ModelError, ConfigError: config.json is not to be had, or is not of a dense model."""
    if name in SHAPES:
        return SHAPES[name]
    from raypd.models.source import find_source, read_config  # imports torch

    config = read_config(find_source(ModelConfig(name=name))).get_text_config()
    sizes: dict[str, Any] = {key: getattr(config, key, None) for key in Shape.__annotations__}
    if sizes["hidden_size"] and sizes["num_attention_heads"]:
        sizes["head_dim"] = (
            sizes["head_dim"] or sizes["hidden_size"] // sizes["num_attention_heads"]
        )
        sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or sizes["num_attention_heads"]
    if None in sizes.values() or any(getattr(config, key, None) for key in _EXPERTS):
        raise ConfigError(
            f"{name}: predicted are dense models with gated layers (Llama, Mistral, Qwen, Phi)"
        )
    return Shape(**sizes)


def seconds_of(
    shape: Shape, gpu: str, tokens: DocumentTokens, together: bool
) -> dict[str, float] | None:
    """Seconds of a document by part; None: the model does not fit. together: values at once, else
    token by token.
    """
    flops = CARDS[gpu][0] * 1e12 * _PRODUCTS
    bandwidth = CARDS[gpu][1] * 1e9 * _MEMORY
    prefilled = tokens.own + (tokens.keys if together else 0)
    decoded = tokens.values + (0 if together else tokens.keys)
    passes = tokens.passes if together else decoded
    fed = prefilled + decoded
    memory_gib = min(
        instance.gpu_memory_gib for instance in INSTANCES.values() if instance.gpu == gpu
    )
    room = 0.9 * memory_gib * 2**30 - _MARGIN - 2 * shape.weights
    most_seqs = min(
        MOST_SEQS,
        math.floor((room - shape.cache_bytes * tokens.shared) / (shape.cache_bytes * fed)),
    )
    if most_seqs < 1:
        return None
    share = max(fed / _PASS_TOKENS, passes / most_seqs)  # of passes, that a document pays
    products = 2 * (shape.layers_weights * fed + shape.head_weights * decoded) / flops
    read = share * 2 * (shape.layers_weights + shape.head_weights) / bandwidth
    traffic = _TRAFFIC * shape.hidden_size * shape.num_hidden_layers * fed / bandwidth
    keys = prefilled * (tokens.shared + prefilled / 2) + decoded * (
        tokens.shared + prefilled + decoded / 2
    )
    scores = 4 * shape.num_attention_heads * shape.head_dim * shape.num_hidden_layers * keys / flops
    cached = passes * (tokens.shared + prefilled + decoded / 2) * shape.cache_bytes / bandwidth
    host = share * (_HOST_SECONDS + _LAUNCH_SECONDS * _LAUNCHES * shape.num_hidden_layers)
    memory = traffic + max(0.0, read - products)
    return {"products": products, "memory": memory, "attention": scores + cached, "host": host}


def speeds(
    model: str, counts: Sequence[float], types: Iterable[str]
) -> tuple[list[MethodSpeed], list[MethodSpeed]]:
    """The speed of a model in bfloat16 on each GPU that it fits: of values decoded together, and
    token by token. counts: of `DocumentTokens`. types: of instances. Raises ConfigError: it, or
    such a document, fits none.
    """
    tokens = DocumentTokens(*counts)
    if not (tokens.own > 0 and tokens.passes > 0 and min(tokens) >= 0 and sum(tokens) < 1e9):
        raise ConfigError(
            f"--tokens {' '.join(f'{count:g}' for count in tokens)}: no document has such counts"
        )
    shape = shape_of(model)
    gpus = {INSTANCES[name].gpu for name in types} & CARDS.keys()
    together, plain = (
        [speed for gpu in sorted(gpus) if (speed := _speed(shape, gpu, tokens, method)) is not None]
        for method in ("hyper_parallel", "autoregressive")
    )
    if not together:
        raise ConfigError(
            f"{model}: fits in bfloat16 into the memory of no "
            f"{', '.join(sorted(gpus)) or 'GPU there'}"
        )
    return together, plain


def _speed(shape: Shape, gpu: str, tokens: DocumentTokens, method: str) -> MethodSpeed | None:
    parts = seconds_of(shape, gpu, tokens, method == "hyper_parallel")
    if parts is None:
        return None
    total = sum(parts.values())
    shares = ", ".join(f"{part} {seconds / total:.0%}" for part, seconds in parts.items())
    return MethodSpeed(
        method, bootstrap.exact(total), f"PREDICTED for {gpu}, not measured: {shares}", gpu
    )
