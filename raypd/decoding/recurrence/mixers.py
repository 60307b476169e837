"""What recurrent and convolution layers of transformers compute, over the runs of a pass.

A `Mixer` takes the place of the `forward` of a module of transformers and reads its weights. The
tokens of all runs go through its products together. Its scan takes the runs in batches: one call
for all runs of one token, which is how branches are decoded, and transformers' own functions, or
the kernels of flash-linear-attention or mamba-ssm where they are installed, for longer ones.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.nn.functional import silu, softplus
from transformers.activations import ACT2FN

from raypd.decoding.recurrence.plan import RecurrentPass, RunBatch
from raypd.decoding.recurrence.states import StateShape

# Chunks of the gated delta rule are at most this long.
_DELTA_CHUNK = 64
_NORM_EPS = 1e-6  # Of the gated delta rule's queries and keys.


class CurrentPass:
    """The pass that a model is computing, if its engine called it."""

    work: RecurrentPass | None = None


class Mixer:
    """A recurrent layer over the runs of a pass.

    Attributes:
        source: The module of transformers.
        number: Number of the layer among the recurrent ones.
        current: The pass that the model is computing.
    """

    # The name of the module's convolution.
    convolution: ClassVar[str] = "conv1d"

    def __init__(self, source: Any, number: int, current: CurrentPass) -> None:
        self.source = source
        self.number = number
        self.current = current
        self.alone: Callable[..., torch.Tensor] = source.forward

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        """Compute the layer as `compute` does, or as transformers does outside of an engine."""
        work = self.current.work
        if work is None:
            return self.alone(hidden_states, *args, **named)
        return self.compute(hidden_states[0], work)[None]

    def compute(self, x: torch.Tensor, work: RecurrentPass) -> torch.Tensor:
        """Compute the layer over a pass, [tokens, hidden size] -> [tokens, hidden size]."""
        raise NotImplementedError

    @property
    def state(self) -> StateShape:
        """What the layer remembers of a text."""
        conv = getattr(self.source, self.convolution)
        inputs = conv.kernel_size[0] - 1
        return StateShape(inputs, conv.in_channels, conv.weight.dtype, self.recurrent_shape)

    @property
    def recurrent_shape(self) -> tuple[int, ...] | None:
        """The shape of a recurrent state; None for a convolution alone."""
        return None

    def convolve(self, values: torch.Tensor, work: RecurrentPass) -> torch.Tensor:
        """Apply the layer's convolution, without activation, to [tokens, channels]."""
        conv = getattr(self.source, self.convolution)
        return work.convolve(self.number, values, conv.weight.squeeze(1), conv.bias)

    def function(self, name: str) -> Callable[..., Any]:
        """Return a function of the module's file, as the device needs it."""
        function = getattr(sys.modules[type(self.source).__module__], name)
        if self.source.out_proj.weight.device.type == "cpu":
            # The kernels that a package may have put in its place are for GPUs.
            return inspect.unwrap(function)
        return function


class GatedDelta(Mixer):
    """A gated delta net of Qwen3.5 and Qwen3.6, dense or with experts."""

    @property
    def recurrent_shape(self) -> tuple[int, ...]:
        return self.source.num_v_heads, self.source.head_k_dim, self.source.head_v_dim

    def project(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the convolution's inputs, the output's gates, and the rates before activation.

        Returns:
            [tokens, channels], [tokens, value heads, value dimension], and the rates of writing and
            of forgetting, [tokens, value heads] each.
        """
        source = self.source
        gates = source.in_proj_z(x).unflatten(-1, (-1, source.head_v_dim))
        return source.in_proj_qkv(x), gates, source.in_proj_b(x), source.in_proj_a(x)

    def compute(self, x: torch.Tensor, work: RecurrentPass) -> torch.Tensor:
        source = self.source
        values, gates, writing, forgetting = self.project(x)
        values = ACT2FN[source.activation](self.convolve(values, work))
        query, key, value = values.split([source.key_dim, source.key_dim, source.value_dim], -1)
        query = query.unflatten(-1, (-1, source.head_k_dim))
        key = key.unflatten(-1, (-1, source.head_k_dim))
        value = value.unflatten(-1, (-1, source.head_v_dim))
        beta = writing.sigmoid()
        decay = -source.A_log.float().exp() * softplus(forgetting.float() + source.dt_bias)
        out = torch.empty_like(value)
        states = work.pool.recurrent[self.number]
        assert states is not None
        for batch in work.batches:
            # With beta 0 and decay 0 padding leaves the state as it is.
            arguments = (
                batch.take(query),
                batch.take(key),
                batch.take(value),
                batch.take_masked(decay),
                batch.take_masked(beta),
            )
            start = states.index_select(0, batch.starts)
            if batch.length == 1 and x.device.type == "cpu":
                mixed, end = _delta_step(*arguments, start)
            else:
                mixed, end = self._scan(batch.length, *arguments, start)
            batch.put(out, mixed)
            states.index_copy_(0, batch.ends, end.to(states.dtype))
        out = source.norm(out.flatten(0, 1), gates.flatten(0, 1)).unflatten(0, (len(x), -1))
        return source.out_proj(out.flatten(1))

    def _scan(
        self,
        length: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        start: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute runs by transformers' functions; see `_delta_step`."""
        arguments: dict[str, Any] = {
            "g": decay,
            "beta": beta,
            "initial_state": start,
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": True,
        }
        if length == 1:
            recur = self.function("torch_recurrent_gated_delta_rule")
            mixed, end = recur(query, key, value, **arguments)
            return mixed, end
        if query.device.type == "cpu":
            arguments["chunk_size"] = min(_DELTA_CHUNK, length)
        scan = self.function("torch_chunk_gated_delta_rule")
        mixed, end = scan(query, key, value, **arguments)
        return mixed, end


class GatedDeltaNext(GatedDelta):
    """A gated delta net of Qwen3-Next, which has two products in place of four."""

    def project(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        source = self.source
        query, key, value, gates, writing, forgetting = source.fix_query_key_value_ordering(
            source.in_proj_qkvz(x[None]), source.in_proj_ba(x[None])
        )
        values = torch.cat([part[0].flatten(1) for part in (query, key, value)], -1)
        return values, gates[0], writing[0], forgetting[0]


def _delta_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the gated delta rule to one token of each run.

    transformers' function of the same result reads and writes the states twice as often.

    Args:
        query: [runs, 1, key heads, key dimension]
        key: [runs, 1, key heads, key dimension]
        value: [runs, 1, value heads, value dimension]
        decay: The logarithm of what remains of the state, [runs, 1, value heads].
        beta: The rate of writing, [runs, 1, value heads].
        state: [runs, value heads, key dimension, value dimension]; it is overwritten.

    Returns:
        [runs, 1, value heads, value dimension], and the states behind the tokens.
    """
    runs, heads, key_dim, value_dim = state.shape
    repeat = heads // key.shape[2]
    query = _normed(query[:, 0].float()) * key_dim**-0.5
    key = _normed(key[:, 0].float())
    # Key and query of each value head read the state in one product.
    both = torch.stack([key, query], 2).repeat_interleave(repeat, 1)  # [runs, heads, 2, key_dim]
    flat = state.view(runs * heads, key_dim, value_dim)
    read = torch.bmm(both.view(runs * heads, 2, key_dim), flat).view(runs, heads, 2, value_dim)
    kept = decay[:, 0].float().exp()[..., None]  # [runs, heads, 1]
    change = (value[:, 0].float() - kept * read[:, :, 0]) * beta[:, 0].float()[..., None]
    products = (both[:, :, 0] * both[:, :, 1]).sum(-1, keepdim=True)  # [runs, heads, 1]
    out = kept * read[:, :, 1] + products * change
    state.mul_(kept[..., None])
    state.addcmul_(both[:, :, 0, :, None], change[:, :, None])
    return out[:, None], state


def _normed(x: torch.Tensor) -> torch.Tensor:
    """Divide vectors by their length."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _NORM_EPS)


class Mamba2(Mixer):
    """A Mamba-2 layer of Granite 4-H, Bamba, Falcon-H1 or Nemotron-H."""

    @property
    def recurrent_shape(self) -> tuple[int, ...]:
        return self.source.num_heads, self.source.head_dim, self.source.ssm_state_size

    def compute(self, x: torch.Tensor, work: RecurrentPass) -> torch.Tensor:
        source = self.source
        projected = self._project(x)
        sizes = [source.intermediate_size, source.conv_dim, source.num_heads]
        gates, values, steps = projected.split(sizes, -1)
        values = ACT2FN[source.activation](self.convolve(values, work))
        group_size = source.n_groups * source.ssm_state_size
        inputs, keys, queries = values.split([source.intermediate_size, group_size, group_size], -1)
        inputs = inputs.unflatten(-1, (-1, source.head_dim))
        keys = keys.unflatten(-1, (source.n_groups, -1))
        queries = queries.unflatten(-1, (source.n_groups, -1))
        # As in a pass without a cache. transformers leaves the limits out where it decodes one
        # token, so that its answers depend on how a text is split into passes.
        steps = softplus(steps.float() + source.dt_bias.float()).clamp(*source.time_step_limit)
        rates = -source.A_log.float().exp()
        out = torch.empty_like(inputs, dtype=torch.float32)
        states = work.pool.recurrent[self.number]
        assert states is not None
        for batch in work.batches:
            # With a step of 0 padding leaves the state as it is.
            arguments = (
                batch.take(inputs),
                batch.take_masked(steps),
                batch.take(keys),
                batch.take(queries),
            )
            start = states.index_select(0, batch.starts)
            if batch.length == 1:
                mixed, end = _mamba_step(*arguments, rates, source.D.float(), start)
            else:
                mixed, end = self._scan(batch, *arguments, rates, start)
            batch.put(out, mixed)
            states.index_copy_(0, batch.ends, end.to(states.dtype))
        return source.out_proj(self._gate(out.flatten(1), gates).to(x.dtype))

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        """Compute gates, the convolution's inputs and step sizes, [tokens, all of them]."""
        if not hasattr(self.source, "mup_vector"):
            return self.source.in_proj(x)
        # Falcon-H1 scales what goes in and what comes out.
        return self.source.in_proj(x * self.source.ssm_in_multiplier) * self.source.mup_vector[0]

    def _gate(self, out: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Norm and gate the scan's output [tokens, intermediate size]."""
        if isinstance(self.source.norm, torch.nn.Identity):
            return out * silu(gates)
        return self.source.norm(out[None], gates[None])[0]

    def _scan(
        self,
        batch: RunBatch,
        inputs: torch.Tensor,
        steps: torch.Tensor,
        keys: torch.Tensor,
        queries: torch.Tensor,
        rates: torch.Tensor,
        start: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute runs by transformers' function; see `_mamba_step`."""
        scan = self.function("mamba2_chunk_scan")
        chunk_size = self.source.chunk_size
        if inputs.device.type == "cpu":
            chunk_size = min(chunk_size, batch.length)
        mixed, end = scan(
            inputs,
            steps,
            rates,
            keys,
            queries,
            chunk_size=chunk_size,
            D=self.source.D,
            initial_states=start,
            return_final_states=True,
        )
        return mixed, end


def _mamba_step(
    inputs: torch.Tensor,
    steps: torch.Tensor,
    keys: torch.Tensor,
    queries: torch.Tensor,
    rates: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the recurrence of Mamba-2 to one token of each run.

    Args:
        inputs: [runs, 1, heads, head dimension]
        steps: [runs, 1, heads]
        keys: What is written into the state (B), [runs, 1, groups, state size].
        queries: What is read of it (C), [runs, 1, groups, state size].
        rates: The rate of forgetting (A), [heads].
        skip: The share of the input that goes to the output (D), [heads].
        state: [runs, heads, head dimension, state size]; it is overwritten.

    Returns:
        [runs, 1, heads, head dimension], and the states behind the tokens.
    """
    runs, heads, head_dim, state_size = state.shape
    repeat = heads // keys.shape[2]
    inputs = inputs[:, 0].float()
    steps = steps[:, 0]
    keys = keys[:, 0].float().repeat_interleave(repeat, 1)  # [runs, heads, state size]
    queries = queries[:, 0].float().repeat_interleave(repeat, 1)
    written = inputs * steps[..., None]  # [runs, heads, head_dim]
    state.mul_((steps * rates).exp()[..., None, None])
    state.addcmul_(written[..., None], keys[:, :, None])
    flat = state.view(runs * heads, head_dim, state_size)
    out = torch.bmm(flat, queries.reshape(runs * heads, state_size, 1)).view_as(inputs)
    return (out + skip[:, None] * inputs)[:, None], state


class ShortConvolution(Mixer):
    """A gated short convolution of LFM2."""

    convolution = "conv"

    def compute(self, x: torch.Tensor, work: RecurrentPass) -> torch.Tensor:
        source = self.source
        entering, leaving, values = source.in_proj(x).chunk(3, -1)
        return source.out_proj(leaving * self.convolve(entering * values, work))


# The mixer for each class of modules of transformers.
MIXERS: dict[str, type[Mixer]] = {
    "Qwen3_5GatedDeltaNet": GatedDelta,
    "Qwen3_5MoeGatedDeltaNet": GatedDelta,
    "Qwen3NextGatedDeltaNet": GatedDeltaNext,
    "GraniteMoeHybridMambaLayer": Mamba2,
    "BambaMixer": Mamba2,
    "FalconH1Mixer": Mamba2,
    "NemotronHMamba2Mixer": Mamba2,
    "Lfm2ShortConv": ShortConvolution,
    "Lfm2MoeShortConv": ShortConvolution,
}
