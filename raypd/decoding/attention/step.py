"""What one forward pass looks like to attention: which queries read which keys, under which mask."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from raypd.decoding.kv_cache import KVCache
from raypd.decoding.visibility import in_window, visible


@dataclass
class Span:
    """The queries [a:b) of one sequence in the packed pass, and its own keys: `length` slots from `start`.

    Args:
        reach: [segments, segments] of Reach.
        queries, keys: [3, b - a] and [3, length]: position, segment and step of each.
    """

    a: int
    b: int
    start: int
    length: int
    reach: np.ndarray
    queries: np.ndarray
    keys: np.ndarray


@dataclass
class PrefixGroup:
    """Spans that stand side by side in the pass and share a prefix of `length` slots from `start` (length 0: none)."""

    spans: list[Span]
    start: int = 0
    length: int = 0


@dataclass
class Step:
    """One packed forward pass of `tokens` tokens; handed to every attention layer as it is.

    Args:
        groups: its spans, by the prefix that they share.
        slots: [tokens] where each token's key and value go.
    """

    cache: KVCache
    groups: list[PrefixGroup]
    slots: torch.Tensor
    _own_masks: dict[tuple[int, int, int | None], torch.Tensor] = field(default_factory=dict)
    _prefix_masks: dict[tuple[int, int, int], torch.Tensor | None] = field(default_factory=dict)
    _windows: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def own_mask(
        self, group: PrefixGroup, span: Span, window: int | None, repeat: int, like: torch.Tensor
    ) -> torch.Tensor:
        """The mask of a span over its own keys, built once for all layers.

        Args:
            group: the one that the span stands in.
            span: whose queries and keys they are.
            window: of the layer, in tokens; None: it sees all.
            repeat: query heads to a key head, which are folded into the queries.
            like: gives the mask its dtype and device.

        Returns:
            Additive, [repeat * queries, keys].
        """
        window = _felt(window, group, span)
        key = (id(span), repeat, window)
        if key not in self._own_masks:
            seen = _seen(span)
            if window is not None:
                seen &= self._in_window(group, span, window)[:, group.length :]
            self._own_masks[key] = _additive(seen, repeat, like)
        return self._own_masks[key]

    def prefix_mask(
        self, group: PrefixGroup, window: int | None, repeat: int, like: torch.Tensor
    ) -> torch.Tensor | None:
        """The mask of a group's queries over its prefix, built once for all layers.

        Args:
            group: its spans see the whole prefix but for the window.
            window, repeat, like: as those of `own_mask`.

        Returns:
            Additive, [repeat * queries, prefix keys]; None where every query sees the whole prefix.
        """
        if window is None or all(_felt(window, group, span) is None for span in group.spans):
            return None
        key = (id(group), repeat, window)
        if key not in self._prefix_masks:
            seen = np.concatenate([self._in_window(group, span, window)[:, : group.length] for span in group.spans])
            self._prefix_masks[key] = None if seen.all() else _additive(seen, repeat, like)
        return self._prefix_masks[key]

    def _in_window(self, group: PrefixGroup, span: Span, window: int) -> np.ndarray:
        """`in_window` over the prefix, which all see, and the span's own keys: [queries, prefix keys + own keys]."""
        key = (id(span), window)
        if key not in self._windows:
            prefix = np.arange(group.length)
            seen = np.concatenate([np.ones((span.b - span.a, group.length), dtype=bool), _seen(span)], axis=1)
            positions = np.concatenate([prefix, span.keys[0]])
            self._windows[key] = in_window(seen, span.queries[0], positions, window)
        return self._windows[key]


def _seen(span: Span) -> np.ndarray:
    """bool [queries, keys] by the one rule. Steps matter where a sequence is fed again after it lost its cache."""
    positions, segments, steps = span.queries
    key_positions, key_segments, key_steps = span.keys
    return visible(span.reach, segments, positions, key_segments, key_positions, steps, key_steps)


def _felt(window: int | None, group: PrefixGroup, span: Span) -> int | None:
    """The window, or None where all keys there are do not fill it."""
    return None if window is None or group.length + span.length <= window else window


def _additive(seen: np.ndarray, repeat: int, like: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(seen.shape, dtype=like.dtype)
    mask.masked_fill_(torch.from_numpy(~seen), -torch.inf)
    return mask.repeat(repeat, 1).to(like.device)
