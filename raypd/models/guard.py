"""Refuses a model that the engine cannot decode exactly, before any document is decoded.

The engine feeds rows packed side by side. That is exact if all layers call the registered attention
function, if no RoPE frequency depends on the rest of the batch, and if nothing but attention
carries information between tokens. The configuration is checked first. Then two rows packed
together in an engine must give the same logits as each row alone under eager attention.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from raypd.decoding import (
    HYBRIDS,
    MIN_REGION_SLOTS,
    MIN_STATES,
    DecoderModel,
    Engine,
    Feed,
    Program,
    Reach,
    attention_layers,
    unknown_layers,
)
from raypd.errors import ModelError
from raypd.models.elsewhere import who_runs

_ROW = 8  # tokens of each of the two rows
_FIRST = 10  # tokens of both rows in the first of two passes; the others read them from the cache

# The largest error of a token's logits, as a share of their spread. The worst token counts. Models
# that are decoded exactly stay below 1e-5 in float32. If a row sees its neighbour, or if positions
# are taken from the order of the tokens, the error is 0.1 to 2.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-3}
# Where arithmetic is coarse, the median token counts, because a rounding difference may send one
# token of a mixture to another expert. Models that are decoded exactly were off by 0 to 0.01, and
# under int8 by 0.13: it treats a feature as an outlier for all rows of a pass, so that rows do
# affect each other a little. A model that ignores positions is off by 0.4 and more.
_COARSE_TOLERANCE = 0.1
_INT8_TOLERANCE = 0.25
# The median error by a KV cache in 8 bits. Of SmolLM2-135M, with and without an adapter, in float32
# and bfloat16, it is 0.08 to 0.19, and of 70 tiny models with random weights at most 0.1. With the
# adapter, 94% of the values stay the same then. With keys 64 times as large, the largest are cut
# off: the error is 0.28 and above, 74% of the values stay the same, and F1 falls by 0.07. With keys
# 256 times as large it is 0.8 and above.
_FP8_CACHE_TOLERANCE = 0.25
# What a long-rope has twice: for rows within the length of its training, and for longer ones.
_LONG_ROPE = ("factor", "mscale")
# Functions of transformers that make masks with windows.
_WINDOW_MASKS = ("create_sliding_window_causal_mask", "create_masks_for_generate")
_NOT_FINITE = "its logits are not finite numbers: the weights are broken or overflow in this dtype"


def check_decodable(
    model: PreTrainedModel, name: str | None = None, kv_cache: str = "auto"
) -> None:
    """Check that a model is decoded exactly, by short passes that leave it unchanged.

    If the KV cache rounds keys and values, further passes check that the model tolerates this.

    Args:
        model: The model, on the device on which it decodes.
        name: What messages call it; None for the name in its configuration.
        kv_cache: What the KV cache holds: `model.kv_cache`.

    Raises:
        ModelError: The model is not decoded exactly, or its keys and values do not fit the cache.
    """
    if name is None:
        name = model.config._name_or_path or type(model).__name__
    check_architecture(model.config, type(model), name)
    reason = _reason_in_self_test(model)
    if reason == _NOT_FINITE:
        raise ModelError(f"model {name!r}: {reason}")
    if reason is not None:
        raise _refusal(name, model.config, type(model), reason)
    if kv_cache != "auto":
        _check_cache(model, name, kv_cache)


def check_architecture(config: PretrainedConfig, kind: type[PreTrainedModel], name: str) -> None:
    """The part of `check_decodable` that needs no weights: the configuration and the class of the
    model.
    """
    text = config.get_text_config()
    unsupported = unknown_layers(config, kind.__name__)
    reason = reason_in_rope(text)
    if getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder; raypd decodes decoder-only models"
    elif unsupported:
        reason = (
            f"it has layers of type {', '.join(unsupported)}; every layer must be full or "
            "sliding attention, or a recurrence of a family that raypd knows"
        )
    elif reason is None and _window_without_mask(text, kind):
        reason = (
            f"its config.json has a sliding window of {text.sliding_window} tokens, which "
            "transformers applies to the cache and not to the attention of this class, so that it "
            "contradicts itself; to have no window, set `sliding_window` to null in a copy of "
            "config.json"
        )
    elif not _takes_attention(kind):
        reason = "its code does not take attention functions from transformers' AttentionInterface"
    if reason is not None:
        raise _refusal(name, config, kind, reason)


def _window_without_mask(config: PretrainedConfig, kind: type[PreTrainedModel]) -> bool:
    """Return whether transformers' cache forgets tokens that the masks of a class do not hide.

    The cache reads the window of any configuration. A pass without a cache then sees more tokens.

    Args:
        config: The configuration of the text part.
        kind: The class of the model.
    """
    window = getattr(config, "sliding_window", None)
    if not window or window >= (getattr(config, "max_position_embeddings", None) or sys.maxsize):
        return False
    if "sliding_attention" not in (getattr(config, "layer_types", None) or ["sliding_attention"]):
        return False
    if not kind.__module__.startswith("transformers.models."):
        return False
    module = sys.modules[kind.__module__]
    return not any(hasattr(module, function) for function in _WINDOW_MASKS)


def _takes_attention(kind: type[PreTrainedModel]) -> bool:
    """Return whether the class of a model calls a registered attention function."""
    # Classes with recurrent layers do, but do not declare it.
    declares = kind._supports_attention_backend or kind.__name__ in HYBRIDS
    return bool(declares and kind._can_set_attn_implementation())


def _refusal(
    name: str, config: PretrainedConfig, kind: type[PreTrainedModel], reason: str
) -> ModelError:
    return ModelError(
        f"model {name!r}: raypd's engine does not support {kind.__name__}, as it cannot decode it "
        f"exactly in packed rows: {reason}; {who_runs(config, kind.__name__)}"
    )


def reason_in_rope(config: PretrainedConfig) -> str | None:
    """Return why the RoPE frequencies of a model depend on the longest row of a batch.

    Args:
        config: The configuration of the text part.

    Returns:
        None if they do not.
    """
    for rope in _rope_parameters(config):
        if rope.get("rope_type") != "longrope":
            continue
        unequal = [
            name for name in _LONG_ROPE if rope.get(f"long_{name}") != rope.get(f"short_{name}")
        ]
        if unequal:
            length = rope.get("original_max_position_embeddings")
            advice = ", ".join(f"`long_{name}` to what `short_{name}` is" for name in unequal)
            return (
                "its long-rope uses other frequencies for all rows as soon as one is longer than "
                f"{length} tokens; in a copy of its config.json, set {advice}, and "
                "`max_position_embeddings` to that length"
            )
    return None


def _rope_parameters(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the parameters of all rotary embeddings, of which each type of layer may have one."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    if by_layer_type and "rope_type" not in parameters:
        return by_layer_type
    return [parameters]


def _interleaved(tokens: torch.Tensor) -> Program[torch.Tensor]:
    """Feed two rows with interleaved tokens, which reveals whether neighbours are mixed up.

    The second of two passes reads the cache that the first one has filled.

    Args:
        tokens: [2, tokens]

    Returns:
        Logits [2, tokens, vocabulary].
    """
    order = tokens.T.reshape(-1).tolist()
    positions = [index // 2 for index in range(len(order))]
    segments = [1 + index % 2 for index in range(len(order))]
    logits: list[torch.Tensor] = []
    for part in (slice(0, _FIRST), slice(_FIRST, len(order))):
        predictions = yield Feed(
            order[part],
            positions[part],
            segments[part],
            {(1, 1): Reach.CAUSAL, (2, 2): Reach.CAUSAL},
            sample_at=range(len(order[part])),
            want_logits=True,
        )
        assert predictions.logits is not None
        logits.extend(predictions.logits)
    return torch.stack(logits).view(_ROW, 2, -1).transpose(0, 1)


def _random_rows(model: PreTrainedModel) -> torch.Tensor:
    """Return the tokens of two rows, [2, tokens]."""
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (2, _ROW), generator=generator)
    return tokens.to(model.get_input_embeddings().weight.device)


def _self_test_engine(model: PreTrainedModel, kv_cache: str = "auto") -> Engine:
    return Engine(model, cache_tokens=MIN_REGION_SLOTS, max_states=MIN_STATES, kv_cache=kv_cache)


@torch.no_grad()
def _check_cache(model: PreTrainedModel, name: str, kv_cache: str) -> None:
    """Check that a model tolerates the rounding of its keys and values in the KV cache.

    Raises:
        ModelError: It does not.
    """
    tokens = _random_rows(model)
    with _as_it_was(model):
        (exact,) = _self_test_engine(model).run([_interleaved(tokens)])
        (rounded,) = _self_test_engine(model, kv_cache).run([_interleaved(tokens)])
    error = float(_errors(rounded, exact).median())
    # A NaN error is not within the tolerance either.
    if error <= _FP8_CACHE_TOLERANCE:
        return
    raise ModelError(
        f"model {name!r}: model.kv_cache {kv_cache} changes its logits by {error:.2g} of their "
        f"spread ({_FP8_CACHE_TOLERANCE:g} allowed): 8 bits are too few for its keys and values; "
        "set model.kv_cache: auto"
    )


@torch.no_grad()
def _reason_in_self_test(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config()
    tokens = _random_rows(model)
    positions = torch.arange(_ROW, device=tokens.device)[None]

    def alone(row: torch.Tensor) -> torch.Tensor:
        return model(input_ids=row[None], position_ids=positions, use_cache=False).logits[0]

    with _as_it_was(model):
        model.set_attn_implementation("eager")
        try:
            apart = torch.stack([alone(row) for row in tokens])  # [2, _ROW, vocabulary]
        except Exception as error:
            return f"it fails on {_ROW} tokens: {type(error).__name__}: {error}"
        engine = _self_test_engine(model)
        windows = _watch_windows(engine)
        try:
            (packed,) = engine.run([_interleaved(tokens)])
        # Its code may raise anything for an argument that it does not know.
        except Exception as error:
            return f"its code does not take a packed pass: {type(error).__name__}: {error}"
    called = sorted(engine.cache.keys)
    layers = attention_layers(config)
    if isinstance(engine.model, DecoderModel):
        # Some layers of a registered family read the keys of earlier ones.
        layers = engine.model.stored_layers
    if called != layers:
        return (
            f"the attention function was called for the layers {called}, not for each of the "
            f"layers {layers} that attend"
        )
    if isinstance(engine.model, DecoderModel):
        windows = _windows_of(engine.model)
    missing = _layers_without_windows(model, windows)
    if missing:
        return (
            f"its layers {missing} have a sliding window of {config.sliding_window} tokens, which "
            "its code does not hand to the attention function"
        )
    quantized = getattr(model, "is_quantized", False)
    tolerance = _COARSE_TOLERANCE if quantized else _TOLERANCE.get(model.dtype, _COARSE_TOLERANCE)
    if getattr(model, "is_loaded_in_8bit", False):
        tolerance = _INT8_TOLERANCE
    return _reason_in_logits(packed, apart, tolerance)


def _watch_windows(engine: Engine) -> dict[int, int | None]:
    """Record which windows the attention function of an engine gets.

    Returns:
        The window of each layer that attended, by its number, once the engine has run.
    """
    windows: dict[int, int | None] = {}
    attend = engine.attend

    def noted(step: Any, layer: Any, query: torch.Tensor, key: Any, value: Any) -> torch.Tensor:
        windows[int(layer.number)] = layer.window
        return attend(step, layer, query, key, value)

    engine.attend = noted
    return windows


def _windows_of(model: DecoderModel) -> dict[int, int | None]:
    """Return the window of each layer of a registered family that attends."""
    windows: dict[int, int | None] = {}
    for number, layer in enumerate(model.layers):
        attention: Any = layer.attention
        if attention is not None:
            windows[number] = attention.layer.window
    return windows


def _layers_without_windows(model: PreTrainedModel, windows: dict[int, int | None]) -> list[int]:
    """Return the layers whose window is only in transformers' masks, which nothing reads.

    The rows of the self-test are too short to show it.

    Args:
        model: The model.
        windows: The window that each layer handed to the attention function.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    module = sys.modules[type(model).__module__]
    if not window or not hasattr(module, "create_sliding_window_causal_mask"):
        return []
    if window >= (getattr(config, "max_position_embeddings", None) or sys.maxsize):
        return []
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(windows)
    sliding = [number for number, kind in enumerate(kinds) if kind == "sliding_attention"]
    return [number for number in sliding if windows.get(number) is None]


def _reason_in_logits(packed: torch.Tensor, apart: torch.Tensor, tolerance: float) -> str | None:
    """Return what is wrong with the logits of packed rows; None if nothing is.

    Args:
        packed: Logits of the rows in one pass, [2, tokens, vocabulary].
        apart: Logits of each row alone, [2, tokens, vocabulary].
        tolerance: The error that is allowed, as a share of the spread of a token's logits.
    """
    if not apart.isfinite().all():
        return _NOT_FINITE
    errors = _errors(packed, apart)
    if tolerance >= _COARSE_TOLERANCE:
        error = float(errors.median())
    else:
        error = float(errors.max())
    # A NaN error is not within the tolerance either.
    if error <= tolerance:
        return None
    return (
        "two rows packed in one pass give other logits than each alone (off by "
        f"{error:.1e} of their spread, {tolerance:g} allowed): it does not honour position_ids, or "
        "it does more than attention between tokens"
    )


def _errors(logits: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the error of each token's logits, as a share of their spread, [rows, tokens].

    The logits are [rows, tokens, vocabulary].
    """
    exact = exact.double()
    spread = (exact - exact.mean(-1, keepdim=True)).norm(dim=-1)
    return (logits.double() - exact).norm(dim=-1) / spread.clamp_min(1e-12)


@contextmanager
def _as_it_was(model: PreTrainedModel) -> Iterator[None]:
    """Put back the attention implementation of a model, and of its parts, afterwards."""
    configs: dict[int, PretrainedConfig] = {}
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            configs[id(part.config)] = part.config
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
