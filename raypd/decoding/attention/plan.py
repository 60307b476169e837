"""What a kernel reads about a pass: its blocks of queries, and a few integers per token."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from raypd.decoding.attention.step import PrefixGroup, Span, Step
from raypd.decoding.transfer import to_device
from raypd.decoding.visibility import POSITION, SEGMENT, STEP, segment_sets, window_starts

# The start of a window that is not full, which is the lowest position that a kernel can read.
_NO_START = np.iinfo(np.int32).min
# If several blocks share the keys of the same queries, each of them reads at least this many.
_MIN_PART = 256


class Item(NamedTuple):
    """A block of queries, as a kernel reads it.

    The kernels read the fields by position.
    """

    first: int  # The row of its first query in the pass.
    queries: int
    prefix_slot: int  # The first slot of its prefix.
    prefix: int  # The number of prefix keys that it reads.
    own_slot: int  # The slot of its first own key.
    own_keys: int  # Own keys up to the last one that any of its queries sees.
    clear: int  # Own keys before the first one that not all of its queries see.
    key: int  # The index of its first own key among those of the pass.
    prefix_begin: int = 0  # The position of its first prefix key.
    # The row for the result of its first query if that is merged with results of other items; -1 if
    # the result is complete.
    split_row: int = -1

    @property
    def keys(self) -> int:
        """The number of keys that the block reads."""
        return self.prefix + self.own_keys

    def parts(self, limit: int) -> Iterator["Item"]:
        """Split the item into several that read at most `limit` keys each."""
        for begin in range(0, self.prefix, limit):
            yield self._replace(
                prefix_slot=self.prefix_slot + begin,
                prefix=min(limit, self.prefix - begin),
                own_keys=0,
                clear=0,
                prefix_begin=self.prefix_begin + begin,
            )
        for begin in range(0, self.own_keys, limit):
            length = min(limit, self.own_keys - begin)
            yield self._replace(
                prefix=0,
                own_slot=self.own_slot + begin,
                own_keys=length,
                clear=min(max(0, self.clear - begin), length),
                key=self.key + begin,
            )


class SizedItem(NamedTuple):
    """An item and the number of rows of its block, which has one per query and query head."""

    rows: int
    item: Item


class PlanKey(NamedTuple):
    """What determines the plan of a pass: layers with the same key share one."""

    repeat: int  # Query heads that share a key head.
    block_rows: tuple[int, ...]
    fill: int


class KernelPlan:
    """What a kernel reads besides queries, keys and values. It is built once per pass.

    Attributes:
        queries: Position, step and two sets of segments of each query, [tokens, 2 + 2 * words].
        keys: Position, step and segment of each own key, [own keys, 3].
        words: The number of 32-bit words of a set of segments.
        blocks: The block sizes that occur, in ascending order, with the items of each size, [items,
            fields of Item].
        max_own_keys: The largest number of own keys of an item.
        split_rows: The number of partial results, which are to be merged.
        merged: The tokens with several results, [n, 3]: each token's row, and the start and end of
            its results in `merged_rows`.
        merged_rows: Rows of the results, [split_rows], sorted by their token.
        visibility: The visibility that a kernel computed, by the layer's window.
    """

    @classmethod
    def of(cls, step: Step, key: PlanKey) -> "KernelPlan":
        """Return the plan of a pass, which is built on first use."""
        if key not in step.plans:
            step.plans[key] = cls(step, *key)
        plan: KernelPlan = step.plans[key]
        return plan

    def __init__(self, step: Step, repeat: int, block_rows: tuple[int, ...], fill: int = 0) -> None:
        """
        Args:
            step: The pass.
            repeat: The number of query heads that share a key head.
            block_rows: The sizes of the kernel's blocks, in ascending order. A span that fits none
                of them is cut into several blocks of the last size.
            fill: The number of items that fill the device. If there are fewer, long keys are split,
                and a prefix is read for several spans at once. 0 turns both off.
        """
        self.device = step.slots.device
        self.spans = step.spans
        queries = np.concatenate([span.queries for span in self.spans], axis=1)  # [3, tokens]
        keys = np.concatenate([span.keys for span in self.spans], axis=1)  # [3, own keys]
        sets, keys[SEGMENT] = _segment_sets(self.spans, queries, keys)
        # The kernels are compiled for each number of words, so it is rounded up to a power of two.
        self.words = power_of_two(sets.shape[2])
        sets = np.pad(sets, ((0, 0), (0, 0), (0, self.words - sets.shape[2])))
        clear = _clear_keys(self.spans, queries, sets, keys)
        items = _items(step, clear, repeat, block_rows)
        self.max_own_keys = max(item.own_keys for _, item in items)
        merge = _Merge.nothing()
        if fill:
            items = _share_prefixes(items, step, repeat, block_rows)
            items, merge = _split(items, fill)
        self.split_rows = len(merge.rows)
        sizes = sorted({rows for rows, _ in items})
        query_table = np.column_stack(
            [queries[POSITION], queries[STEP], sets.reshape(len(sets), -1)]
        )
        key_table = np.column_stack([keys[POSITION], keys[STEP], keys[SEGMENT]])
        item_tables: list[np.ndarray] = []
        for size in sizes:
            item_tables.append(np.array([item for rows, item in items if rows == size]))
        moved = _move([query_table, key_table, merge.tokens, merge.rows, *item_tables], self.device)
        self.queries, self.keys, self.merged, self.merged_rows, *blocks = moved
        self.blocks = list(zip(sizes, blocks, strict=True))
        self.visibility: dict[int | None, torch.Tensor] = {}
        self._starts: dict[int | None, torch.Tensor | None] = {}

    @property
    def windows(self) -> set[int | None]:
        """The windows that layers have asked for."""
        return set(self._starts)

    def starts(self, window: int | None) -> torch.Tensor | None:
        """Return the first position in each query's window, [tokens]; None if no window is full."""
        if window not in self._starts:
            self._starts[window] = self._compute_starts(window)
        return self._starts[window]

    def _compute_starts(self, window: int | None) -> torch.Tensor | None:
        if window is None:
            return None
        starts: list[np.ndarray] = []
        is_full = False
        for span in self.spans:
            if span.effective_window(window) is None:
                starts.append(np.full(span.query_count, _NO_START))
            else:
                starts.append(window_starts(*span.with_prefix(), window))
                is_full = True
        if not is_full:
            return None
        (moved,) = _move([np.maximum(np.concatenate(starts), _NO_START)], self.device)
        return moved


def _segment_sets(
    spans: list[Span], queries: np.ndarray, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sets of segments of all queries, and each key's segment as an index into them.

    Args:
        spans: The spans of the pass.
        queries: [3, tokens]
        keys: [3, own keys]

    Returns:
        [tokens, 2, words] and [own keys], as `segment_sets`.
    """
    if all(span.reach is spans[0].reach for span in spans):
        return segment_sets(spans[0].reach, queries[SEGMENT], keys[SEGMENT])
    parts = [segment_sets(span.reach, span.queries[SEGMENT], span.keys[SEGMENT]) for span in spans]
    words = max(sets.shape[2] for sets, _ in parts)
    all_sets = np.zeros((queries.shape[1], 2, words), dtype=np.int32)
    for span, (sets, _) in zip(spans, parts, strict=True):
        all_sets[span.query_start : span.query_end, :, : sets.shape[2]] = sets
    return all_sets, np.concatenate([labels for _, labels in parts])


def _clear_keys(
    spans: list[Span], queries: np.ndarray, sets: np.ndarray, keys: np.ndarray
) -> list[int]:
    """Count the leading own keys of each span that all of its queries see.

    The kernels read these keys without a mask.

    Args:
        spans: The spans of the pass.
        queries: Positions, segments and steps, [3, tokens].
        sets: The queries' sets of segments, [tokens, 2, words].
        keys: Positions, numbers in these sets, and steps, [3, own keys].

    Returns:
        [spans]
    """
    begins = np.cumsum([0, *(span.query_count for span in spans[:-1])])
    lengths = [span.key_count for span in spans]
    # The segments that all queries of a span see, entirely or up to the query's position, [spans,
    # words].
    whole = np.bitwise_and.reduceat(sets[:, 0], begins)
    causal = np.bitwise_and.reduceat(sets[:, 0] | sets[:, 1], begins)
    # The position and step up to which every query of a key's span can see, [own keys].
    position = np.repeat(np.minimum.reduceat(queries[POSITION], begins), lengths)
    step = np.repeat(np.minimum.reduceat(queries[STEP], begins), lengths)
    # The word and the bit of each key's segment in its span's sets, [own keys].
    first_word = np.repeat(np.arange(0, whole.size, whole.shape[1]), lengths)
    word = first_word + (keys[SEGMENT] >> 5)
    bit = keys[SEGMENT] & 31
    in_whole = whole.take(word) >> bit & 1
    in_causal = causal.take(word) >> bit & 1
    is_seen = (in_whole | (in_causal & (keys[POSITION] <= position))) & (keys[STEP] <= step)
    hidden = np.flatnonzero(is_seen == 0)
    ends = np.cumsum([0, *lengths])
    # The next hidden key at or after the first key of each span.
    next_hidden = np.append(hidden, ends[-1])[np.searchsorted(hidden, ends[:-1])]
    clear = np.minimum(next_hidden, ends[1:]) - ends[:-1]
    return clear.tolist()


def _items(
    step: Step, clear_keys: list[int], repeat: int, block_rows: tuple[int, ...]
) -> list[SizedItem]:
    """Cut the queries of each span into blocks."""
    items: list[SizedItem] = []
    first_key = 0
    clear_of_span = iter(clear_keys)
    for group in step.groups:
        for span in group.spans:
            clear = next(clear_of_span)
            items += _items_of_span(span, group, clear, first_key, repeat, block_rows)
            first_key += span.key_count
    return items


def _items_of_span(
    span: Span,
    group: PrefixGroup,
    clear: int,
    first_key: int,
    repeat: int,
    block_rows: tuple[int, ...],
) -> Iterator[SizedItem]:
    query_count = span.query_count
    rows = _fitting_rows(query_count * repeat, block_rows, repeat)
    block = rows // repeat  # The number of queries of a block.
    # Blocks of a causal span read the keys up to their last query and need no mask before their
    # first query.
    is_causal = query_count > block and span.causal
    own_keys = span.key_count
    for first in range(0, query_count, block):
        count = min(block, query_count - first)
        if is_causal:
            own_keys = span.key_count - query_count + first + count
            clear = own_keys - count
        item = Item(
            first=span.query_start + first,
            queries=count,
            prefix_slot=group.start,
            prefix=group.length,
            own_slot=span.key_start,
            own_keys=own_keys,
            clear=clear,
            key=first_key,
        )
        yield SizedItem(rows, item)


@cache
def _fitting_rows(needed: int, block_rows: tuple[int, ...], repeat: int) -> int:
    """Return the rows of the smallest block that fits `needed` rows, or of the largest block."""
    fitting = [rows for rows in block_rows if rows >= needed]
    rows = fitting[0] if fitting else block_rows[-1]
    # A block has a row for each query head that shares the key head.
    return max(rows, power_of_two(repeat))


def _share_prefixes(
    items: list[SizedItem], step: Step, repeat: int, block_rows: tuple[int, ...]
) -> list[SizedItem]:
    """Read a long prefix once for several spans, if that at least halves the number of blocks."""
    for group in step.groups:
        first = group.spans[0].query_start
        end = group.spans[-1].query_end
        rows = _fitting_rows((end - first) * repeat, block_rows, repeat)
        block = rows // repeat
        members = [sized for sized in items if first <= sized.item.first < end]
        starts = range(first, end, block)
        if group.length < _MIN_PART or 2 * len(starts) > len(members):
            continue
        items = [sized for sized in items if not first <= sized.item.first < end]
        for member_rows, item in members:
            items.append(SizedItem(member_rows, item._replace(prefix=0)))
        for start in starts:
            item = Item(
                first=start,
                queries=min(block, end - start),
                prefix_slot=group.start,
                prefix=group.length,
                own_slot=0,
                own_keys=0,
                clear=0,
                key=0,
            )
            items.append(SizedItem(rows, item))
    return items


@dataclass
class _Merge:
    """The results that are merged."""

    # Each token with several results, and the start and end of these in `rows`, [n, 3].
    tokens: np.ndarray
    # Rows of results, sorted by their token.
    rows: np.ndarray

    @staticmethod
    def nothing() -> "_Merge":
        return _Merge(np.zeros((0, 3)), np.zeros(0))


def _split(items: list[SizedItem], fill: int) -> tuple[list[SizedItem], _Merge]:
    """Split items into parts with about the same number of keys so that they fill the device."""
    keys = sum(sized.item.keys for sized in items)
    # The keys per part: an equal share, rounded up to a multiple of the minimum.
    limit = max(_MIN_PART, -(-keys // fill // _MIN_PART) * _MIN_PART)
    parts: list[SizedItem] = []
    for sized in items:
        if sized.item.keys > 1.5 * limit:
            parts += [SizedItem(sized.rows, part) for part in sized.item.parts(limit)]
        else:
            parts.append(sized)
    tokens = [np.arange(part.first, part.first + part.queries) for _, part in parts]
    results = np.bincount(np.concatenate(tokens))  # The number of results of each token.
    token_of_row: list[int] = []  # The token of each result that is merged.
    for number, (rows, part) in enumerate(parts):
        if results[part.first] > 1:
            parts[number] = SizedItem(rows, part._replace(split_row=len(token_of_row)))
            token_of_row += tokens[number].tolist()
    merged, begins = np.unique(np.sort(token_of_row), return_index=True)
    ends = np.append(begins[1:], len(token_of_row))[: len(merged)]
    rows_by_token = np.argsort(token_of_row, kind="stable")
    return parts, _Merge(np.column_stack([merged, begins, ends]), rows_by_token)


def _move(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays to a device as int32, in one transfer.

    Each begins at a multiple of 16 bytes, because triton then compiles faster loads.
    """
    padded_sizes = [-(-array.size // 4) * 4 for array in arrays]
    begins = np.cumsum([0, *padded_sizes]).tolist()
    packed = np.zeros(begins[-1], dtype=np.int32)
    for array, begin in zip(arrays, begins[:-1], strict=True):
        packed[begin : begin + array.size] = array.reshape(-1)
    moved = to_device(packed, device)
    return [
        moved[begin : begin + array.size].view(array.shape)
        for array, begin in zip(arrays, begins[:-1], strict=True)
    ]


def power_of_two(n: int) -> int:
    """Return the lowest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
