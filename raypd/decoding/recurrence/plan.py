"""What recurrent layers read about a pass: its runs in batches, as indices on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch

from raypd.decoding.native import RecurrentRuns, Taps
from raypd.decoding.recurrence.chains import RecurrentRun
from raypd.decoding.recurrence.states import EMPTY, StatePool
from raypd.decoding.transfer import to_device

# Runs of 2 to this many tokens go into one batch, even if their lengths differ.
_SHORT_RUN = 16
# The sizes to which chunks are padded. Longer runs are cut into chunks of the largest size.
_CHUNK_SIZES = (1, 8, 16, 32)


@dataclass(eq=False)
class RunBatch:
    """Runs of one level that are computed in one call, padded to the longest of them.

    Attributes:
        length: The number of tokens of the longest run.
        starts: The slots of the states from which the runs continue, [runs].
        ends: The slots of the states after them, [runs].
        rows: The rows of their tokens in the pass, [runs, length]. Padding repeats the last row.
        is_token: 0 where `rows` is padding, else 1, [runs, length, 1]; None without padding.
        numbers: The indices of the tokens in `rows`, [tokens]; None without padding.
        span: The rows as a slice, if there is only one run and its rows are contiguous.
    """

    length: int
    starts: torch.Tensor
    ends: torch.Tensor
    rows: torch.Tensor
    is_token: torch.Tensor | None
    numbers: torch.Tensor | None
    span: slice | None

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Return the tokens' values [tokens, ...] as [runs, length, ...]."""
        if self.span is not None:
            return values[None, self.span]
        return values.index_select(0, self.rows.flatten()).unflatten(0, self.rows.shape)

    def take_masked(self, values: torch.Tensor) -> torch.Tensor:
        """Return the tokens' values [tokens, heads] as [runs, length, heads], 0 for padding."""
        gathered = self.take(values)
        if self.is_token is None:
            return gathered
        return gathered * self.is_token.to(gathered.dtype)

    def put(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Write values [runs, length, ...] to the tokens' rows in a target [tokens, ...]."""
        values = values.to(target.dtype)
        if self.span is not None:
            target[self.span] = values[0]
        elif self.numbers is None:
            target.index_copy_(0, self.rows.flatten(), values.flatten(0, 1))
        else:
            rows = self.rows.flatten()[self.numbers]
            target.index_copy_(0, rows, values.flatten(0, 1)[self.numbers])


@dataclass(eq=False)
class ChunkGroup:
    """Chunks of one size, ordered by level. Whatever needs no state is computed for all at once.

    Attributes:
        size: The number of tokens of a chunk, with padding.
        rows: The rows of the tokens in the pass, [chunks * size]. Padding repeats the last one.
        is_token: 0 where `rows` is padding, else 1, [chunks, size, 1]; None without padding.
        numbers: The indices of the tokens in `rows`, [tokens].
        token_rows: The rows of the tokens, [tokens].
    """

    size: int
    rows: torch.Tensor
    is_token: torch.Tensor | None
    numbers: torch.Tensor | None
    token_rows: torch.Tensor

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Return the tokens' values [tokens, heads, ...] as [chunks, heads, size, ...]."""
        gathered = values.index_select(0, self.rows).unflatten(0, (-1, self.size))
        return gathered.transpose(1, 2)

    def take_masked(self, values: torch.Tensor) -> torch.Tensor:
        """Return the tokens' values [tokens, heads] as [chunks, heads, size], 0 for padding."""
        gathered = values.index_select(0, self.rows).unflatten(0, (-1, self.size))
        if self.is_token is not None:
            gathered = gathered * self.is_token.to(gathered.dtype)
        return gathered.transpose(1, 2)

    def put(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Write values [chunks, heads, size, ...] to the tokens' rows of [tokens, heads, ...]."""
        flat = values.transpose(1, 2).flatten(0, 1)
        if self.numbers is not None:
            flat = flat.index_select(0, self.numbers)
        target.index_copy_(0, self.token_rows, flat.to(target.dtype))


class ChunkStep(NamedTuple):
    """Adjacent chunks of a group that read their states at the same time."""

    group: int
    chunks: slice
    starts: torch.Tensor  # The slots of the states before the chunks, [chunks].
    ends: torch.Tensor  # The slots of the states after them, [chunks].


class ChunkPlan(NamedTuple):
    """The runs of a pass in chunks, and the order in which states go through them."""

    groups: list[ChunkGroup]
    steps: list[ChunkStep]


class Scan(Protocol):
    """The chunks of one size. `through` advances states through them."""

    def through(self, chunks: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Advance states through some chunks.

        Args:
            chunks: The chunks.
            state: The states before them, [chunks, ...]. They are not changed.

        Returns:
            The result, [chunks, heads, size, ...], and the states after the chunks.
        """


class _RunChunk(NamedTuple):
    """Some tokens of a run."""

    level: int
    rows: np.ndarray
    start: int
    end: int


class ConvolutionPlan(NamedTuple):
    """Which inputs a convolution reads.

    Inputs are numbered: first the stored ones of all runs, `inputs` for each, then the tokens.
    """

    starts: torch.Tensor  # The slots of the states from which the runs continue, [runs].
    # The slots that are written, [slots], and the numbers of the inputs that go there,
    # [slots, inputs].
    ends: torch.Tensor
    last: torch.Tensor
    # The rows whose inputs are not the rows before them, [heads], and the numbers of their inputs,
    # ending with the row's own, [heads, inputs + 1].
    heads: torch.Tensor
    taps: torch.Tensor
    has_others: bool  # Whether there are other rows.


class RecurrentPass:
    """The runs of a pass.

    Attributes:
        pool: The states.
    """

    # Whether gradients flow through the pass. The states in `pool` and native.c do not support
    # them.
    has_gradients = False

    def __init__(self, runs: list[RecurrentRun], tokens: int, pool: StatePool) -> None:
        """
        Args:
            runs: The runs of all chunks, each after those that it continues from. Their rows are
                those of the pass.
            tokens: The tokens of the pass.
            pool: The states.
        """
        self.pool = pool
        self._runs = runs
        self._tokens = tokens
        self._device = pool.device
        self._convolutions: dict[int, ConvolutionPlan] = {}
        self._taps: dict[int, Taps] = {}

    @cached_property
    def batches(self) -> list[RunBatch]:
        """The runs in batches, in the order in which they must be computed."""
        return [self._batch(members) for members in _batches(self._runs)]

    @cached_property
    def is_single(self) -> bool:
        """Whether each token is its own run and continues from a state before the pass."""
        if len(self._runs) < self._tokens:
            return False
        return all(run.level == 0 for run in self._runs)

    @cached_property
    def runs(self) -> RecurrentRuns:
        """The runs as kernels read them. In a single pass they are in the order of their rows."""
        return RecurrentRuns(*_moved(self._grouped_runs(), self._device))

    def taps(self, inputs: int) -> Taps:
        """Return what a convolution kernel reads if it needs `inputs` inputs before a row."""
        if inputs not in self._taps:
            self._taps[inputs] = Taps(*_moved(self._plan_taps(inputs), self._device))
        return self._taps[inputs]

    def _grouped_runs(self) -> list[np.ndarray]:
        """Return the fields of `RecurrentRuns`.

        Runs that continue from each other are in one group.
        """
        groups: list[list[RecurrentRun]] = []
        group_of_slot: dict[int, list[RecurrentRun]] = {}
        runs = self._runs
        if self.is_single:
            runs = sorted(runs, key=_first_row)
        for run in runs:
            if run.level:
                group = group_of_slot[run.start]
            else:
                group = []
                groups.append(group)
            group.append(run)
            group_of_slot[run.end] = group
        runs = list(chain.from_iterable(groups))
        return [
            np.array([run.start for run in runs]),
            np.array([run.end for run in runs]),
            np.cumsum([0, *(len(run.rows) for run in runs)]),
            np.concatenate([run.rows for run in runs]),
            np.cumsum([0, *(len(group) for group in groups)]),
        ]

    def _plan_taps(self, inputs: int) -> list[np.ndarray]:
        """Return the fields of `Taps`."""
        taps = np.empty((self._tokens, inputs), dtype=np.int64)
        numbers = np.arange(inputs)
        if self.is_single:
            starts = np.array([run.start for run in self._runs])
            rows = np.concatenate([run.rows for run in self._runs])
            stored = -1 - (starts[:, None] * inputs + numbers)
            taps[rows] = stored
            last = np.append(stored[:, 1:], rows[:, None], axis=1)
            return [taps, np.array([run.end for run in self._runs]), last]
        last_of_slot: dict[int, np.ndarray] = {}
        for run in self._runs:
            if run.level == 0:
                before = -1 - (run.start * inputs + numbers)
            else:
                before = last_of_slot[run.start]
            sources = np.concatenate([before, run.rows])
            taps[run.rows] = sources[np.arange(len(run.rows))[:, None] + numbers]
            last_of_slot[run.end] = sources[len(sources) - inputs :]
        return [taps, np.array(list(last_of_slot)), np.stack(list(last_of_slot.values()))]

    @cached_property
    def chunks(self) -> ChunkPlan:
        """The runs in chunks."""
        chunks = sorted(_chunks(self._runs), key=lambda chunk: chunk.level)
        by_size: dict[int, list[_RunChunk]] = {}
        for chunk in chunks:
            by_size.setdefault(_padded_size(len(chunk.rows)), []).append(chunk)
        groups: list[ChunkGroup] = []
        steps: list[tuple[int, ChunkStep]] = []
        for size, members in by_size.items():
            levels = np.array([chunk.level for chunk in members])
            starts = to_device(np.array([chunk.start for chunk in members]), self._device)
            ends = to_device(np.array([chunk.end for chunk in members]), self._device)
            begins = np.flatnonzero(np.diff(levels, prepend=-1)).tolist()
            for begin, end in pairwise([*begins, len(members)]):
                part = slice(begin, end)
                step = ChunkStep(len(groups), part, starts[part], ends[part])
                steps.append((int(levels[begin]), step))
            groups.append(self._group(size, members))
        steps.sort(key=lambda entry: entry[0])
        return ChunkPlan(groups, [step for _, step in steps])

    def _group(self, size: int, chunks: list[_RunChunk]) -> ChunkGroup:
        columns = np.arange(size)
        lengths = np.array([len(chunk.rows) for chunk in chunks])
        rows = np.stack(
            [chunk.rows[np.minimum(columns, len(chunk.rows) - 1)] for chunk in chunks]
        ).ravel()
        is_token: torch.Tensor | None = None
        numbers: torch.Tensor | None = None
        token_rows = rows
        if (lengths < size).any():
            is_inside = columns < lengths[:, None]
            is_token = to_device(is_inside[..., None].astype(np.float32), self._device)
            inside = np.flatnonzero(is_inside)
            numbers = to_device(inside, self._device)
            token_rows = rows[inside]
        return ChunkGroup(
            size,
            to_device(rows, self._device),
            is_token,
            numbers,
            to_device(token_rows, self._device),
        )

    def _batch(self, runs: list[RecurrentRun]) -> RunBatch:
        length = max(len(run.rows) for run in runs)
        starts = to_device(np.array([run.start for run in runs]), self._device)
        ends = to_device(np.array([run.end for run in runs]), self._device)
        lengths = np.array([len(run.rows) for run in runs])
        columns = np.arange(length)
        padded = [run.rows[np.minimum(columns, len(run.rows) - 1)] for run in runs]
        is_token: torch.Tensor | None = None
        numbers: torch.Tensor | None = None
        if (lengths < length).any():
            is_inside = columns < lengths[:, None]
            is_token = to_device(is_inside[..., None].astype(np.float32), self._device)
            numbers = to_device(np.flatnonzero(is_inside), self._device)
        span: slice | None = None
        first = int(runs[0].rows[0])
        if len(runs) == 1 and runs[0].rows[-1] - first == length - 1:
            span = slice(first, first + length)
        rows = to_device(np.stack(padded), self._device)
        return RunBatch(length, starts, ends, rows, is_token, numbers, span)

    def states(self, layer: int) -> torch.Tensor:
        """Return the recurrent states of a layer, [slots, ...]."""
        states = self.pool.recurrent[layer]
        assert states is not None
        return states

    def scan(self, layer: int, scans: Sequence[Scan], out: torch.Tensor) -> None:
        """Advance the states of a layer through the pass, and store the states after it.

        Args:
            layer: The index of the recurrent layer.
            scans: The scan of each group of `chunks`.
            out: Gets the result, [tokens, heads, ...].
        """
        states = self.states(layer)
        results: list[list[torch.Tensor]] = [[] for _ in scans]
        for step in self.chunks.steps:
            state = states.index_select(0, step.starts)
            result, behind = scans[step.group].through(step.chunks, state)
            results[step.group].append(result)
            states.index_copy_(0, step.ends, behind)
        self.put(results, out)

    def put(self, results: list[list[torch.Tensor]], out: torch.Tensor) -> None:
        """Write the results of each group's steps to the tokens' rows of [tokens, heads, ...]."""
        for group, parts in zip(self.chunks.groups, results, strict=True):
            result = parts[0] if len(parts) == 1 else torch.cat(parts)
            group.put(out, result)

    def convolution(self, inputs: int) -> ConvolutionPlan:
        """Return what a convolution reads if it needs `inputs` inputs before a token."""
        if inputs not in self._convolutions:
            self._convolutions[inputs] = self._plan_convolution(inputs)
        return self._convolutions[inputs]

    def _plan_convolution(self, inputs: int) -> ConvolutionPlan:
        first_token = len(self._runs) * inputs  # The number of the pass's first token.
        numbers = np.arange(inputs + 1)
        last_of_slot: dict[int, np.ndarray] = {}
        heads: list[np.ndarray] = []
        taps: list[np.ndarray] = []
        for number, run in enumerate(self._runs):
            if run.level == 0:
                before = np.arange(number * inputs, (number + 1) * inputs)
            else:
                before = last_of_slot[run.start]
            sources = np.concatenate([before, first_token + run.rows])
            count = len(run.rows)
            is_block = run.rows[-1] - run.rows[0] == count - 1
            head_count = min(inputs, count) if is_block else count
            heads.append(run.rows[:head_count])
            taps.append(sources[np.arange(head_count)[:, None] + numbers])
            last_of_slot[run.end] = sources[len(sources) - inputs :]
        all_heads = np.concatenate(heads)
        return ConvolutionPlan(
            starts=to_device(np.array([run.start for run in self._runs]), self._device),
            ends=to_device(np.array(list(last_of_slot)), self._device),
            last=to_device(np.stack(list(last_of_slot.values())), self._device),
            heads=to_device(all_heads, self._device),
            taps=to_device(np.concatenate(taps), self._device),
            has_others=len(all_heads) < self._tokens,
        )

    def convolve(
        self, layer: int, values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Apply a causal convolution to each channel, along the chains, and store its last inputs.

        Sums are in float32 at least.

        Args:
            layer: The index of the recurrent layer.
            values: [tokens, channels]
            weight: [channels, inputs + 1]
            bias: [channels] or None.

        Returns:
            [tokens, channels], in the dtype of `values`.
        """
        inputs = weight.shape[1] - 1
        plan = self.convolution(inputs)
        sources = torch.cat([self.stored_inputs(layer, plan, values), values])
        wide = torch.promote_types(values.dtype, torch.float32)
        kernel = weight.t().to(wide)  # [inputs + 1, channels]
        out = torch.zeros_like(values, dtype=wide)
        if plan.has_others:
            for tap in range(inputs + 1):
                behind = inputs - tap
                out[behind:].addcmul_(values[: len(values) - behind], kernel[tap])
        gathered = sources.index_select(0, plan.taps.flatten()).unflatten(0, plan.taps.shape)
        out.index_copy_(0, plan.heads, (gathered.to(wide) * kernel).sum(1))
        self.store_inputs(layer, plan, sources)
        if bias is not None:
            out += bias
        return out.to(values.dtype)

    def stored_inputs(
        self, layer: int, plan: ConvolutionPlan, values: torch.Tensor
    ) -> torch.Tensor:
        """Return the inputs of a convolution before all runs, [runs * inputs, channels]."""
        return self.pool.inputs[layer].index_select(0, plan.starts).flatten(0, 1)

    def store_inputs(self, layer: int, plan: ConvolutionPlan, sources: torch.Tensor) -> None:
        """Store the last inputs of a convolution after all runs.

        Args:
            layer: The index of the recurrent layer.
            plan: What the convolution reads.
            sources: All inputs, [runs * inputs + tokens, channels].
        """
        last = sources.index_select(0, plan.last.flatten()).unflatten(0, plan.last.shape)
        self.pool.inputs[layer].index_copy_(0, plan.ends, last)


class SinglePass(RecurrentPass):
    """Passes of one size in which each token is its own run, in the form that a CUDA graph reads.

    Its tensors stay where they are, and `fill` copies a pass there.
    """

    def __init__(self, tokens: int, pool: StatePool, padding_slot: int) -> None:
        """
        Args:
            tokens: Tokens of a pass.
            pool: The states.
            padding_slot: The slot for the states of padding tokens.
        """
        super().__init__([], tokens, pool)
        self.padding_slot = padding_slot
        numbers = torch.arange(tokens + 1, device=pool.device)
        starts = torch.full((tokens,), EMPTY, device=pool.device)
        ends = torch.full((tokens,), padding_slot, device=pool.device)
        self.is_single = True
        self.runs = RecurrentRuns(starts, ends, numbers, numbers[:tokens], numbers)

    def clear(self) -> None:
        """Make all tokens padding."""
        self.runs.starts.fill_(EMPTY)
        self.runs.ends.fill_(self.padding_slot)

    def fill(self, work: RecurrentPass) -> None:
        """Copy a pass to where the graph reads it, all on the device."""
        count = len(work.runs.starts)
        self.runs.starts[:count] = work.runs.starts
        self.runs.starts[count:] = EMPTY
        self.runs.ends[:count] = work.runs.ends
        self.runs.ends[count:] = self.padding_slot


def _moved(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays of integers to a device in one transfer."""
    packed = np.concatenate([array.ravel() for array in arrays])
    parts = to_device(packed, device).split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _first_row(run: RecurrentRun) -> int:
    return int(run.rows[0])


def _batches(runs: Iterable[RecurrentRun]) -> list[list[RecurrentRun]]:
    """Group runs of one level and of similar lengths, in the order of their levels."""
    groups: dict[tuple[int, int], list[RecurrentRun]] = {}
    for run in runs:
        count = len(run.rows)
        size = count
        if 1 < count <= _SHORT_RUN:
            size = _SHORT_RUN
        elif count > _SHORT_RUN:
            size = 1 << (count - 1).bit_length()
        groups.setdefault((run.level, size), []).append(run)
    return [groups[key] for key in sorted(groups)]


def _padded_size(tokens: int) -> int:
    """Return the size to which a chunk is padded."""
    return next(size for size in _CHUNK_SIZES if size >= tokens)


def _chunks(runs: Iterable[RecurrentRun]) -> list[_RunChunk]:
    """Cut runs into chunks. The level of a chunk is one more than that of the one before it."""
    largest = _CHUNK_SIZES[-1]
    chunks: list[_RunChunk] = []
    last_levels: dict[int, int] = {}  # The level at which a slot is written last.
    for run in runs:
        level = 0
        if run.level:
            level = last_levels[run.start] + 1
        start = run.start
        for begin in range(0, len(run.rows), largest):
            chunks.append(_RunChunk(level, run.rows[begin : begin + largest], start, run.end))
            start = run.end
            level += 1
        last_levels[run.end] = level - 1
    return chunks
