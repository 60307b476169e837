"""What recurrent and convolution layers of transformers compute, over the runs of a pass.

A `Mixer` takes the place of the `forward` of a module of transformers and reads its weights. The
tokens of all runs go through its products together. Its scan takes all runs at once (scans.py), or,
on a GPU, in batches by the kernels of flash-linear-attention or mamba-ssm where they are installed.
On a CPU native.c scans token by token, which keeps a head's state close to the processor.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch.nn.functional import silu, softplus
from transformers.activations import ACT2FN

import raypd.decoding.native as native
from raypd.decoding.recurrence.plan import RecurrentPass
from raypd.decoding.recurrence.scans import DeltaInputs, MambaInputs, delta_chunks, mamba_chunks
from raypd.decoding.recurrence.states import StateShape

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

    @property
    def module(self) -> Any:
        """The file of transformers with the layer."""
        return sys.modules[type(self.source).__module__]

    @cached_property
    def in_c(self) -> bool:
        """Whether native.c scans the runs. Rows of a state are whole vectors then."""
        assert self.recurrent_shape is not None
        is_on_cpu = self.source.out_proj.weight.device.type == "cpu"
        return is_on_cpu and self.recurrent_shape[-1] % 16 == 0 and native.refusal() is None

    def installed(self, function: Callable[..., Any], package: str) -> Callable[..., Any] | None:
        """Return transformers' function if it is a package's kernel that can run here."""
        is_on_gpu = self.source.out_proj.weight.device.type == "cuda"
        if is_on_gpu and importlib.util.find_spec(package) is not None:
            return function
        return None


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
        if work.has_gradients:
            self._scan_in_chunks(work, query, key, value, decay, beta, out)
        elif self.scan_kernel is not None:
            self._scan_by_kernel(work, query, key, value, decay, beta, out)
        elif self.in_c:
            self._scan_in_c(work, query, key, value, decay, beta, out)
        else:
            self._scan_in_chunks(work, query, key, value, decay, beta, out)
        out = source.norm(out.flatten(0, 1), gates.flatten(0, 1)).unflatten(0, (len(x), -1))
        return source.out_proj(out.flatten(1))

    @cached_property
    def scan_kernel(self) -> Callable[..., Any] | None:
        """The kernel of flash-linear-attention; None where it cannot run."""
        function = self.module.torch_chunk_gated_delta_rule
        return self.installed(function, "fla")

    def _scan_by_kernel(
        self,
        work: RecurrentPass,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Scan the runs in batches, and write the result to `out`; see `_scan_in_chunks`."""
        states = work.states(self.number)
        for batch in work.batches:
            name = "torch_chunk_gated_delta_rule"
            if batch.length == 1:
                name = "torch_recurrent_gated_delta_rule"
            # With beta 0 and decay 0 padding leaves the state as it is.
            mixed, end = getattr(self.module, name)(
                batch.take(query),
                batch.take(key),
                batch.take(value),
                g=batch.take_masked(decay),
                beta=batch.take_masked(beta),
                initial_state=states.index_select(0, batch.starts),
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            batch.put(out, mixed)
            states.index_copy_(0, batch.ends, end.to(states.dtype))

    def _scan_in_c(
        self,
        work: RecurrentPass,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Scan the runs token by token, and write the result to `out`; see `_scan_in_chunks`."""
        query = _normed(query.float()) * query.shape[-1] ** -0.5
        key = _normed(key.float())
        value = value.float().contiguous()
        kept = decay.float().exp()
        beta = beta.float().contiguous()
        scanned = torch.empty_like(value)
        for runs in work.levels:
            states = work.states(self.number)
            native.delta_scan(states, runs, query, key, value, kept, beta, scanned)
        out.copy_(scanned)

    def _scan_in_chunks(
        self,
        work: RecurrentPass,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Scan all runs, and write the result to `out`.

        Args:
            work: The runs.
            query: [tokens, key heads, key dimension]
            key: [tokens, key heads, key dimension]
            value: [tokens, value heads, value dimension]
            decay: The logarithm of what remains of the state, [tokens, value heads].
            beta: The rate of writing, [tokens, value heads].
            out: [tokens, value heads, value dimension]
        """
        repeat = value.shape[1] // key.shape[1]
        query = _normed(query.float()) * query.shape[-1] ** -0.5
        key = _normed(key.float())
        inputs = DeltaInputs(
            query.repeat_interleave(repeat, 1),
            key.repeat_interleave(repeat, 1),
            value.float(),
            decay.float(),
            beta.float(),
        )
        # Under autocast products would be in bfloat16.
        with torch.autocast(value.device.type, enabled=False):
            scans = [delta_chunks(group, inputs) for group in work.chunks.groups]
            work.scan(self.number, scans, out)


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
        if work.has_gradients:
            self._scan_in_chunks(work, inputs, steps, keys, queries, rates, out)
        elif self.scan_kernel is not None:
            self._scan_by_kernel(work, inputs, steps, keys, queries, rates, out)
        elif self.in_c:
            self._scan_in_c(work, inputs, steps, keys, queries, rates, out)
        else:
            self._scan_in_chunks(work, inputs, steps, keys, queries, rates, out)
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

    @cached_property
    def scan_kernel(self) -> Callable[..., Any] | None:
        """The kernel of mamba-ssm; None where it cannot run."""
        function = self.module.mamba2_chunk_scan
        return self.installed(function, "mamba_ssm")

    def _scan_by_kernel(
        self,
        work: RecurrentPass,
        inputs: torch.Tensor,
        steps: torch.Tensor,
        keys: torch.Tensor,
        queries: torch.Tensor,
        rates: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Scan the runs in batches, and write the result to `out`; see `_scan_in_chunks`."""
        assert self.scan_kernel is not None
        states = work.states(self.number)
        for batch in work.batches:
            # With a step of 0 padding leaves the state as it is.
            mixed, end = self.scan_kernel(
                batch.take(inputs),
                batch.take_masked(steps),
                rates,
                batch.take(keys),
                batch.take(queries),
                chunk_size=self.source.chunk_size,
                D=self.source.D,
                initial_states=states.index_select(0, batch.starts),
                return_final_states=True,
            )
            batch.put(out, mixed)
            states.index_copy_(0, batch.ends, end.to(states.dtype))

    def _scan_in_c(
        self,
        work: RecurrentPass,
        inputs: torch.Tensor,
        steps: torch.Tensor,
        keys: torch.Tensor,
        queries: torch.Tensor,
        rates: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Scan the runs token by token, and write the result to `out`; see `_scan_in_chunks`."""
        inputs = inputs.float()
        written = (inputs * steps[..., None]).contiguous()
        keys = keys.float().contiguous()
        queries = queries.float().contiguous()
        kept = (steps * rates).exp()
        for runs in work.levels:
            native.mamba_scan(work.states(self.number), runs, written, keys, queries, kept, out)
        out.addcmul_(self.source.D.float()[:, None], inputs)

    def _scan_in_chunks(
        self,
        work: RecurrentPass,
        inputs: torch.Tensor,
        steps: torch.Tensor,
        keys: torch.Tensor,
        queries: torch.Tensor,
        rates: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Scan all runs, and write the result to `out`.

        Args:
            work: The runs.
            inputs: [tokens, heads, head dimension]
            steps: [tokens, heads]
            keys: What is written into the state (B), [tokens, groups, state size].
            queries: What is read of it (C), [tokens, groups, state size].
            rates: The rate of forgetting (A), [heads].
            out: [tokens, heads, head dimension]
        """
        repeat = inputs.shape[1] // keys.shape[1]
        wide = inputs.float()
        given = MambaInputs(
            wide,
            steps,
            keys.float().repeat_interleave(repeat, 1),
            queries.float().repeat_interleave(repeat, 1),
            rates,
        )
        # Under autocast products would be in bfloat16.
        with torch.autocast(wide.device.type, enabled=False):
            scans = [mamba_chunks(group, given) for group in work.chunks.groups]
            work.scan(self.number, scans, out)
        # The share of the input that goes to the output (D).
        out.addcmul_(self.source.D.float()[:, None], wide)


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
