"""One program in the engine: its tokens, their slots in the cache, and its pending feed."""

from collections import abc
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raypd.decoding.cache_region import CacheRegion
from raypd.decoding.counts import TokenCounts
from raypd.decoding.kv_cache import KVCache
from raypd.decoding.program import Feed, Predictions, Program, ProgramError
from raypd.decoding.recurrence.chains import Chains
from raypd.decoding.recurrence.states import EMPTY
from raypd.decoding.sampling import GREEDY, Sampling
from raypd.decoding.visibility import POSITION, SEGMENT, STEP, grown, one_segment

# The index of the last row of a sequence's table. The rows before it are those of the visibility
# rule.
TOKEN = 3
_MIN_TOKENS = 64  # The number of tokens for which the arrays of a new sequence have room.

Indices = abc.Sequence[int]


@dataclass
class Prefix:
    """The keys and values of leading tokens that several sequences share and read in place."""

    start: int  # First slot, once `ready`.
    length: int
    ready: bool = False
    users: int = 0  # Number of sequences that share it.
    state: int = EMPTY  # The slot of the recurrent state after it, once `ready`.


def _empty_table() -> np.ndarray:
    return np.zeros((4, _MIN_TOKENS), dtype=np.int32)


def _no_flags() -> np.ndarray:
    return np.zeros(_MIN_TOKENS, dtype=bool)


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
    # Whether each own token left the cache for good, [tokens].
    dropped: np.ndarray = field(default_factory=_no_flags)
    has_dropped: bool = False
    # The number of own tokens ever fed.
    size: int = 0
    # Own tokens before this one have been through the model.
    cached: int = 0
    # Where its own tokens are in the cache.
    region: CacheRegion = field(default_factory=CacheRegion)
    # What each segment sees of each other, [segments, segments] of Reach.
    reach: np.ndarray = field(default_factory=one_segment)
    # The number of feeds that were answered.
    steps: int = 0
    # Whether a pass with tokens of this sequence is running on the device.
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
    # What its recurrent layers remember; None if the model has no such layers.
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
        # Reach.HIDDEN is 0, so `all` tests whether every segment sees some of itself.
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
        self.region.deallocate(tokens[~self.dropped[first : self.cached]].tolist())
        self.cached = first

    def _edit_rows(self, feed: Feed) -> None:
        """Drop earlier rows from the cache, and move others to another segment."""
        if feed.move and self.chains is not None:
            raise ProgramError("a model with recurrent layers cannot move rows between segments")
        for row in feed.drop:
            token = row - self.shared
            self.dropped[token] = True
            self.has_dropped = True
            self.region.deallocate([token])
        if feed.drop and self.chains is not None:
            tokens = [row - self.shared for row in feed.drop]
            first_again = self.chains.drop(self.table, self.dropped, tokens)
            if first_again is not None:
                self._feed_again(first_again)
        for row, segment in feed.move.items():
            self.table[SEGMENT, row - self.shared] = segment

    def _reserve(self, size: int) -> None:
        """Make room for `size` own tokens in the arrays, which double when they are full."""
        self.region.reserve(size)
        capacity = self.table.shape[1]
        if size <= capacity:
            return
        extra = max(size - capacity, capacity)
        self.table = np.append(self.table, np.zeros((4, extra), dtype=np.int32), axis=1)
        self.dropped = np.append(self.dropped, np.zeros(extra, dtype=bool))

    def pending_tokens(self) -> np.ndarray:
        """Return the own tokens that the model must still process before the feed is answered."""
        if not self.has_dropped:
            return np.arange(self.cached, self.size)
        return self.cached + np.flatnonzero(~self.dropped[self.cached : self.size])

    def samples_in(self, chunk: np.ndarray) -> tuple[Indices, Indices]:
        """Find the samples that are wanted after the tokens of a chunk.

        Args:
            chunk: Own tokens, [n].

        Returns:
            Their indices in the feed's `sample_at`, and the rows of the chunk that they follow.
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

        They are the same whichever pass asks for them, even when a pass is repeated.
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
        return self.region.allocate(chunk, self.cached, self.size, cache)

    def release(self, cache: KVCache) -> None:
        """Give the region back. What was cached must be fed again, except what was dropped."""
        if self.chains is not None:
            self.chains.release()
        self.region.release(cache)
        self.cached = 0
