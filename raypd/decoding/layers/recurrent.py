"""Recurrent and convolution layers in torch, over the runs of a pass, up to their output product.

The tokens of all runs go through the products together. A scan takes all runs at once (scans.py),
or, on a GPU, in batches with the kernels of flash-linear-attention or mamba-ssm if they are
installed. On a CPU native.c scans token by token, which keeps a head's state in the processor's
caches.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any, ClassVar

import torch
from torch.nn.functional import silu, softplus
from transformers.activations import ACT2FN

import raypd.decoding.native as native
from raypd.decoding.attention.step import Step
from raypd.decoding.layers.sources import RecurrentSource
from raypd.decoding.recurrence.plan import RecurrentPass
from raypd.decoding.recurrence.scans import DeltaInputs, MambaInputs, delta_chunks, mamba_chunks
from raypd.decoding.recurrence.states import StateShape

_NORM_EPS = 1e-6  # For the norm of the gated delta rule's queries and keys.


@cache
def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


class Projection(torch.nn.Module):
    """The layers that read the hidden states, computed by the transformers modules."""

    order: torch.Tensor | None

    def __init__(self, source: RecurrentSource) -> None:
        super().__init__()
        self.names = source.linears.names
        self.linears = torch.nn.ModuleList(source.linears.modules)
        self.register_buffer("order", source.order, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden size] -> [tokens, outputs]"""
        parts = [linear(x) for linear in self.linears]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return joined if self.order is None else joined[:, self.order]


class Joined(torch.nn.Module):
    """Products side by side that read the same inputs."""

    def __init__(self, products: list[Any]) -> None:
        super().__init__()
        self.products = torch.nn.ModuleList(products)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, inputs] -> [tokens, outputs of all]"""
        return torch.cat([product(x) for product in self.products], -1)


def joined_parts(products: list[Any]) -> torch.nn.Module:
    """Return products side by side as one."""
    return products[0] if len(products) == 1 else Joined(products)


class Recurrence(torch.nn.Module):
    """A recurrent or convolution layer, up to its output product.

    Attributes:
        number: Its index among the model's recurrent layers.
        projection: Projects the hidden states to what the layer reads.
    """

    factors: torch.Tensor | None
    # Whether it reads rows in FP8.
    reads_fp8 = False
    # The name of the convolution in the transformers module.
    convolution: ClassVar[str] = "conv1d"
    projection: torch.nn.Module

    def __init__(self, source: RecurrentSource, number: int) -> None:
        """
        Args:
            source: What the layer computes.
            number: Its index among the model's recurrent layers.
        """
        super().__init__()
        self.number = number
        self.conv = getattr(source.module, self.convolution)
        self.input_factor = source.input_factor
        self.register_buffer("factors", source.factors, persistent=False)
        # The transformers module file that defines the layer.
        self.file = type(source.module).__module__
        self.take(source)

    def take(self, source: RecurrentSource) -> None:
        """Take the linear layers."""
        self.projection = Projection(source)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Compute the layer over a pass.

        Args:
            x: [tokens, hidden size]
            step: The pass.

        Returns:
            What the output product reads, [tokens, its inputs].
        """
        assert step.recurrence is not None
        return self.over(x, step.recurrence)

    def over(self, x: torch.Tensor, work: RecurrentPass) -> torch.Tensor:
        """Compute the layer over the runs of a pass, as `forward` does."""
        if self.input_factor != 1.0:
            x = x * self.input_factor
        projected = self.projection(x)
        if self.factors is not None:
            projected = projected * self.factors.to(projected.device)
        return self.mix(projected, work)

    def mix(self, projected: torch.Tensor, work: RecurrentPass) -> torch.Tensor:
        """Compute everything after the projection, [tokens, outputs] -> [tokens, ...]."""
        raise NotImplementedError

    @property
    def state(self) -> StateShape:
        """What the layer remembers of a text."""
        inputs = self.conv.kernel_size[0] - 1
        dtype = self.conv.weight.dtype
        return StateShape(inputs, self.conv.in_channels, dtype, self.recurrent_shape)

    @property
    def recurrent_shape(self) -> tuple[int, ...] | None:
        """The shape of a recurrent state; None for a convolution alone."""
        return None

    def convolve(self, values: torch.Tensor, work: RecurrentPass) -> torch.Tensor:
        """Apply the layer's convolution, without activation, to [tokens, channels]."""
        return work.convolve(self.number, values, self.conv.weight.squeeze(1), self.conv.bias)

    def function(self, name: str) -> Callable[..., Any]:
        """Return a function from the transformers file that defines the layer."""
        found: Callable[..., Any] = getattr(sys.modules[self.file], name)
        return found

    @cached_property
    def in_c(self) -> bool:
        """Whether native.c scans the runs. Rows of a state are whole vectors then."""
        assert self.recurrent_shape is not None
        is_on_cpu = self.conv.weight.device.type == "cpu"
        return is_on_cpu and self.recurrent_shape[-1] % 16 == 0 and native.refusal() is None

    def has_package(self, package: str) -> bool:
        """Return whether a package's kernels replace transformers' functions here."""
        return self.conv.weight.device.type == "cuda" and _is_installed(package)


class GatedDelta(Recurrence):
    """A gated delta net of Qwen3.5, Qwen3.6 or Qwen3-Next.

    The projection returns queries, keys, values, the gates of the outputs, and the rates of writing
    and forgetting before their activations.
    """

    def take(self, source: RecurrentSource) -> None:
        super().take(source)
        module = source.module
        self.key_heads = int(module.num_k_heads)
        self.heads = int(module.num_v_heads)
        self.key_dim = int(module.head_k_dim)
        self.value_dim = int(module.head_v_dim)
        self.activation = ACT2FN[module.activation]
        self.decay = module.A_log
        self.offset = module.dt_bias
        self.norm = module.norm

    @property
    def recurrent_shape(self) -> tuple[int, ...]:
        return self.heads, self.key_dim, self.value_dim

    @property
    def in_c(self) -> bool:
        """Whether native.c scans the runs."""
        # Queries and keys are whole vectors there, too.
        return super().in_c and self.key_dim % 16 == 0 and self.key_dim <= native.MOST_KEYS

    @property
    def sizes(self) -> list[int]:
        """Outputs of the projection: convolved ones, gates and both kinds of rates."""
        return [self.conv.in_channels, self.heads * self.value_dim, self.heads, self.heads]

    def mix(self, projected: torch.Tensor, work: RecurrentPass) -> torch.Tensor:
        values, gates, writing, forgetting = projected.split(self.sizes, -1)
        mixed = self.activation(self.convolve(values, work))
        beta = writing.sigmoid()
        decay = -self.decay.float().exp() * softplus(forgetting.float() + self.offset)
        if work.has_gradients:
            out = self._scan_in_chunks(work, mixed, decay, beta)
        elif self.has_package("fla"):
            out = self._scan_by_kernel(work, mixed, decay, beta)
        elif self.in_c:
            out = native.delta_scan(
                work.states(self.number),
                work.runs,
                mixed.float().contiguous(),
                decay.float().exp(),
                beta.float().contiguous(),
                self.key_heads,
            ).to(mixed.dtype)
        else:
            out = self._scan_in_chunks(work, mixed, decay, beta)
        heads = gates.unflatten(-1, (-1, self.value_dim))
        normed = self.norm(out.flatten(0, 1), heads.flatten(0, 1))
        return normed.view(len(projected), -1)

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split [tokens, channels] into queries, keys and values, [tokens, heads, dimension]."""
        key_size = self.key_heads * self.key_dim
        query, key, value = mixed.split([key_size, key_size, self.heads * self.value_dim], -1)
        return (
            query.unflatten(-1, (-1, self.key_dim)),
            key.unflatten(-1, (-1, self.key_dim)),
            value.unflatten(-1, (-1, self.value_dim)),
        )

    def _scan_by_kernel(
        self, work: RecurrentPass, mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        """Scan the runs in batches with flash-linear-attention; see `_scan_in_chunks`."""
        query, key, value = self._heads(mixed)
        out = torch.empty_like(value)
        states = work.states(self.number)
        for batch in work.batches:
            name = "torch_chunk_gated_delta_rule"
            if batch.length == 1:
                name = "torch_recurrent_gated_delta_rule"
            # With beta 0 and decay 0, padding leaves the state unchanged.
            scanned, end = self.function(name)(
                batch.take(query),
                batch.take(key),
                batch.take(value),
                g=batch.take_masked(decay),
                beta=batch.take_masked(beta),
                initial_state=states.index_select(0, batch.starts),
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            batch.put(out, scanned)
            states.index_copy_(0, batch.ends, end.to(states.dtype))
        return out

    def _scan_in_chunks(
        self, work: RecurrentPass, mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        """Scan all runs.

        Args:
            work: The runs.
            mixed: Queries, keys and values, [tokens, channels].
            decay: The logarithm of what remains of the state, [tokens, heads].
            beta: The rate of writing, [tokens, heads].

        Returns:
            [tokens, heads, value dimension]
        """
        query, key, value = self._heads(mixed)
        out = torch.empty_like(value)
        repeat = self.heads // self.key_heads
        query = _normed(query.float()) * self.key_dim**-0.5
        key = _normed(key.float())
        inputs = DeltaInputs(
            query.repeat_interleave(repeat, 1),
            key.repeat_interleave(repeat, 1),
            value.float(),
            decay.float(),
            beta.float(),
        )
        # Under autocast, the products would be in bfloat16.
        with torch.autocast(value.device.type, enabled=False):
            scans = [delta_chunks(group, inputs) for group in work.chunks.groups]
            work.scan(self.number, scans, out)
        return out


def _normed(x: torch.Tensor) -> torch.Tensor:
    """Divide vectors by their length."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _NORM_EPS)


class Mamba2(Recurrence):
    """A Mamba-2 layer of Granite 4-H, Bamba, Falcon-H1 or Nemotron-H.

    The projection returns the gates of the outputs, the inputs of the convolution, and the step
    sizes before their activation. The convolution returns the inputs, and what is written into (B)
    and read from (C) the state.
    """

    def take(self, source: RecurrentSource) -> None:
        super().take(source)
        module = source.module
        self.heads = int(module.num_heads)
        self.key_groups = int(module.n_groups)
        self.head_dim = int(module.head_dim)
        self.state_size = int(module.ssm_state_size)
        self.chunk_size = int(module.chunk_size)
        self.activation = ACT2FN[module.activation]
        lowest, highest = module.time_step_limit
        self.limits = (float(lowest), float(highest))
        self.decay = module.A_log
        self.offset = module.dt_bias
        self.through = module.D
        self.norm = module.norm

    @property
    def recurrent_shape(self) -> tuple[int, ...]:
        return self.heads, self.head_dim, self.state_size

    @property
    def group_size(self) -> int:
        """How many elements the norm, if there is one, divides by the same root mean square."""
        if hasattr(self.norm, "group_size"):
            return int(self.norm.group_size)
        return self.heads * self.head_dim // int(getattr(self.norm, "n_groups", 1))

    @property
    def is_gated_first(self) -> bool:
        """Whether the gates come before the norm."""
        return not getattr(self.norm, "norm_before_gate", False)

    @property
    def sizes(self) -> list[int]:
        """Outputs of the projection: gates, convolved ones and step sizes."""
        return [self.heads * self.head_dim, self.conv.in_channels, self.heads]

    def mix(self, projected: torch.Tensor, work: RecurrentPass) -> torch.Tensor:
        gates, values, steps = projected.split(self.sizes, -1)
        mixed = self.activation(self.convolve(values, work))
        # This is as in a pass without a cache. When it decodes a single token, transformers omits
        # the limits, so its answers depend on how a text is split into passes.
        steps = softplus(steps.float() + self.offset.float()).clamp(*self.limits)
        rates = -self.decay.float().exp()
        if work.has_gradients:
            out = self._scan_in_chunks(work, mixed, steps, rates)
        elif self.has_package("mamba_ssm"):
            out = self._scan_by_kernel(work, mixed, steps, rates)
        elif self.in_c:
            out = native.mamba_scan(
                work.states(self.number),
                work.runs,
                mixed.float().contiguous(),
                steps.contiguous(),
                (steps * rates).exp(),
                self.through.float(),
                self.key_groups,
            )
        else:
            out = self._scan_in_chunks(work, mixed, steps, rates)
        return self._gate(out.flatten(1), gates).to(projected.dtype)

    def _gate(self, out: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Norm and gate the scan's output, [tokens, intermediate size]."""
        if isinstance(self.norm, torch.nn.Identity):
            return out * silu(gates)
        return self.norm(out[None], gates[None])[0]

    def _parts(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split [tokens, channels] into inputs [tokens, heads, head dimension], and what is written
        into and read from the state, [tokens, groups, state size] each.
        """
        key_size = self.key_groups * self.state_size
        sizes = [self.heads * self.head_dim, key_size, key_size]
        inputs, keys, queries = mixed.split(sizes, -1)
        return (
            inputs.unflatten(-1, (-1, self.head_dim)),
            keys.unflatten(-1, (self.key_groups, -1)),
            queries.unflatten(-1, (self.key_groups, -1)),
        )

    def _scan_by_kernel(
        self, work: RecurrentPass, mixed: torch.Tensor, steps: torch.Tensor, rates: torch.Tensor
    ) -> torch.Tensor:
        """Scan the runs in batches with mamba-ssm; see `_scan_in_chunks`."""
        inputs, keys, queries = self._parts(mixed)
        out = torch.empty_like(inputs, dtype=torch.float32)
        states = work.states(self.number)
        for batch in work.batches:
            # With a step of 0, padding leaves the state unchanged.
            scanned, end = self.function("mamba2_chunk_scan")(
                batch.take(inputs),
                batch.take_masked(steps),
                rates,
                batch.take(keys),
                batch.take(queries),
                chunk_size=self.chunk_size,
                D=self.through,
                initial_states=states.index_select(0, batch.starts),
                return_final_states=True,
            )
            batch.put(out, scanned)
            states.index_copy_(0, batch.ends, end.to(states.dtype))
        return out

    def _scan_in_chunks(
        self, work: RecurrentPass, mixed: torch.Tensor, steps: torch.Tensor, rates: torch.Tensor
    ) -> torch.Tensor:
        """Scan all runs.

        Args:
            work: The runs.
            mixed: The inputs, and what is written into and read from the state, [tokens, channels].
            steps: [tokens, heads]
            rates: The rate of forgetting (A), [heads].

        Returns:
            [tokens, heads, head dimension]
        """
        inputs, keys, queries = self._parts(mixed)
        repeat = self.heads // self.key_groups
        wide = inputs.float()
        out = torch.empty_like(wide)
        scan_inputs = MambaInputs(
            wide,
            steps,
            keys.float().repeat_interleave(repeat, 1),
            queries.float().repeat_interleave(repeat, 1),
            rates,
        )
        # Under autocast, the products would be in bfloat16.
        with torch.autocast(wide.device.type, enabled=False):
            scans = [mamba_chunks(group, scan_inputs) for group in work.chunks.groups]
            work.scan(self.number, scans, out)
        # The share of the input that goes to the output (D).
        return out.addcmul_(self.through.float()[:, None], wide)


class ShortConvolution(Recurrence):
    """A gated short convolution of LFM2.

    The projection returns the gates of the inputs, those of the outputs, and the inputs.
    """

    convolution = "conv"

    def mix(self, projected: torch.Tensor, work: RecurrentPass) -> torch.Tensor:
        entering, leaving, values = projected.chunk(3, -1)
        return leaving * self.convolve(entering * values, work)
