"""Predict the speed of a model that nobody has measured, from its sizes and from data sheets."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import raypd.estimation.bootstrap as bootstrap
from raypd.billing import INSTANCES
from raypd.config import MOST_SEQS, EngineConfig, ModelConfig
from raypd.decoding import ModelSizes, dense_sizes
from raypd.errors import ConfigError, ModelError
from raypd.estimation.data_sheets import GPUS
from raypd.estimation.machines import MethodSpeed
from raypd.estimation.roofline import DocumentTokens, PassLimits, seconds_of

# The models of the HPD paper, and the smallest one that `raypd init` proposes. Their speed can be
# predicted without a network and without torch.
SIZES = {
    "Qwen/Qwen3-0.6B": dense_sizes(28, 1024, 3072, 16, 8, 128, 151_936, tied=True),
    "Qwen/Qwen3-1.7B": dense_sizes(28, 2048, 6144, 16, 8, 128, 151_936, tied=True),
    "Qwen/Qwen3-4B": dense_sizes(36, 2560, 9728, 32, 8, 128, 151_936, tied=True),
    "Qwen/Qwen3-8B": dense_sizes(36, 4096, 12288, 32, 8, 128, 151_936),
    "microsoft/phi-4": dense_sizes(40, 5120, 17920, 40, 10, 128, 100_352),
}
# The engine's default limits on a GPU.
LIMITS = PassLimits(EngineConfig().batched_tokens(gpu=True), MOST_SEQS)


def sizes_of(name: str) -> ModelSizes:
    """Return the sizes of a model of any family that raypd decodes.

    Raises:
        ModelError: If config.json cannot be fetched.
        ConfigError: If the model's layers cannot be counted.
    """
    if name in SIZES:
        return SIZES[name]
    # These imports load torch.
    from raypd.decoding import model_sizes
    from raypd.models import find_source, read_config

    try:
        config = read_config(find_source(ModelConfig(name=name)))
    except ModelError as error:
        raise ModelError(
            f"--model {name}: a prediction needs its config.json, and {error}. Of these models it "
            f"needs no file: {', '.join(SIZES)}"
        ) from error
    try:
        return model_sizes(config)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}; measure a sample instead") from error


def speeds(
    model: str, counts: Sequence[float], types: Iterable[str], kv_cache: str = "auto"
) -> tuple[list[MethodSpeed], list[MethodSpeed]]:
    """Predict the speed of a model in bfloat16 on each GPU that it fits.

    Args:
        model: The name of the model.
        counts: The fields of `DocumentTokens`.
        types: Instance types whose GPUs are considered.
        kv_cache: The type of the KV cache: `model.kv_cache`.

    Returns:
        The speeds with values decoded in parallel, and the speeds of autoregressive decoding.

    Raises:
        ConfigError: If the model or the document fits no GPU, or if the counts make no sense.
        ModelError: If the model's config.json cannot be fetched.
    """
    tokens = DocumentTokens(*counts)
    if not (tokens.own > 0 and tokens.passes > 0 and min(tokens) >= 0 and sum(tokens) < 1e9):
        raise ConfigError(
            f"--tokens {' '.join(f'{count:g}' for count in tokens)}: no document can have "
            "these counts"
        )
    sizes = replace(sizes_of(model), kv_cache=kv_cache)
    gpus = sorted({INSTANCES[name].gpu for name in types} & GPUS.keys())
    parallel = _speeds(sizes, gpus, tokens, "hyper_parallel")
    if not parallel:
        names = ", ".join(gpus) or "the GPUs of these instance types"
        raise ConfigError(f"{model}: does not fit into the memory of {names} in bfloat16")
    return parallel, _speeds(sizes, gpus, tokens, "autoregressive")


def _speeds(
    sizes: ModelSizes, gpus: Sequence[str], tokens: DocumentTokens, method: str
) -> list[MethodSpeed]:
    """Predict the speed on each GPU that the model fits."""
    predicted = []
    for gpu in gpus:
        is_parallel = method == "hyper_parallel"
        parts = seconds_of(sizes, GPUS[gpu], tokens, is_parallel, LIMITS)
        if parts is None:
            continue
        total = sum(parts.values())
        shares = ", ".join(f"{part} {seconds / total:.0%}" for part, seconds in parts.items())
        source = f"PREDICTED for {gpu}, not measured: {shares}"
        predicted.append(MethodSpeed(method, bootstrap.exact(total), source, gpu))
    return predicted
