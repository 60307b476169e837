"""What a kernel reads of a pass: its blocks of queries, and who sees whom as integers, a few a token."""

from typing import NamedTuple

import numpy as np
import torch

from raypd.decoding.attention.step import Step
from raypd.decoding.transfer import to_device
from raypd.decoding.visibility import segment_sets, window_starts

_NO_START = np.iinfo(np.int32).min


class _Item(NamedTuple):
    """A block of queries, as a kernel reads it. Places are those of the pass, slots those of the cache."""

    first: int  # place of its first query
    queries: int
    prefix_slot: int
    prefix: int  # keys
    own_slot: int
    own_keys: int  # up to the last one that any of its queries sees
    clear: int  # own keys before the first one that not all of its queries see
    key: int  # its span's first own key among those of the pass


class KernelPlan:
    """What a kernel reads beside queries, keys and values, built once a pass; `repeat` query heads share a key head.
    `rows`: the sizes of its blocks of queries, rising; a span that fits none has several of the last. `queries`
    [tokens, 2 + 2 * words]: position, step and two sets of segments; `keys` [own keys, 3]: position, step, segment."""

    def __init__(self, step: Step, repeat: int, rows: tuple[int, ...]) -> None:
        self.device = step.slots.device
        grouped = [(span, group) for group in step.groups for span in group.spans]
        self.spans = spans = [span for span, _ in grouped]
        sets = [segment_sets(span.reach, span.queries[1], span.keys[1]) for span in spans]
        self.words = power_of_two(max(query_sets.shape[2] for query_sets, _ in sets))  # of a set of segments, 32 each
        items: dict[int, list[_Item]] = {}
        first_key = 0
        for span, group in grouped:
            size = max(
                next((fitting for fitting in rows if fitting >= span.size * repeat), rows[-1]), power_of_two(repeat)
            )
            block = size // repeat
            causal = span.size > block and span.causal
            for first in range(0, span.size, block):
                count = min(block, span.size - first)
                own_keys, clear = span.length, 0
                if causal:
                    own_keys = span.length - span.size + first + count
                    clear = own_keys - count
                item = _Item(span.a + first, count, group.start, group.length, span.start, own_keys, clear, first_key)
                items.setdefault(size, []).append(item)
            first_key += span.length
        queries = np.concatenate([span.queries for span in spans], axis=1)
        keys = np.concatenate([span.keys for span in spans], axis=1)
        words = np.zeros((queries.shape[1], 2, self.words), dtype=np.int32)
        for span, (query_sets, _) in zip(spans, sets, strict=True):
            words[span.a : span.b, :, : query_sets.shape[2]] = query_sets
        parts = [
            np.column_stack([queries[0], queries[2], words.reshape(len(words), -1)]),
            np.column_stack([keys[0], keys[2], np.concatenate([labels for _, labels in sets])]),
            *(np.array(some) for some in items.values()),
        ]
        self.queries, self.keys, *blocks = _moved(parts, self.device)
        self.blocks = list(zip(items, blocks, strict=True))  # (rows, items [n, 8]) of each size of block that occurs
        self.most_own = max(item.own_keys for some in items.values() for item in some)  # keys of the item with most
        self.seen: dict[int | None, torch.Tensor] = {}  # who sees whom, as a kernel found it, by a layer's window
        self._starts: dict[int | None, torch.Tensor | None] = {}

    def starts(self, window: int | None) -> torch.Tensor | None:
        """[tokens] for each query the first position that a layer's window holds; None: none is filled."""
        if window not in self._starts:
            self._starts[window] = None
            if window is not None and any(span.felt(window) for span in self.spans):
                starts = [
                    window_starts(*s.all_seen(), window) if s.felt(window) else [_NO_START] * s.size for s in self.spans
                ]
                (self._starts[window],) = _moved([np.maximum(np.concatenate(starts), _NO_START)], self.device)
        return self._starts[window]


def _moved(parts: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Arrays as int32 on the device, in one transfer; each begins at a multiple of 16 bytes, as triton likes it."""
    ends = np.cumsum([-(-part.size // 4) * 4 for part in parts])
    packed = np.zeros(ends[-1], dtype=np.int32)
    for part, end in zip(parts, ends, strict=True):
        begin = end - -(-part.size // 4) * 4
        packed[begin : begin + part.size] = part.reshape(-1)
    moved = to_device(packed, device)
    begins = [0, *ends[:-1].tolist()]
    return [moved[b : b + part.size].view(part.shape) for b, part in zip(begins, parts, strict=True)]


def power_of_two(n: int) -> int:
    """The lowest one that is n at least."""
    return 1 << (n - 1).bit_length()
