"""What one forward pass looks like to attention: which queries read which keys, under which mask,
in which calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from raypd.decoding.kv_cache import KVCache
from raypd.decoding.transfer import to_device
from raypd.decoding.visibility import NO_TOKEN, Reach, in_window, visible

BLOCK = 64  # keys that avx512 adds up at a time: KEYS in native.c
_FEW = 64  # queries: spans of more make good calls by themselves
_PADDING = 1.5  # a batch of spans has at most so many times the scores that its spans have


@dataclass(eq=False)
class Span:
    """The queries [a:b) of one sequence in the packed pass, and its own keys: `length` slots from
    `start`.
    """

    a: int
    b: int
    start: int
    length: int
    reach: np.ndarray  # [segments, segments] of Reach
    queries: np.ndarray  # [3, b - a] position, segment and step of each
    keys: np.ndarray  # [3, length] the same
    # Slots of the prefix that it shares with others, which come before its own keys.
    prefix: int = 0

    @property
    def size(self) -> int:
        return self.b - self.a

    @cached_property
    def causal(self) -> bool:
        """Whether its queries are its last keys, and each sees all keys up to itself: text that is
        read in order.
        """
        positions, segments, steps = self.keys
        segment = segments[0]
        if (
            segment == NO_TOKEN
            or self.reach[segment, segment] != Reach.CAUSAL
            or (segments != segment).any()
        ):
            return False
        in_order = (np.diff(positions) > 0).all() and (np.diff(steps) >= 0).all()
        return bool(in_order and np.array_equal(self.queries, self.keys[:, -self.size :]))

    def felt(self, window: int | None) -> int | None:
        """A layer's window, or None where all keys there are do not fill it."""
        return None if window is None or self.prefix + self.length <= window else window

    @cached_property
    def seen(self) -> np.ndarray:
        """bool [queries, keys] by the one rule.

        Steps matter where a sequence is fed again after it lost its cache.
        """
        positions, segments, steps = self.queries
        key_positions, key_segments, key_steps = self.keys
        return visible(
            self.reach, segments, positions, key_segments, key_positions, steps, key_steps
        )

    def all_seen(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`seen` [queries, prefix + own keys] with the prefix, which all see; positions of queries
        and these keys.
        """
        visibility = np.concatenate(
            [np.ones((self.size, self.prefix), dtype=bool), self.seen], axis=1
        )
        return visibility, self.queries[0], np.concatenate([np.arange(self.prefix), self.keys[0]])

    def in_window(self, window: int) -> np.ndarray:
        """`in_window` over the prefix and the own keys: [queries, prefix keys + own keys]."""
        return in_window(*self.all_seen(), window)


@dataclass(eq=False)
class PrefixGroup:
    """Spans that stand side by side in the pass and share a prefix of `length` slots from `start`
    (length 0: none).
    """

    spans: list[Span]
    start: int = 0
    length: int = 0


@dataclass(eq=False)
class Batch:
    """Spans, by `start`, that attend to their own keys in one call, padded to the most queries and
    keys among them.
    """

    spans: list[Span]
    device: torch.device

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """(spans, queries, keys), padded."""
        return (
            len(self.spans),
            max(span.size for span in self.spans),
            max(span.length for span in self.spans),
        )

    @cached_property
    def stride(self) -> int | None:
        """Slots from each span's first key to the next span's; None where they differ."""
        strides = np.diff([span.start for span in self.spans])
        return int(strides[0]) if len(strides) and (strides == strides[0]).all() else None

    @cached_property
    def asked(self) -> torch.Tensor:
        """[spans * queries] their places in the pass; padding stands for the last one of its
        span.
        """
        places = np.arange(self.shape[1])
        queries = np.concatenate(
            [span.a + np.minimum(places, span.size - 1) for span in self.spans]
        )
        return to_device(queries, self.device)

    @cached_property
    def slots(self) -> torch.Tensor:
        """[spans * keys] where their keys are in the cache; padding stands for the last one of its
        span.
        """
        places = np.arange(self.shape[2])
        slots = np.concatenate(
            [span.start + np.minimum(places, span.length - 1) for span in self.spans]
        )
        return to_device(slots, self.device)

    def seen(self, window: int | None) -> np.ndarray:
        """bool [spans, queries, keys]; padded queries see what the last of their span does."""
        spans, queries, keys = self.shape
        visibility = np.zeros((spans, queries, keys), dtype=bool)
        for row, span in zip(visibility, self.spans, strict=True):
            span_visibility = span.seen
            if (felt := span.felt(window)) is not None:
                span_visibility = span_visibility & span.in_window(felt)[:, span.prefix :]
            row[: span.size, : span.length] = span_visibility
            row[span.size :, : span.length] = span_visibility[-1]
        return visibility


class AttentionLayer(NamedTuple):
    """What attention is in one layer."""

    number: int  # from 0; its place in the cache
    scale: float  # factor of the scores
    window: int | None = None  # tokens that a query sees at most
    softcap: float | None = None  # most that a score can be, by tanh


class Attend(Protocol):
    """Attention over the cache, in one layer."""

    def __call__(
        self,
        step: Step,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
    ) -> torch.Tensor:
        """Stores keys and values [tokens, kv_heads, head_dim] (None: they are stored), and attends
        to all that the queries see. Queries and what it returns are [tokens, heads, head_dim];
        queries and keys are rotated.
        """


@dataclass
class Step:
    """One packed forward pass; handed to every attention layer as it is."""

    cache: KVCache
    groups: list[PrefixGroup]
    slots: torch.Tensor  # [tokens] where each token's key and value go
    kept: torch.Tensor  # [n] places of the tokens whose predictions are wanted
    attend: Attend
    # What a kernel has built, by the query heads to a key head.
    plans: dict[int, Any] = field(default_factory=dict)
    _masks: dict[tuple[int, int, int | None], torch.Tensor | None] = field(default_factory=dict)
    _calls: dict[tuple[int | None, bool], tuple[list[Span], list[Batch]]] = field(
        default_factory=dict
    )

    def calls(self, window: int | None, causal: bool) -> tuple[list[Span], list[Batch]]:
        """The calls that attend to own keys in a layer: of `causal` spans (where a kernel takes
        them), of batches.
        """
        if (window, causal) not in self._calls:
            spans = [span for group in self.groups for span in group.spans]
            if window is not None and not any(span.felt(window) for span in spans):
                self._calls[window, causal] = self.calls(None, causal)
                return self._calls[window, causal]
            alone = [
                span
                for span in spans
                if causal and span.size > 1 and not span.felt(window) and span.causal
            ]
            alone_ids = set(map(id, alone))
            batches = _batches([span for span in spans if id(span) not in alone_ids])
            self._calls[window, causal] = (
                alone,
                [Batch(some, self.slots.device) for some in batches],
            )
        return self._calls[window, causal]

    @cached_property
    def gathered(self) -> tuple[Step, torch.Tensor]:
        """The pass over copies of its keys, and the slots [keys] to copy: a span for the queries of
        each segment, over the keys that one of them sees. Neighbours with the same first keys share
        whole `BLOCK`s of them as a prefix.
        """
        runs = [
            run for group in self.groups for span in group.spans for run in _runs(span, group.start)
        ]
        shared = [*(_shared(*run[1:], *following[1:]) for run, following in pairwise(runs)), 0]
        groups: list[PrefixGroup] = []
        copied: list[np.ndarray] = []
        filled = 0
        for n, (span, keys, _) in enumerate(runs):
            if not groups or not groups[-1].length or shared[n - 1] != groups[-1].length:
                groups.append(PrefixGroup([], filled, shared[n]))
                copied.append(keys[: shared[n]])
                filled += shared[n]
            prefix = groups[-1].length
            span.start, span.length, span.prefix, span.keys = (
                filled,
                len(keys) - prefix,
                prefix,
                span.keys[:, prefix:],
            )
            groups[-1].spans.append(span)
            copied.append(keys[prefix:])
            filled += span.length
        slots = to_device(np.concatenate(copied), self.slots.device)
        return Step(self.cache, groups, self.slots, self.kept, self.attend), slots

    def own_mask(
        self, batch: Batch, window: int | None, repeat: int, like: torch.Tensor
    ) -> torch.Tensor | None:
        """Additive, over own keys: [spans, 1, repeat * queries, keys], in the dtype of `like`; None
        where all is seen. `repeat` query heads share a key head, and are folded into the queries.
        """
        if all(span.felt(window) is None for span in batch.spans):
            window = None
        key = (id(batch), repeat, window)
        if key not in self._masks:
            self._masks[key] = _additive(batch.seen(window), repeat, like)
        return self._masks[key]

    def prefix_mask(
        self, group: PrefixGroup, window: int | None, repeat: int, like: torch.Tensor
    ) -> torch.Tensor | None:
        """The additive mask of a group's queries over its prefix, [1, 1, repeat * queries, prefix
        keys], or None.
        """
        if window is None or all(span.felt(window) is None for span in group.spans):
            return None
        key = (id(group), repeat, window)
        if key not in self._masks:
            visibility = np.concatenate(
                [span.in_window(window)[:, : group.length] for span in group.spans]
            )
            self._masks[key] = _additive(visibility[None], repeat, like)
        return self._masks[key]


def _runs(span: Span, prefix: int) -> Iterator[tuple[Span, np.ndarray, int]]:
    """The queries of each segment as a span over the keys that one of them sees, the prefix first;
    the slots of these keys; how many, from the first, all its queries see, at positions 0, 1, 2,
    ...
    """
    reach = np.pad(span.reach, (0, 1), constant_values=Reach.ALL)  # the last segment is the prefix
    before = np.stack(
        [
            np.arange(span.prefix),
            *np.full((2, span.prefix), [[len(span.reach)], [span.keys[2].min()]]),
        ]
    )
    for first, end in pairwise([0, *np.flatnonzero(np.diff(span.queries[1])) + 1, span.size]):
        seen = span.seen[first:end]
        own = np.flatnonzero(seen.any(0))
        keys = np.concatenate([before, span.keys[:, own]], axis=1)
        slots = np.concatenate([np.arange(prefix, prefix + span.prefix), span.start + own])
        of_all = np.concatenate([before[0] >= 0, seen[:, own].all(0), [False]])
        clear = int((of_all & (np.append(keys[0], -1) == np.arange(len(of_all)))).argmin())
        yield (
            Span(
                span.a + first, span.a + end, 0, len(slots), reach, span.queries[:, first:end], keys
            ),
            slots,
            clear,
        )


def _shared(slots: np.ndarray, clear: int, others: np.ndarray, others_clear: int) -> int:
    """How many of the first slots are the same and clear in both: whole blocks of them."""
    most = min(clear, others_clear)
    return int(np.append(slots[:most] == others[:most], False).argmin()) // BLOCK * BLOCK


def _batches(spans: list[Span]) -> Iterator[list[Span]]:
    """Spans of few queries with others of like shape; the others by themselves.

    Each batch by `start`.
    """
    together: list[Span] = []
    scores = 0
    for span in sorted(spans, key=lambda span: (span.size > _FEW, span.size, span.length)):
        span_scores = span.size * span.length
        padded = (
            (len(together) + 1) * span.size * max(span.length, *(s.length for s in together), 0)
        )
        if together and (span.size > _FEW or padded > _PADDING * (scores + span_scores)):
            yield sorted(together, key=lambda s: s.start)
            together, scores = [], 0
        together.append(span)
        scores += span_scores
    if together:
        yield sorted(together, key=lambda s: s.start)


def _additive(visibility: np.ndarray, repeat: int, like: torch.Tensor) -> torch.Tensor | None:
    """[rows, queries, keys] -> [rows, 1, repeat * queries, keys]; None where all is seen."""
    if visibility.all():
        return None
    mask = like.new_zeros(visibility.shape).masked_fill_(
        to_device(~visibility, like.device), -torch.inf
    )
    return mask.repeat(1, repeat, 1)[:, None]
