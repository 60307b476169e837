"""Describe one forward pass for attention: which queries read which keys, and under which mask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from raypd.decoding.kv_cache import KVCache
from raypd.decoding.recurrence.plan import RecurrentPass
from raypd.decoding.transfer import to_device
from raypd.decoding.visibility import NO_TOKEN, POSITION, SEGMENT, STEP, Reach, in_window, visible

BLOCK = 64  # The number of keys that the AVX-512 kernel adds up at a time: KEYS in native.c.
# A span with more queries than this is worth a call of its own.
_FEW_QUERIES = 64
# With padding, a batch of spans computes at most this many times the scores of its spans alone.
_MAX_PADDING = 1.5


@dataclass(eq=False)
class Span:
    """The tokens of one sequence in the packed pass, and the keys that they may read.

    Its queries are the rows [query_start, query_end) of the pass. Its own keys are `key_count`
    slots of the cache from `key_start` on. If the sequence shares a prefix, the prefix has
    `prefix_length` keys, which come before its own.
    """

    query_start: int
    query_end: int
    key_start: int
    key_count: int
    # What each segment sees of each other, [segments, segments] of Reach.
    reach: np.ndarray
    # Position, segment and step of each query, [3, queries].
    queries: np.ndarray
    # Position, segment and step of each own key, [3, own keys].
    keys: np.ndarray
    prefix_length: int = 0

    @property
    def query_count(self) -> int:
        return self.query_end - self.query_start

    @cached_property
    def causal(self) -> bool:
        """Whether the span is text that is read in order.

        Its queries are then its last keys, and each query sees all keys up to itself.
        """
        segments = self.keys[SEGMENT]
        segment = segments[0]
        if segment == NO_TOKEN or self.reach[segment, segment] != Reach.CAUSAL:
            return False
        if (segments != segment).any():
            return False
        if (np.diff(self.keys[POSITION]) <= 0).any() or (np.diff(self.keys[STEP]) < 0).any():
            return False
        return np.array_equal(self.queries, self.keys[:, -self.query_count :])

    def effective_window(self, window: int | None) -> int | None:
        """Return a layer's window, or None if the span has too few keys to fill it."""
        if window is None or self.prefix_length + self.key_count <= window:
            return None
        return window

    @cached_property
    def visibility(self) -> np.ndarray:
        """Which own keys the queries see, bool [queries, own keys].

        Steps matter only when a sequence is fed again after losing its cache.
        """
        return visible(
            self.reach,
            self.queries[SEGMENT],
            self.queries[POSITION],
            self.keys[SEGMENT],
            self.keys[POSITION],
            self.queries[STEP],
            self.keys[STEP],
        )

    def with_prefix(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the visibility over the prefix, which all queries see, and the own keys.

        Returns:
            The visibility, bool [queries, prefix + own keys]; the positions of the queries; and the
            positions of these keys.
        """
        sees_prefix = np.ones((self.query_count, self.prefix_length), dtype=bool)
        visibility = np.concatenate([sees_prefix, self.visibility], axis=1)
        key_positions = np.concatenate([np.arange(self.prefix_length), self.keys[POSITION]])
        return visibility, self.queries[POSITION], key_positions

    def in_window(self, window: int) -> np.ndarray:
        """Return which keys are in each query's window, bool [queries, prefix + own keys]."""
        visibility, query_positions, key_positions = self.with_prefix()
        return in_window(visibility, query_positions, key_positions, window)


@dataclass(eq=False)
class PrefixGroup:
    """Spans that are neighbours in the pass and share a prefix.

    The prefix has `length` slots of the cache from `start` on; a length of 0 means none.
    """

    spans: list[Span]
    start: int = 0
    length: int = 0


@dataclass(eq=False)
class Batch:
    """Spans that attend to their own keys in one call, in order of `key_start`.

    They are padded to the largest number of queries and of keys among them.
    """

    spans: list[Span]
    device: torch.device

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """The numbers of spans, queries and keys, with padding."""
        queries = max(span.query_count for span in self.spans)
        keys = max(span.key_count for span in self.spans)
        return len(self.spans), queries, keys

    @cached_property
    def stride(self) -> int | None:
        """The slots from each span's first key to that of the next span; None if it varies."""
        strides = np.diff([span.key_start for span in self.spans])
        if len(strides) and (strides == strides[0]).all():
            return int(strides[0])
        return None

    @cached_property
    def query_rows(self) -> torch.Tensor:
        """The queries' rows in the pass, [spans * queries].

        Padding repeats the last row of its span.
        """
        _, queries, _ = self.shape
        numbers = np.arange(queries)
        rows = [span.query_start + np.minimum(numbers, span.query_count - 1) for span in self.spans]
        return to_device(np.concatenate(rows), self.device)

    @cached_property
    def key_slots(self) -> torch.Tensor:
        """The keys' slots in the cache, [spans * keys]. Padding repeats a span's last slot."""
        _, _, keys = self.shape
        numbers = np.arange(keys)
        slots = [span.key_start + np.minimum(numbers, span.key_count - 1) for span in self.spans]
        return to_device(np.concatenate(slots), self.device)

    def visibility(self, window: int | None) -> np.ndarray:
        """Return which keys the queries see, bool [spans, queries, keys].

        Padded queries see what the last query of their span sees.
        """
        visibility = np.zeros(self.shape, dtype=bool)
        for padded, span in zip(visibility, self.spans, strict=True):
            span_visibility = span.visibility
            span_window = span.effective_window(window)
            if span_window is not None:
                own_keys = span.in_window(span_window)[:, span.prefix_length :]
                span_visibility = span_visibility & own_keys
            padded[: span.query_count, : span.key_count] = span_visibility
            padded[span.query_count :, : span.key_count] = span_visibility[-1]
        return visibility


class AttentionLayer(NamedTuple):
    """The attention of one layer."""

    number: int  # Its index in the cache, from 0.
    scale: float  # The factor of the scores.
    window: int | None = None  # The largest number of tokens that a query sees.
    softcap: float | None = None  # The bound of the scores, applied by tanh.
    # For each query head, the score of a sink: a key without a value, which every query sees. It is
    # neither scaled nor bounded. [heads]
    sinks: torch.Tensor | None = None
    # How many leading elements of a key form its value; the cache then holds only keys. None if
    # values are separate.
    latent_dim: int | None = None


class Attend(Protocol):
    """Attention over the cache in one layer."""

    def __call__(
        self,
        step: Step,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
    ) -> torch.Tensor:
        """Store keys and values, and attend to everything that the queries see.

        Args:
            step: The pass.
            layer: The layer.
            query: Rotated queries, [tokens, heads, head_dim].
            key: Rotated keys, [tokens, kv_heads, head_dim], or None if they are stored already.
            value: Values, [tokens, kv_heads, value_dim], or None if they are stored already or are
                a part of the keys (`AttentionLayer.latent_dim`).

        Returns:
            [tokens, heads, value_dim]
        """


@dataclass
class Step:
    """One packed forward pass. Every attention layer receives it unchanged."""

    cache: KVCache
    groups: list[PrefixGroup]
    # The slot where each token's key and value go, [tokens].
    slots: torch.Tensor
    # The rows of the tokens for which a next token is to be predicted, [samples].
    sample_rows: torch.Tensor
    attend: Attend
    # What a kernel prepares for a pass, by its `PlanKey`.
    plans: dict[Any, Any] = field(default_factory=dict)
    # What the recurrent layers read; None if the model has no such layers.
    recurrence: RecurrentPass | None = None
    _masks: dict[tuple[int, int, int | None], torch.Tensor | None] = field(default_factory=dict)
    _calls: dict[tuple[int | None, bool], tuple[list[Span], list[Batch]]] = field(
        default_factory=dict
    )

    @property
    def spans(self) -> list[Span]:
        """The spans of all groups, in the order of the pass."""
        return [span for group in self.groups for span in group.spans]

    def calls(self, window: int | None, causal: bool) -> tuple[list[Span], list[Batch]]:
        """Return the calls that attend to own keys in a layer.

        Args:
            window: The layer's window.
            causal: Whether a kernel computes causal spans without a mask.

        Returns:
            The causal spans that are computed one by one, and the batches of all other spans.
        """
        key = (window, causal)
        if key not in self._calls:
            spans = self.spans
            windowed = any(span.effective_window(window) is not None for span in spans)
            if window is not None and not windowed:
                self._calls[key] = self.calls(None, causal)
            else:
                self._calls[key] = self._plan_calls(spans, window, causal)
        return self._calls[key]

    def _plan_calls(
        self, spans: list[Span], window: int | None, causal: bool
    ) -> tuple[list[Span], list[Batch]]:
        alone: list[Span] = []
        batched: list[Span] = []
        for span in spans:
            # Single queries are better batched together.
            is_text = causal and span.query_count > 1
            if is_text and span.effective_window(window) is None and span.causal:
                alone.append(span)
            else:
                batched.append(span)
        batches = [Batch(members, self.slots.device) for members in _batches(batched)]
        return alone, batches

    @cached_property
    def gathered(self) -> tuple[Step, torch.Tensor]:
        """Return the same pass over copies of its keys, and the slots to copy, [keys].

        The queries of each segment become a span over the keys that any of them sees. Neighbouring
        spans with the same leading keys share whole blocks of `BLOCK` keys as a prefix.
        """
        runs = [run for group in self.groups for span in group.spans for run in _runs(span, group)]
        # How many leading keys each run shares with the next one.
        shared = [_shared_keys(run, next_run) for run, next_run in pairwise(runs)]
        shared.append(0)
        groups: list[PrefixGroup] = []
        copied: list[np.ndarray] = []
        filled = 0  # Slots of the copy that are in use.
        for number, run in enumerate(runs):
            joins_last = (
                len(groups) > 0
                and groups[-1].length > 0
                and shared[number - 1] == groups[-1].length
            )
            if not joins_last:
                groups.append(PrefixGroup([], filled, shared[number]))
                copied.append(run.slots[: shared[number]])
                filled += shared[number]
            group = groups[-1]
            span = run.span
            span.key_start = filled
            span.key_count = len(run.slots) - group.length
            span.prefix_length = group.length
            span.keys = span.keys[:, group.length :]
            group.spans.append(span)
            copied.append(run.slots[group.length :])
            filled += span.key_count
        slots = to_device(np.concatenate(copied), self.slots.device)
        step = Step(self.cache, groups, self.slots, self.sample_rows, self.attend)
        return step, slots

    def own_mask(
        self, batch: Batch, window: int | None, repeat: int, like: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the additive mask of a batch over its own keys.

        Args:
            batch: The batch.
            window: The layer's window.
            repeat: The number of query heads that share a key head. They are folded into the
                queries.
            like: A tensor with the mask's dtype and device.

        Returns:
            [spans, 1, repeat * queries, keys], or None if the queries see all keys.
        """
        if all(span.effective_window(window) is None for span in batch.spans):
            window = None
        key = (id(batch), repeat, window)
        if key not in self._masks:
            self._masks[key] = _additive(batch.visibility(window), repeat, like)
        return self._masks[key]

    def prefix_mask(
        self, group: PrefixGroup, window: int | None, repeat: int, like: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the additive mask of a group's queries over its prefix.

        The other arguments are those of `own_mask`.

        Returns:
            [1, 1, repeat * queries, prefix keys], or None if the queries see all of the prefix.
        """
        if window is None:
            return None
        if all(span.effective_window(window) is None for span in group.spans):
            return None
        key = (id(group), repeat, window)
        if key not in self._masks:
            visibility = np.concatenate(
                [span.in_window(window)[:, : group.length] for span in group.spans]
            )
            self._masks[key] = _additive(visibility[None], repeat, like)
        return self._masks[key]


class _SegmentRun(NamedTuple):
    """The queries of one segment of a span, with the keys that any of them sees."""

    span: Span
    # The slots of these keys, the prefix first.
    slots: np.ndarray
    # The number of leading keys that all queries see and that are at positions 0, 1, 2, ...
    common: int


def _runs(span: Span, group: PrefixGroup) -> Iterator[_SegmentRun]:
    """Split a span wherever the segment of its queries changes."""
    # The prefix becomes a segment of its own, the last one, which all others see.
    prefix_segment = len(span.reach)
    reach = np.pad(span.reach, (0, 1), constant_values=Reach.ALL)
    prefix_keys = np.empty((3, span.prefix_length), dtype=np.int64)
    prefix_keys[POSITION] = np.arange(span.prefix_length)
    prefix_keys[SEGMENT] = prefix_segment
    prefix_keys[STEP] = span.keys[STEP].min()
    prefix_slots = np.arange(group.start, group.start + span.prefix_length)
    changes = np.flatnonzero(np.diff(span.queries[SEGMENT])) + 1
    for first, end in pairwise([0, *changes, span.query_count]):
        visibility = span.visibility[first:end]
        own = np.flatnonzero(visibility.any(0))
        keys = np.concatenate([prefix_keys, span.keys[:, own]], axis=1)
        slots = np.concatenate([prefix_slots, span.key_start + own])
        all_see_prefix = np.ones(span.prefix_length, dtype=bool)
        all_see = np.concatenate([all_see_prefix, visibility[:, own].all(0)])
        without_gaps = keys[POSITION] == np.arange(len(slots))
        run_span = Span(
            query_start=span.query_start + first,
            query_end=span.query_start + end,
            key_start=0,
            key_count=len(slots),
            reach=reach,
            queries=span.queries[:, first:end],
            keys=keys,
        )
        yield _SegmentRun(run_span, slots, _leading(all_see & without_gaps))


def _leading(flags: np.ndarray) -> int:
    """Count the leading flags that are True."""
    return int(np.append(flags, False).argmin())


def _shared_keys(run: _SegmentRun, next_run: _SegmentRun) -> int:
    """Return how many leading keys two runs share, in whole blocks."""
    limit = min(run.common, next_run.common)
    same = _leading(run.slots[:limit] == next_run.slots[:limit])
    return same // BLOCK * BLOCK


def _batches(spans: list[Span]) -> Iterator[list[Span]]:
    """Batch spans of few queries by similar shape, and put every other span into its own batch.

    The spans of a batch are in order of `key_start`.
    """
    members: list[Span] = []
    scores = 0  # Queries times keys, summed over the members.
    longest = 0  # The largest number of keys of a member.
    # In this order, each span has at least as many queries as the ones before it.
    order = sorted(
        spans,
        key=lambda span: (span.query_count > _FEW_QUERIES, span.query_count, span.key_count),
    )
    for span in order:
        span_scores = span.query_count * span.key_count
        padded_length = max(longest, span.key_count)
        padded_scores = (len(members) + 1) * span.query_count * padded_length
        is_large = span.query_count > _FEW_QUERIES
        if members and (is_large or padded_scores > _MAX_PADDING * (scores + span_scores)):
            yield sorted(members, key=lambda member: member.key_start)
            members = []
            scores = 0
            longest = 0
        members.append(span)
        scores += span_scores
        longest = max(longest, span.key_count)
    if members:
        yield sorted(members, key=lambda member: member.key_start)


def _additive(visibility: np.ndarray, repeat: int, like: torch.Tensor) -> torch.Tensor | None:
    """Turn visibility [rows, queries, keys] into a mask [rows, 1, repeat * queries, keys].

    The result is None if everything is visible.
    """
    if visibility.all():
        return None
    hidden = to_device(~visibility, like.device)
    mask = like.new_zeros(visibility.shape).masked_fill_(hidden, -torch.inf)
    return mask.repeat(1, repeat, 1)[:, None]
