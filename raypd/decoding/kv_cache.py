"""Where keys and values live: one store a layer, [kv_heads, slots, head_dim], in which every
sequence owns a contiguous region of slots, so that attention reads its keys as a view, one head's
in one piece. A sequence that outgrows its region moves to one of twice its size; one whose tokens
have left the cache closes up and frees the rest.
"""

import numpy as np
import torch

from raypd.decoding.memory import has_main_memory, is_out_of_memory
from raypd.decoding.transfer import to_device

NO_MEMORY = "there is no memory for more"


class OutOfSlots(Exception):
    """No room in the cache now; sequences that end make some."""


class SlotAllocator:
    """First-fit allocation of contiguous slot ranges."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._holes = [(0, slots)]  # (start, length), by start, never adjacent

    def alloc(self, length: int) -> int | None:
        """Start of a region of `length` slots, or None if no hole is large enough."""
        for i, (start, hole) in enumerate(self._holes):
            if hole >= length:
                self._holes[i : i + 1] = [(start + length, hole - length)] if hole > length else []
                return start
        return None

    def free(self, start: int, length: int) -> None:
        """Takes a region back, merged with the free ones beside it."""
        merged: list[tuple[int, int]] = []
        for region in sorted([*self._holes, (start, length)]):
            if merged and merged[-1][0] + merged[-1][1] == region[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + region[1])
            else:
                merged.append(region)
        self._holes = merged

    @property
    def available(self) -> int:
        return sum(length for _, length in self._holes)


class KVCache:
    """Keys and values of all sequences, per layer [slots, kv_heads, head_dim]; it doubles when
    full, up to `limit` slots (`why`: the reason for it). Layers are allocated at their first write,
    zeroed: NaN leaks from masked slots.
    """

    def __init__(
        self,
        slots: int,
        limit: int | None,
        device: torch.device,
        why: str = "engine.cache_tokens allows no more",
    ) -> None:
        self.allocator = SlotAllocator(slots if limit is None else min(slots, limit))
        self.limit = limit
        self._why = why  # it does not grow
        self.device = device
        self.generation = 0  # rises when stores move
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def alloc(self, length: int) -> int:
        """Start of a new region of `length` slots.

        Raises OutOfSlots where the cache is full and may not grow.
        """
        while (start := self.allocator.alloc(length)) is None:
            slots = self.allocator.slots
            if not (self._grown(max(2 * slots, slots + length)) or self._grown(slots + length)):
                raise OutOfSlots(
                    f"{length} slots wanted, {self.allocator.available} of {slots} free, and "
                    f"{self._why}"
                )
        return start

    def _grown(self, slots: int) -> bool:
        """Enlarges the cache to so many slots, or to its limit; False where it stays as it is."""
        slots = slots if self.limit is None else min(slots, self.limit)
        if slots <= self.allocator.slots:
            return False
        if self.device.type == "cpu" and not has_main_memory(
            (slots - self.allocator.slots) * self.slot_bytes
        ):
            self._why = NO_MEMORY  # for now
            return False
        try:
            self._resize(slots)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # Sequences wait for each other from here on.
            self.limit, self._why = self.allocator.slots, NO_MEMORY
            return False
        return True

    @property
    def slot_bytes(self) -> int:
        """Of one slot in all layers that were written."""
        return sum(store[0].nbytes for store in (*self.keys.values(), *self.values.values()))

    def free(self, start: int, length: int) -> None:
        self.allocator.free(start, length)

    def move(self, start: int, length: int, to: int) -> None:
        """Copies `length` slots of every layer from `start` on to those from `to` on."""
        for store in (*self.keys.values(), *self.values.values()):
            store[to : to + length] = store[start : start + length]

    def compact(self, start: int, offsets: np.ndarray) -> None:
        """Moves the slots at rising `offsets` [n] of a region together at its beginning, in every
        layer.
        """
        slots = to_device(start + offsets, self.device)
        for store in (*self.keys.values(), *self.values.values()):
            store[start : start + len(offsets)] = store[slots]

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores keys and values [tokens, kv_heads, head_dim] (None: they are) in `slots` [tokens];
        all, as `layer`.
        """
        if key is None or value is None:
            return self.keys[layer], self.values[layer]
        keys, values = self.layer(layer, key, value)
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)
        return keys, values

    def layer(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values [slots, kv_heads, head_dim], like the new ones [tokens,
        kv_heads, head_dim].
        """
        if layer not in self.keys:
            self.keys[layer] = _zeros(self.allocator.slots, key)
            self.values[layer] = _zeros(self.allocator.slots, value)
        return self.keys[layer], self.values[layer]

    def _resize(self, slots: int) -> None:
        """More slots in every layer.

        Where memory ends half-way, layers that have them keep them unused.
        """
        for store in (self.keys, self.values):
            for layer, old in store.items():
                if len(old) < slots:
                    larger = _zeros(slots, old)
                    larger[: len(old)] = old
                    store[layer] = larger
                    self.generation += 1
        self.allocator.free(self.allocator.slots, slots - self.allocator.slots)
        self.allocator.slots = slots


def _zeros(slots: int, like: torch.Tensor) -> torch.Tensor:
    """A store [slots, kv_heads, head_dim] for keys or values like [tokens, kv_heads, head_dim]."""
    return like.new_zeros(like.shape[1], slots, like.shape[2]).transpose(0, 1)
