"""One program in the engine: its tokens, their slots in the cache, and the feed it waits for."""

from collections import abc
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raypd.decoding.counts import TokenCounts
from raypd.decoding.kv_cache import KVCache
from raypd.decoding.program import Feed, Predictions, Program, ProgramError
from raypd.decoding.recurrence.chains import Chains
from raypd.decoding.recurrence.states import EMPTY
from raypd.decoding.sampling import GREEDY, Sampling
from raypd.decoding.visibility import NO_TOKEN, POSITION, SEGMENT, STEP, grown, one_segment

# The last row of a sequence's table. The rows before it are those of the visibility rule.
TOKEN = 3
MIN_REGION_SLOTS = 64
_NO_SLOT = -1  # The offset of a token that is not in the cache.
_MIN_HOLES = 16  # Fewer free slots are not worth a move.

Indices = abc.Sequence[int]


@dataclass
class Prefix:
    """Keys and values of leading tokens that several sequences share and read in place."""

    start: int  # First slot, once `ready`.
    length: int
    ready: bool = False
    users: int = 0  # Number of sequences that share it.
    state: int = EMPTY  # The slot of the recurrent state behind it, once `ready`.


def _empty_table() -> np.ndarray:
    return np.zeros((4, MIN_REGION_SLOTS), dtype=np.int32)


def _no_offsets() -> np.ndarray:
    return np.full(MIN_REGION_SLOTS, _NO_SLOT, dtype=np.int64)


def _no_flags() -> np.ndarray:
    return np.zeros(MIN_REGION_SLOTS, dtype=bool)


def _no_slots() -> np.ndarray:
    return np.zeros(0, dtype=np.int64)


@dataclass(eq=False)
class Sequence:
    """A program, its tokens and its region of the cache.

    A sequence's own tokens do not include the `shared` ones of its prefix. The row indices that a
    program uses count both.
    """

    program: Program[Any]
    tag: Any = None
    sampling: Sampling = GREEDY
    seed: int = 0
    prefix: Prefix | None = None
    # Leading tokens that belong to the prefix.
    shared: int = 0
    # Position, segment, step and id of each own token, [4, tokens].
    table: np.ndarray = field(default_factory=_empty_table)
    # The slot of each own token as an offset in the region, [tokens].
    offsets: np.ndarray = field(default_factory=_no_offsets)
    # Whether each own token left the cache for good, [tokens].
    dropped: np.ndarray = field(default_factory=_no_flags)
    has_dropped: bool = False
    # Own tokens ever fed.
    size: int = 0
    # Own tokens before this one have been through the model.
    cached: int = 0
    # First slot of the region.
    start: int = 0
    # The own token in each slot of the region, [slots]; NO_TOKEN for a free slot.
    owner: np.ndarray = field(default_factory=_no_slots)
    # Slots of the region from this offset on are free.
    high: int = 0
    # Offsets of free slots below `high`.
    holes: list[int] = field(default_factory=list)
    # What each segment sees of each other, [segments, segments] of Reach.
    reach: np.ndarray = field(default_factory=one_segment)
    # Feeds that were answered.
    steps: int = 0
    # Whether the device works on a pass with tokens of this sequence.
    in_flight: bool = False
    # The program's first feed, while the sequence waits.
    first_feed: Feed | None = None
    # The program's latest feed.
    feed: Feed = field(default_factory=lambda: Feed((), ()))
    # What was sampled for the latest feed, in the order of its `sample_at`.
    predictions: Predictions = field(default_factory=lambda: Predictions([], []))
    # One random number for each entry of the latest feed's `sample_at`.
    _draws: list[float] = field(default_factory=list)
    counts: TokenCounts = field(default_factory=TokenCounts)
    # What its recurrent layers remember; None if the model has none.
    chains: Chains | None = None

    def __post_init__(self) -> None:
        self.random = np.random.Generator(np.random.Philox(key=self.seed))

    def append_feed(self, feed: Feed) -> None:
        """Add the tokens of the program's next feed.

        Raises:
            ProgramError: If the feed cannot be carried out.
        """
        self._check(feed)
        self._edit_rows(feed)
        self.reach = grown(self.reach, feed.reach)
        # The tokens of a shared prefix are in the cache already.
        shared = self.shared if self.steps == 0 else 0
        new = len(feed.tokens) - shared
        end = self.size + new
        self._reserve(end)
        self.table[TOKEN, self.size : end] = feed.tokens[shared:]
        self.table[POSITION, self.size : end] = feed.positions[shared:]
        self.table[STEP, self.size : end] = self.steps
        if feed.segments is None:
            self.table[SEGMENT, self.size : end] = 0
        else:
            self.table[SEGMENT, self.size : end] = feed.segments[shared:]
        # A program with one segment that names no reach needs no check: the segment sees itself.
        if feed.segments is not None:
            self._check_segments(sorted(set(feed.segments[shared:])))
        elif len(self.reach) > 1 or feed.reach:
            self._check_segments([0])
        if self.chains is not None:
            self._extend_chains(self.chains, feed, end)
        self.feed = feed
        self.predictions = Predictions([], [])
        self._draws = []
        if feed.decoded is not None:
            self.counts.decode_tokens = feed.decoded
        self.size = end

    def _check(self, feed: Feed) -> None:
        """Raise ProgramError for a feed that contradicts itself or names missing rows."""
        n = len(feed.tokens)
        if n == 0:
            raise ProgramError("a feed holds no token")
        if len(feed.positions) != n:
            raise ProgramError(f"a feed of {n} tokens has {len(feed.positions)} positions")
        if feed.segments is not None and len(feed.segments) != n:
            raise ProgramError(f"a feed of {n} tokens has {len(feed.segments)} segments")
        samples = len(feed.sample_at)
        if samples and not 0 <= min(feed.sample_at) <= max(feed.sample_at) < n:
            raise ProgramError(f"a feed of {n} tokens samples behind a token that is not in it")
        if feed.allowed_token_ids is not None and len(feed.allowed_token_ids) != samples:
            raise ProgramError(
                f"a feed that samples {samples} tokens allows {len(feed.allowed_token_ids)}"
            )
        for row in (*feed.drop, *feed.move):
            token = row - self.shared
            if not 0 <= token < self.size or self.dropped[token]:
                raise ProgramError(f"row {row} is shared, not fed yet or dropped already")

    def _check_segments(self, segments: list[int]) -> None:
        """Raise ProgramError if some segments of a feed, in rising order, see too little."""
        # Reach.HIDDEN is 0, so `all` asks whether something is visible.
        if segments[-1] >= len(self.reach) or not self.reach[segments, segments].all():
            raise ProgramError(f"segments {segments} of a feed must at least reach themselves")
        if self.shared and not self.reach[segments, 0].all():
            raise ProgramError(
                "a segment that does not reach segment 0 cannot be in a program with a shared "
                "prefix"
            )

    def _extend_chains(self, chains: Chains, feed: Feed, end: int) -> None:
        """Add the tokens of a feed, up to `end`, to the chains of the recurrent layers."""
        parents = {segment: row - self.shared for segment, row in feed.continues.items()}
        first_parent = min(parents.values(), default=0)
        if first_parent < (-1 if self.shared else 0):
            raise ProgramError(
                f"a segment continues from row {first_parent + self.shared}, which is inside the "
                "shared prefix or before the text"
            )
        is_lost = chains.extend(
            self.table, self.size, end, self.reach, parents, feed.closed, feed.may_drop
        )
        if is_lost:
            self._feed_again(0)

    def _feed_again(self, first: int) -> None:
        """Take the own tokens from `first` on out of the cache, to be fed again."""
        tokens = np.arange(first, self.cached)
        self.deallocate(tokens[~self.dropped[first : self.cached]].tolist())
        self.cached = first

    def _edit_rows(self, feed: Feed) -> None:
        """Drop earlier rows from the cache, and move others to another segment."""
        if feed.move and self.chains is not None:
            raise ProgramError("a model with recurrent layers cannot move rows between segments")
        for row in feed.drop:
            token = row - self.shared
            self.dropped[token] = True
            self.has_dropped = True
            self.deallocate([token])
        if feed.drop and self.chains is not None:
            tokens = [row - self.shared for row in feed.drop]
            first_again = self.chains.drop(self.table, self.dropped, tokens)
            if first_again is not None:
                self._feed_again(first_again)
        for row, segment in feed.move.items():
            self.table[SEGMENT, row - self.shared] = segment

    def _reserve(self, size: int) -> None:
        """Make room for `size` own tokens in the arrays, which double when they are full."""
        capacity = self.table.shape[1]
        if size <= capacity:
            return
        extra = max(size - capacity, capacity)
        self.table = np.append(self.table, np.zeros((4, extra), dtype=np.int32), axis=1)
        self.offsets = np.append(self.offsets, np.full(extra, _NO_SLOT))
        self.dropped = np.append(self.dropped, np.zeros(extra, dtype=bool))

    def pending_tokens(self) -> np.ndarray:
        """Return the own tokens that the model must still process before the feed is answered."""
        if not self.has_dropped:
            return np.arange(self.cached, self.size)
        return self.cached + np.flatnonzero(~self.dropped[self.cached : self.size])

    def samples_in(self, chunk: np.ndarray) -> tuple[Indices, Indices]:
        """Find the samples that are wanted behind the tokens of a chunk.

        Args:
            chunk: Own tokens, [n].

        Returns:
            Their numbers in the feed's `sample_at`, and the rows of the chunk that they follow.
        """
        sample_at = self.feed.sample_at
        # The own token at which the feed begins. It is negative in a first feed with a prefix.
        first = self.size - len(self.feed.tokens)
        if chunk[0] == first and len(chunk) == len(self.feed.tokens):
            return range(len(sample_at)), sample_at
        row_of_index = {token - first: row for row, token in enumerate(chunk.tolist())}
        numbers = [number for number, index in enumerate(sample_at) if index in row_of_index]
        rows = [row_of_index[sample_at[number]] for number in numbers]
        return numbers, rows

    def add_predictions(self, numbers: Indices, predictions: Predictions) -> None:
        """Store what was sampled at some entries of the feed's `sample_at`."""
        count = len(self.feed.sample_at)
        if len(numbers) == count:
            self.predictions = predictions
            return
        for name in ("tokens", "logprobs", "logits", "hidden"):
            new_values = getattr(predictions, name)
            if new_values is None:
                continue
            values = getattr(self.predictions, name) or [None] * count
            for number, value in zip(numbers, new_values, strict=True):
                values[number] = value
            setattr(self.predictions, name, values)

    def draws(self, numbers: Indices) -> list[float]:
        """Return the random numbers for some samples of the feed.

        They are the same whichever pass asks, also when a pass is repeated.
        """
        if self.sampling.temperature == 0:
            return [0.0] * len(numbers)
        if not self._draws:
            self._draws = self.random.random(len(self.feed.sample_at)).tolist()
        return [self._draws[number] for number in numbers]

    def allocate(self, chunk: np.ndarray, cache: KVCache) -> np.ndarray:
        """Give slots to own tokens, and enlarge the region if it is full.

        Args:
            chunk: Own tokens, [n].
            cache: The cache with the region.

        Returns:
            The tokens' slots in the cache, [n].

        Raises:
            OutOfSlots: If the cache has no larger region. Nothing has changed then.
        """
        reused = min(len(chunk), len(self.holes))
        if self.high + len(chunk) - reused > len(self.owner):
            # Ask for the whole feed at once, so that its later chunks do not move the region again.
            self._grow_region(self.high + self.size - self.cached - reused, cache)
        end = self.high + len(chunk) - reused
        offsets = np.arange(self.high, end)
        if reused:
            holes = [self.holes.pop() for _ in range(reused)]
            offsets = np.append(holes, offsets)
        self.high = end
        self.offsets[chunk] = offsets
        self.owner[offsets] = chunk
        self._release_early(self.size - int(chunk[-1]) - 1, cache)
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

    def _release_early(self, coming: int, cache: KVCache) -> None:
        """Free the slots of tokens that left the cache (APAR, section 3.4).

        Args:
            coming: Tokens of the feed that need a slot later.
            cache: The cache with the region.
        """
        # The tokens move together when more than one slot in four is a hole. So a dropped token
        # costs the moves of at most three others.
        compacts = len(self.holes) >= _MIN_HOLES and 4 * len(self.holes) > self.high
        if compacts:
            self._compact(cache)
        needed = self.high + coming
        if compacts or 4 * needed < len(self.owner):
            # A quarter more than needed stays, for the sequence to grow in.
            size = MIN_REGION_SLOTS * -(-5 * needed // (4 * MIN_REGION_SLOTS))
            if size < len(self.owner):
                cache.free(self.start + size, len(self.owner) - size)
                self.owner = self.owner[:size].copy()

    def _compact(self, cache: KVCache) -> None:
        """Move the tokens together at the beginning of the region."""
        occupied = np.flatnonzero(self.owner[: self.high] != NO_TOKEN)
        cache.compact(self.start, occupied)
        tokens = self.owner[occupied]
        self.owner[: self.high] = NO_TOKEN
        self.high = len(occupied)
        self.holes = []
        self.owner[: self.high] = tokens
        self.offsets[tokens] = np.arange(self.high)

    def _grow_region(self, needed: int, cache: KVCache) -> None:
        """Move to a region of at least `needed` slots."""
        size = max(MIN_REGION_SLOTS, len(self.owner))
        while size < needed:
            size *= 2
        start = cache.alloc(size)
        if len(self.owner):
            cache.move(self.start, self.high, start)
            cache.free(self.start, len(self.owner))
        self.start = start
        self.owner = np.append(self.owner, np.full(size - len(self.owner), NO_TOKEN))

    def release(self, cache: KVCache) -> None:
        """Give the region back. What was cached must be fed again, except what was dropped."""
        if self.chains is not None:
            self.chains.release()
        if len(self.owner):
            cache.free(self.start, len(self.owner))
        self.owner = _no_slots()
        self.high = 0
        self.holes = []
        self.cached = 0
        self.offsets[: self.size] = _NO_SLOT
