"""Refuses a model that the engine cannot decode exactly, before a document is lost to it.

The engine feeds rows packed side by side, with their own positions, through an attention function of its own. That
holds for a model whose layers all call the registered function, whose RoPE frequencies do not depend on what else is
in the batch, and which has no other path between tokens. Each is checked, then seen: two short rows, their tokens
interleaved in one pass under a block-diagonal mask, must give the logits that they give apart under the model's own
eager attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from raypd.errors import ModelError

PROBE = "raypd_probe"
ROW = 8  # tokens of each of the two rows
LAYER_TYPES = ("full_attention", "sliding_attention")

# Largest error of a token's logits, as a share of their spread; the worst token counts. Right models stay below 1e-5 in
# float32; a row that sees its neighbour, or positions taken from the order of the tokens, is off by 0.1 to 2.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-3}
# Where arithmetic is coarse, the middle token counts: a rounding difference may send one token of a mixture to another
# expert. Right models were off by 0 to 0.01, under int8 by 0.13 (it treats a feature as an outlier for all rows of a
# pass, so that rows do touch each other a little), a model that ignores positions by 0.4 and more.
COARSE_TOLERANCE = 0.1
INT8_TOLERANCE = 0.25


def check_decodable(model: PreTrainedModel, name: str | None = None) -> None:
    """Leaves the model as it was, its attention implementation included. Costs three passes over 8 to 16 tokens.

    Raises:
        ModelError: the engine could not decode it exactly; with the model's name and the reason.
    """
    name = name or model.config._name_or_path or type(model).__name__
    check_architecture(model.config, type(model), name)
    reason = _reason_in_self_test(model)
    if reason is not None:
        raise _refusal(name, type(model), reason)


def check_architecture(config: PretrainedConfig, kind: type[PreTrainedModel], name: str) -> None:
    """The part of `check_decodable` that needs no weights: the configuration and the class of the model."""
    text = config.get_text_config()
    others = sorted(set(getattr(text, "layer_types", None) or ()) - set(LAYER_TYPES))
    reason = reason_in_rope(text)
    if getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder; raypd decodes decoder-only models"
    elif others:
        reason = f"it has layers of type {', '.join(others)}; every layer must be full or sliding attention"
    elif not (kind._supports_attention_backend and kind._can_set_attn_implementation()):
        reason = "its code does not take attention functions from transformers' AttentionInterface"
    if reason is not None:
        raise _refusal(name, kind, reason)


def _refusal(name: str, kind: type[PreTrainedModel], reason: str) -> ModelError:
    return ModelError(f"model {name!r} ({kind.__name__}) cannot be decoded exactly in packed rows: {reason}")


def reason_in_rope(config: PretrainedConfig) -> str | None:
    """Why the RoPE frequencies of a configuration depend on the longest row of a batch, or None if they do not."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in by_layer if by_layer and "rope_type" not in parameters else [parameters]:
        kind = str(rope.get("rope_type", "default"))
        if kind == "longrope" and rope.get("long_factor") != rope.get("short_factor"):
            return (
                "its long-rope takes other frequencies for all rows as soon as one is longer than "
                f"{rope.get('original_max_position_embeddings')} tokens; in a copy of its config.json, set "
                "`long_factor` to the values of `short_factor` and `max_position_embeddings` to that length"
            )
        if "dynamic" in kind:
            return (
                "its dynamic RoPE takes the frequencies of all rows from the longest one; in a copy of its "
                "config.json, set `rope_type` to a fixed one (default, linear or yarn)"
            )
    return None


@dataclass
class _Probe:
    """What the probe is to do, and what it saw. rows, positions: [tokens] of the pass."""

    rows: torch.Tensor
    positions: torch.Tensor
    layers: list[Any] = field(default_factory=list)


def _probe_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, tokens, head_dim]
    key: torch.Tensor,  # [1, kv_heads, tokens, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    raypd_probe: _Probe | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Dense attention, causal by position and block-diagonal by row: what the engine's attention amounts to."""
    if raypd_probe is None:
        raise _Refused("its layers do not hand unknown keyword arguments on to the attention function")
    if s_aux is not None:
        raise _Refused("its attention has sinks, which raypd's attention does not know")
    raypd_probe.layers.append(getattr(module, "layer_idx", None))
    rows, positions = raypd_probe.rows, raypd_probe.positions
    ahead = positions[:, None] - positions[None, :]
    seen = (rows[:, None] == rows[None, :]) & (ahead >= 0)
    if sliding_window is not None:
        seen &= ahead < sliding_window
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.transpose(2, 3)).to(wide) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(value.dtype)
    return (weights @ value).transpose(1, 2), None


class _Refused(Exception):
    """A reason found inside a forward pass."""


@torch.no_grad()
def _reason_in_self_test(model: PreTrainedModel) -> str | None:
    AttentionInterface.register(PROBE, _probe_attention)
    config = model.config.get_text_config()
    device = model.get_input_embeddings().weight.device
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (2, ROW), generator=draw).to(device)
    positions = torch.arange(ROW, device=device)

    def alone(row: torch.Tensor) -> torch.Tensor:
        return model(input_ids=row[None], position_ids=positions[None], use_cache=False).logits[0]

    with _attention(model, "eager"):
        try:
            apart = torch.stack([alone(row) for row in tokens])  # [2, ROW, vocabulary]
        except Exception as error:
            return f"it fails on {ROW} tokens: {type(error).__name__}: {error}"

    # Interleaved: a model that takes positions from the order of the tokens, or mixes neighbours, gives itself away.
    rows = torch.arange(2, device=device).repeat(ROW)
    probe = _Probe(rows, positions.repeat_interleave(2))
    with _attention(model, PROBE):
        try:
            packed = model(
                input_ids=tokens.T.reshape(1, -1),
                position_ids=probe.positions[None],
                use_cache=False,
                logits_to_keep=torch.arange(2 * ROW, device=device),
                raypd_probe=probe,
            ).logits[0]
        except _Refused as refused:
            return str(refused)
        except Exception as error:  # whatever its code makes of arguments that it does not know
            return f"its code does not take a packed pass: {type(error).__name__}: {error}"

    expected = list(range(config.num_hidden_layers))
    if not probe.layers:
        return "its layers do not call the registered attention function"
    if None in probe.layers:
        return "its attention modules carry no layer_idx"
    if sorted(probe.layers) != expected:
        return (
            f"the attention function was called for the layers {sorted(probe.layers)}, "
            f"not once for each of its {len(expected)} layers"
        )
    return _reason_in_logits(packed.view(ROW, 2, -1).transpose(0, 1), apart, _tolerance(model))


def _reason_in_logits(packed: torch.Tensor, apart: torch.Tensor, tolerance: float) -> str | None:
    packed, apart = packed.double(), apart.double()
    if not apart.isfinite().all():
        return "its logits are not finite numbers: the weights are broken or overflow in this dtype"
    spread = (apart - apart.mean(-1, keepdim=True)).norm(dim=-1)
    errors = (packed - apart).norm(dim=-1) / spread.clamp_min(1e-12)
    error = float(errors.median() if tolerance >= COARSE_TOLERANCE else errors.max())
    if not error <= tolerance:
        return (
            f"two rows packed in one pass give other logits than apart (off by {error:.1e} of their spread, "
            f"{tolerance:g} allowed): it does not honour position_ids, or it does more than attention between tokens"
        )
    return None


def _tolerance(model: PreTrainedModel) -> float:
    if getattr(model, "is_loaded_in_8bit", False):
        return INT8_TOLERANCE
    if getattr(model, "is_quantized", False):
        return COARSE_TOLERANCE
    return TOLERANCE.get(model.dtype, COARSE_TOLERANCE)


@contextmanager
def _attention(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """The model under another attention function, and as it was afterwards (the configurations of its parts too)."""
    configs = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
    before = [(config, config._attn_implementation) for config in configs.values()]
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        for config, old in before:
            config._attn_implementation_internal = old
