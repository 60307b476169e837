"""Where keys and values live: one pool a layer, in which every row owns a contiguous region of slots.

Contiguous regions let attention read a row's keys as a view; nothing is gathered on the hot path. A row that outgrows
its region moves to one twice as large; one whose tokens have left the cache closes up and gives back what it can.
"""

from __future__ import annotations

import numpy as np
import torch

from raypd.decoding.memory import is_out_of_memory


class OutOfSlots(Exception):
    """No room in the pool now; rows that end make some."""


class Regions:
    """First-fit allocation of contiguous slot ranges."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = [(0, slots)]  # (start, length), by start, never adjacent

    def take(self, length: int) -> int | None:
        """Start of a region of `length` slots, or None if no hole is large enough."""
        for i, (start, free) in enumerate(self._free):
            if free >= length:
                self._free[i : i + 1] = [(start + length, free - length)] if free > length else []
                return start
        return None

    def give(self, start: int, length: int) -> None:
        """Returns a region, merged with the free ones beside it."""
        merged: list[tuple[int, int]] = []
        for hole in sorted([*self._free, (start, length)]):
            if merged and merged[-1][0] + merged[-1][1] == hole[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + hole[1])
            else:
                merged.append(hole)
        self._free = merged

    def enlarge(self, slots: int) -> None:
        """More slots at the end."""
        added = slots - self.slots
        end, self.slots = self.slots, slots
        self.give(end, added)

    @property
    def free(self) -> int:
        return sum(length for _, length in self._free)


class Pool:
    """Keys and values of all rows, per layer [kv_heads, slots, head_dim].

    Layers are allocated when they are first written, from the shapes that the model hands over, and zeroed: NaN in a
    masked slot would leak through attention. The pool doubles when it is full, up to `limit` slots.
    """

    def __init__(self, slots: int, limit: int | None, device: torch.device) -> None:
        self.regions = Regions(slots if limit is None else min(slots, limit))
        self.limit = limit
        self.device = device
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def take(self, length: int) -> int:
        """Start of a new region. Raises OutOfSlots when the pool is full and may not grow."""
        while (start := self.regions.take(length)) is None:
            larger = max(2 * self.regions.slots, self.regions.slots + length)
            if self.limit is not None:
                larger = min(larger, self.limit)
            if larger == self.regions.slots:
                raise OutOfSlots(f"{length} slots wanted, {self.regions.free} of {self.regions.slots} free")
            try:
                self._resize(larger)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self.limit = self.regions.slots  # rows wait for each other from here on
        return start

    def give(self, start: int, length: int) -> None:
        self.regions.give(start, length)

    def move(self, start: int, length: int, to: int) -> None:
        """Copies `length` slots of every layer to another region."""
        for store in (*self.keys.values(), *self.values.values()):
            store[:, to : to + length] = store[:, start : start + length]

    def compact(self, start: int, offsets: np.ndarray) -> None:
        """Moves the slots start + offsets [n], in rising order, to the first n of the region, in every layer."""
        slots = torch.from_numpy(start + offsets).to(self.device)
        for store in (*self.keys.values(), *self.values.values()):
            store[:, start : start + len(offsets)] = store[:, slots]

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores this step's keys and values: slots [tokens], key and value [kv_heads, tokens, head_dim]."""
        if layer not in self.keys:
            self.keys[layer] = key.new_zeros(key.shape[0], self.regions.slots, key.shape[2])
            self.values[layer] = value.new_zeros(value.shape[0], self.regions.slots, value.shape[2])
        self.keys[layer].index_copy_(1, slots, key)
        self.values[layer].index_copy_(1, slots, value)

    def _resize(self, slots: int) -> None:
        """More slots in every layer. Where memory ends half-way, layers that have them keep them unused."""
        for store in (self.keys, self.values):
            for layer, old in store.items():
                if old.shape[1] < slots:
                    larger = old.new_zeros(old.shape[0], slots, old.shape[2])
                    larger[:, : old.shape[1]] = old
                    store[layer] = larger
        self.regions.enlarge(slots)
