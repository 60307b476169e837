"""The KV cache: one store per layer, in which every sequence has a contiguous region of slots.

A store is laid out as [kv_heads, slots, head_dim], so attention reads the keys of one head of a
sequence as one piece of memory, without a copy. A sequence that outgrows its region moves to one
twice as large. A sequence whose tokens left the cache is compacted and frees the rest.
"""

import numpy as np
import torch

from raypd.decoding.memory import has_main_memory, is_out_of_memory
from raypd.decoding.transfer import to_device

NO_MEMORY = "there is no memory for more"
# The dtype of the cache for each value of `model.kv_cache`; None for the dtype of the keys and
# values that are written.
CACHE_DTYPES: dict[str, torch.dtype | None] = {"auto": None, "fp8": torch.float8_e4m3fn}


def cache_dtype_of(name: str) -> torch.dtype | None:
    """Return the dtype of the cache for a value of `model.kv_cache`.

    Raises:
        ValueError: If there is no such cache.
    """
    if name not in CACHE_DTYPES:
        raise ValueError(f"there is no KV cache {name!r}: {', '.join(CACHE_DTYPES)}")
    return CACHE_DTYPES[name]


def in_8_bits(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round keys or values to a dtype of 8 bits, with a scale of 1.

    Numbers outside the range are clamped to it. Some versions of torch would turn them into NaN.
    """
    largest = torch.finfo(dtype).max
    return tensor.clamp(-largest, largest).to(dtype)


class OutOfSlots(Exception):
    """The cache has no room at the moment. Sequences that end free some."""


class SlotAllocator:
    """First-fit allocation of contiguous ranges of slots."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._holes = [(0, slots)]  # (start, length), in order of start, never adjacent.

    def alloc(self, length: int) -> int | None:
        """Return the start of a region of `length` slots, or None if no hole is large enough."""
        for i, (start, hole) in enumerate(self._holes):
            if hole == length:
                del self._holes[i]
                return start
            if hole > length:
                self._holes[i] = (start + length, hole - length)
                return start
        return None

    def free(self, start: int, length: int) -> None:
        """Take a region back, and merge it with adjacent free regions."""
        merged: list[tuple[int, int]] = []
        for region_start, region_length in sorted([*self._holes, (start, length)]):
            if merged:
                last_start, last_length = merged[-1]
                if last_start + last_length == region_start:
                    merged[-1] = (last_start, last_length + region_length)
                    continue
            merged.append((region_start, region_length))
        self._holes = merged

    @property
    def available(self) -> int:
        """The number of free slots."""
        return sum(length for _, length in self._holes)


class KVCache:
    """The keys and values of all sequences, [slots, kv_heads, head_dim] per layer.

    A layer whose values are part of its keys stores no values here.

    The cache doubles when it is full, up to `limit` slots. A layer's stores are allocated on the
    first write. They are zeroed, because a NaN in a masked slot would spread.

    Attributes:
        allocator: Hands out the slots.
        limit: The largest number of slots, or None for as many as memory allows.
        generation: A number that rises whenever the stores move to other addresses.
        dtype: The dtype of the stores; None for that of the keys and values that are written.
    """

    def __init__(
        self,
        slots: int,
        limit: int | None,
        device: torch.device,
        limit_reason: str = "engine.cache_tokens allows no more",
        dtype: torch.dtype | None = None,
    ) -> None:
        if limit is not None:
            slots = min(slots, limit)
        self.allocator = SlotAllocator(slots)
        self.limit = limit
        self._limit_reason = limit_reason  # Why the cache does not grow, for messages.
        self.device = device
        self.dtype = dtype
        self.generation = 0
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def _stores(self) -> list[torch.Tensor]:
        return [*self.keys.values(), *self.values.values()]

    @property
    def slot_bytes(self) -> int:
        """The bytes of one slot in all layers written so far."""
        return sum(store[0].nbytes for store in self._stores())

    def alloc(self, length: int) -> int:
        """Return the start of a new region of `length` slots.

        Raises:
            OutOfSlots: If the cache is full and cannot grow.
        """
        while True:
            start = self.allocator.alloc(length)
            if start is not None:
                return start
            slots = self.allocator.slots
            if self._try_grow(max(2 * slots, slots + length)):
                continue
            # There may be enough memory for this region even if there is not enough to double the
            # cache.
            if self._try_grow(slots + length):
                continue
            raise OutOfSlots(
                f"{length} slots wanted, {self.allocator.available} of {slots} free, and "
                f"{self._limit_reason}"
            )

    def _try_grow(self, slots: int) -> bool:
        """Enlarge the cache to `slots` or to its limit; return False if it stays unchanged."""
        if self.limit is not None:
            slots = min(slots, self.limit)
        extra_slots = slots - self.allocator.slots
        if extra_slots <= 0:
            return False
        if self.device.type == "cpu" and not has_main_memory(extra_slots * self.slot_bytes):
            # This may change: another process may free memory, so the limit stays.
            self._limit_reason = NO_MEMORY
            return False
        try:
            self._resize(slots)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # From now on sequences wait for each other.
            self.limit = self.allocator.slots
            self._limit_reason = NO_MEMORY
            return False
        return True

    def _resize(self, slots: int) -> None:
        """Give every layer more slots.

        If memory runs out halfway, the new slots of the layers already enlarged stay unused.
        """
        for stores in (self.keys, self.values):
            for layer, store in stores.items():
                if len(store) < slots:
                    larger = _zeros(slots, store, None)
                    larger[: len(store)] = store
                    stores[layer] = larger
                    self.generation += 1
        self.allocator.free(self.allocator.slots, slots - self.allocator.slots)
        self.allocator.slots = slots

    def free(self, start: int, length: int) -> None:
        """Give back `length` slots from `start`."""
        self.allocator.free(start, length)

    def move(self, start: int, length: int, target: int) -> None:
        """Copy `length` slots of every layer from `start` to `target`."""
        for store in self._stores():
            store[target : target + length] = store[start : start + length]

    def compact(self, start: int, offsets: np.ndarray) -> None:
        """Move some slots of a region to its beginning, without gaps, in every layer.

        Args:
            start: First slot of the region.
            offsets: The offsets of the slots to keep, in ascending order, [n].
        """
        slots = to_device(start + offsets, self.device)
        for store in self._stores():
            store[start : start + len(offsets)] = store[slots]

    def write(
        self,
        layer: int,
        slots: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        latent_dim: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the keys and values of a pass in a layer.

        Args:
            layer: Number of the layer.
            slots: Where each token goes, [tokens].
            key: [tokens, kv_heads, head_dim], or None if they are stored already.
            value: [tokens, kv_heads, value_dim], or None likewise.
            latent_dim: How many leading elements of a key form its value; None if values are
                separate.

        Returns:
            All keys of the layer [slots, kv_heads, head_dim], and all values [slots, kv_heads,
            value_dim]. They have the dtype of the cache.
        """
        if latent_dim is not None:
            if key is not None:
                _put(self.latents(layer, key), slots, key)
            return self.keys[layer], self.keys[layer][..., :latent_dim]
        if key is None or value is None:
            return self.keys[layer], self.values[layer]
        keys, values = self.layer(layer, key, value)
        _put(keys, slots, key)
        _put(values, slots, value)
        return keys, values

    def latents(self, layer: int, key: torch.Tensor) -> torch.Tensor:
        """Return the keys of a layer whose values are part of them, [slots, kv_heads, head_dim].

        They are allocated as by `layer`.
        """
        if layer not in self.keys:
            self.keys[layer] = _zeros(self.allocator.slots, key, self.dtype)
        return self.keys[layer]

    def layer(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values, [slots, kv_heads, head_dim] each.

        If the layer has none yet, they are allocated with the shape of `key` and `value`, [tokens,
        kv_heads, head_dim], in the dtype of the cache.
        """
        if layer not in self.keys:
            self.keys[layer] = _zeros(self.allocator.slots, key, self.dtype)
            self.values[layer] = _zeros(self.allocator.slots, value, self.dtype)
        return self.keys[layer], self.values[layer]


def _zeros(slots: int, like: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Allocate a store [slots, kv_heads, head_dim] for tensors [tokens, kv_heads, head_dim].

    Its dtype is that of the tensors unless another one is given.
    """
    _, kv_heads, head_dim = like.shape
    return like.new_zeros(kv_heads, slots, head_dim, dtype=dtype).transpose(0, 1)


def _put(store: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
    """Write rows [tokens, kv_heads, head_dim] to some slots of a store, in its dtype."""
    if store.dtype.itemsize == 1:
        # torch can index-copy rows of bytes, but not rows of 8-bit floats.
        rounded = in_8_bits(new, store.dtype)
        store = store.view(torch.uint8)
        new = rounded.view(torch.uint8)
    store.index_copy_(0, slots, new)
