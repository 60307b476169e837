"""The region of one sequence in the KV cache, and the slot of each of its tokens."""

from dataclasses import dataclass, field

import numpy as np

from raypd.decoding.kv_cache import KVCache
from raypd.decoding.visibility import NO_TOKEN

MIN_REGION_SLOTS = 64
_NO_SLOT = -1  # The offset of a token that is not in the cache.
_MIN_HOLES = 16  # With fewer free slots, moving is not worthwhile.


def _no_offsets() -> np.ndarray:
    return np.full(MIN_REGION_SLOTS, _NO_SLOT, dtype=np.int64)


def _no_slots() -> np.ndarray:
    return np.zeros(0, dtype=np.int64)


@dataclass(eq=False)
class CacheRegion:
    """A contiguous range of slots that grows with its sequence and shrinks as tokens leave.

    Attributes:
        start: The first slot.
        owner: The own token in each slot, [slots]; NO_TOKEN for a free slot.
        offsets: The slot of each own token as an offset in the region, [tokens].
        high: Slots from this offset on are free.
        holes: Offsets of free slots below `high`.
    """

    start: int = 0
    owner: np.ndarray = field(default_factory=_no_slots)
    offsets: np.ndarray = field(default_factory=_no_offsets)
    high: int = 0
    holes: list[int] = field(default_factory=list)

    @property
    def slots(self) -> int:
        """The number of slots; 0 while the sequence has no region."""
        return len(self.owner)

    def reserve(self, tokens: int) -> None:
        """Make room for the offsets of `tokens` own tokens. The array doubles when it is full."""
        capacity = len(self.offsets)
        if tokens > capacity:
            extra = max(tokens - capacity, capacity)
            self.offsets = np.append(self.offsets, np.full(extra, _NO_SLOT))

    def allocate(self, chunk: np.ndarray, cached: int, end: int, cache: KVCache) -> np.ndarray:
        """Give slots to own tokens, and move to a larger region if this one is full.

        Args:
            chunk: The own tokens, [n].
            cached: The first own token that has not gone through the model.
            end: The number of own tokens, including those of the whole feed.
            cache: The cache.

        Returns:
            The tokens' slots in the cache, [n].

        Raises:
            OutOfSlots: If the cache has no larger region. Nothing has changed then.
        """
        reused = min(len(chunk), len(self.holes))
        if self.high + len(chunk) - reused > self.slots:
            # Ask for the whole feed at once, so that its later chunks do not move the region again.
            self._grow(self.high + end - cached - reused, cache)
        new_high = self.high + len(chunk) - reused
        offsets = np.arange(self.high, new_high)
        if reused:
            holes = [self.holes.pop() for _ in range(reused)]
            offsets = np.append(holes, offsets)
        self.high = new_high
        self.offsets[chunk] = offsets
        self.owner[offsets] = chunk
        self._release_early(end - int(chunk[-1]) - 1, cache)
        return self.start + self.offsets[chunk]

    def deallocate(self, tokens: list[int]) -> None:
        """Take some own tokens out of the cache."""
        offsets = self.offsets[tokens]
        self.owner[offsets] = NO_TOKEN
        self.holes += offsets.tolist()
        self.offsets[tokens] = _NO_SLOT
        while self.high and self.owner[self.high - 1] == NO_TOKEN:
            self.high -= 1
        self.holes = [hole for hole in self.holes if hole < self.high]

    def release(self, cache: KVCache) -> None:
        """Give all slots back."""
        if self.slots:
            cache.free(self.start, self.slots)
        self.owner = _no_slots()
        self.high = 0
        self.holes = []
        self.offsets[:] = _NO_SLOT

    def _release_early(self, coming: int, cache: KVCache) -> None:
        """Free the slots of tokens that left the cache (APAR, section 3.4).

        Args:
            coming: The number of tokens of the feed that will need a slot later.
            cache: The cache.
        """
        # The tokens are moved together when more than one slot in four is a hole, so each dropped
        # token costs at most three moves.
        compacts = len(self.holes) >= _MIN_HOLES and 4 * len(self.holes) > self.high
        if compacts:
            self._compact(cache)
        needed = self.high + coming
        if compacts or 4 * needed < self.slots:
            # The region keeps a quarter more than is needed, so that the sequence can grow.
            size = MIN_REGION_SLOTS * -(-5 * needed // (4 * MIN_REGION_SLOTS))
            if size < self.slots:
                cache.free(self.start + size, self.slots - size)
                self.owner = self.owner[:size].copy()

    def _compact(self, cache: KVCache) -> None:
        """Move the tokens to the beginning of the region, without gaps."""
        occupied = np.flatnonzero(self.owner[: self.high] != NO_TOKEN)
        cache.compact(self.start, occupied)
        tokens = self.owner[occupied]
        self.owner[: self.high] = NO_TOKEN
        self.high = len(occupied)
        self.holes = []
        self.owner[: self.high] = tokens
        self.offsets[tokens] = np.arange(self.high)

    def _grow(self, needed: int, cache: KVCache) -> None:
        """Move to a region of at least `needed` slots."""
        size = max(MIN_REGION_SLOTS, self.slots)
        while size < needed:
            size *= 2
        start = cache.alloc(size)
        if self.slots:
            cache.move(self.start, self.high, start)
            cache.free(self.start, self.slots)
        self.start = start
        self.owner = np.append(self.owner, np.full(size - self.slots, NO_TOKEN))
