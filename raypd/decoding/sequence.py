"""One program in the engine: its tokens, where they stand in the cache, and what it waits for."""

from collections import abc
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raypd.decoding.counts import TokenCounts
from raypd.decoding.kv_cache import KVCache
from raypd.decoding.program import Feed, Predictions, Program
from raypd.decoding.sampling import GREEDY, Sampling
from raypd.decoding.visibility import NO_TOKEN, grown, one_segment

TOKEN, POSITION, _SEGMENT, _STEP = range(4)  # the lines of a sequence's table
_NO_SLOT = -1  # the place of a token that is not in the cache
LEAST_REGION = 64  # slots
_LEAST_HOLES = 16  # fewer are not worth a move
Indices = abc.Sequence[int]


class ProgramError(Exception):
    """A program asked for something that the engine cannot do."""


@dataclass
class Prefix:
    """Keys and values of an instruction that `users` sequences share and read in place, `length`
    slots once `ready`.
    """

    start: int
    length: int
    ready: bool = False
    users: int = 0


@dataclass(eq=False)
class Sequence:
    """A program, its tokens and its region of the cache.

    Own tokens exclude the `base` shared ones of its prefix; a program's row indices count both.
    `table` [4, tokens] and `place` [tokens], slots in the region, are of own tokens. `predictions`:
    what was sampled of the current feed, in the order of its `sample_at`.
    """

    program: Program[Any]
    tag: Any = None
    sampling: Sampling = GREEDY
    seed: int = 0
    prefix: Prefix | None = None
    base: int = 0
    table: np.ndarray = field(default_factory=lambda: np.zeros((4, LEAST_REGION), dtype=np.int32))
    place: np.ndarray = field(
        default_factory=lambda: np.full(LEAST_REGION, _NO_SLOT, dtype=np.int64)
    )
    # Left the cache for good.
    dropped: np.ndarray = field(default_factory=lambda: np.zeros(LEAST_REGION, dtype=bool))
    has_dropped: bool = False
    size: int = 0  # own tokens ever fed
    cached: int = 0  # own tokens before this one went through the model
    start: int = 0  # first slot of the region in the cache
    # Own token in each slot.
    owner: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    high: int = 0  # slots from here on are free
    holes: list[int] = field(default_factory=list)  # free slots below `high`
    reach: np.ndarray = field(default_factory=one_segment)  # [segments, segments] of Reach
    steps: int = 0  # feeds that were answered
    in_flight: bool = False  # the device has a pass with tokens of it
    feed: Feed = field(default_factory=lambda: Feed((), ()))  # the program's latest
    predictions: Predictions = field(default_factory=lambda: Predictions([], []))
    # Random numbers, one for each of the feed's `sample_at`.
    _draws: list[float] = field(default_factory=list)
    counts: TokenCounts = field(default_factory=TokenCounts)

    def __post_init__(self) -> None:
        self.random = np.random.Generator(np.random.Philox(key=self.seed))

    def take(self, feed: Feed) -> None:
        """Raises ProgramError where the program's next feed cannot be carried out."""
        self._check(feed)
        for index in feed.drop:
            self.dropped[index - self.base] = self.has_dropped = True
            self.unplace([index - self.base])
        for index, segment in feed.move.items():
            self.table[_SEGMENT, index - self.base] = segment
        self.reach = grown(self.reach, feed.reach)
        shared = self.base if self.steps == 0 else 0
        new = len(feed.tokens) - shared
        self._reserve(self.size + new)
        here = slice(self.size, self.size + new)
        self.table[TOKEN, here] = feed.tokens[shared:]
        self.table[POSITION, here] = feed.positions[shared:]
        self.table[_SEGMENT, here] = 0 if feed.segments is None else feed.segments[shared:]
        self.table[_STEP, here] = self.steps
        # Else the one segment, which sees itself.
        if len(self.reach) > 1 or feed.segments is not None or feed.reach:
            self._check_segments(
                [0] if feed.segments is None else sorted(set(feed.segments[shared:]))
            )
        self.feed, self.predictions, self._draws = feed, Predictions([], []), []
        self.counts.decode_tokens = (
            self.counts.decode_tokens if feed.decoded is None else feed.decoded
        )
        self.size += new

    def _check(self, feed: Feed) -> None:
        n = len(feed.tokens)
        if n == 0:
            raise ProgramError("a feed holds no token")
        if len(feed.positions) != n or (feed.segments is not None and len(feed.segments) != n):
            raise ProgramError(
                f"a feed of {n} tokens has {len(feed.positions)} positions or as many segments "
                "amiss"
            )
        if len(feed.sample_at) and not 0 <= min(feed.sample_at) <= max(feed.sample_at) < n:
            raise ProgramError(f"a feed of {n} tokens asks for a token that is not in it")
        if feed.allowed_token_ids is not None and len(feed.allowed_token_ids) != len(
            feed.sample_at
        ):
            raise ProgramError(
                f"a feed with {len(feed.sample_at)} asks allows {len(feed.allowed_token_ids)}"
            )
        for index in (*feed.drop, *feed.move):
            if not self.base <= index < self.base + self.size or self.dropped[index - self.base]:
                raise ProgramError(f"row index {index} is shared, not fed yet or dropped already")

    def _check_segments(self, segments: list[int]) -> None:
        # Reach.HIDDEN is 0.
        if segments[-1] >= len(self.reach) or not self.reach[segments, segments].all():
            raise ProgramError(f"segments {segments} of a feed must at least reach themselves")
        if self.base and not self.reach[segments, 0].all():
            raise ProgramError(
                "a segment that does not reach segment 0 cannot be in a program with a shared "
                "prefix"
            )

    def _reserve(self, size: int) -> None:
        if size > self.table.shape[1]:
            extra = max(size - self.table.shape[1], self.table.shape[1])
            self.table = np.append(self.table, np.zeros((4, extra), dtype=np.int32), axis=1)
            self.place = np.append(self.place, np.full(extra, _NO_SLOT))
            self.dropped = np.append(self.dropped, np.zeros(extra, dtype=bool))

    def unplace(self, tokens: list[int]) -> None:
        self.owner[self.place[tokens]] = NO_TOKEN
        self.holes += self.place[tokens].tolist()
        self.place[tokens] = _NO_SLOT
        while self.high and self.owner[self.high - 1] == NO_TOKEN:
            self.high -= 1
        self.holes = [hole for hole in self.holes if hole < self.high]

    def samples_in(self, chunk: np.ndarray) -> tuple[Indices, Indices]:
        """Of the samples behind tokens of a chunk: which of the feed's `sample_at` they are, their
        places in it.
        """
        sample_at = self.feed.sample_at
        # Negative in the first feed, by the shared tokens.
        first = self.size - len(self.feed.tokens)
        if chunk[0] == first and len(chunk) == len(self.feed.tokens):
            return range(len(sample_at)), sample_at
        places = {token - first: i for i, token in enumerate(chunk.tolist())}
        numbers = [n for n, index in enumerate(sample_at) if index in places]
        return numbers, [places[sample_at[n]] for n in numbers]

    def take_samples(self, numbers: Indices, samples: Predictions) -> None:
        """Takes what was sampled at some of the current feed's `sample_at`."""
        count = len(self.feed.sample_at)
        if len(numbers) == count:
            self.predictions = samples
            return
        for name in ("tokens", "logprobs", "logits", "hidden"):
            if getattr(samples, name) is not None:
                whole = getattr(self.predictions, name) or [None] * count
                for number, value in zip(numbers, getattr(samples, name), strict=True):
                    whole[number] = value
                setattr(self.predictions, name, whole)

    def draws(self, numbers: Indices) -> list[float]:
        """Random numbers of samples of the current feed: the same in whichever pass, and when one
        is done again.
        """
        if self.sampling.temperature == 0:
            return [0.0] * len(numbers)
        self._draws = self._draws or self.random.random(len(self.feed.sample_at)).tolist()
        return [self._draws[n] for n in numbers]

    def waiting(self) -> np.ndarray:
        """Own tokens that must go through the model before the current feed is answered."""
        if not self.has_dropped:
            return np.arange(self.cached, self.size)
        return self.cached + np.flatnonzero(~self.dropped[self.cached : self.size])

    def place_tokens(self, chunk: np.ndarray, cache: KVCache) -> np.ndarray:
        """Slots [n] for own tokens [n], in a larger region where needed.

        Raises OutOfSlots, and has changed nothing.
        """
        reused = min(len(chunk), len(self.holes))
        if self.high + len(chunk) - reused > len(self.owner):
            # Room for the whole feed at once.
            self._enlarge(self.high + self.size - self.cached - reused, cache)
        end = self.high + len(chunk) - reused
        offsets = np.arange(self.high, end)
        if reused:
            offsets = np.append([self.holes.pop() for _ in range(reused)], offsets)
        self.high = end
        self.place[chunk] = offsets
        self.owner[offsets] = chunk
        self._close_up(self.size - int(chunk[-1]) - 1, cache)
        return self.start + self.place[chunk]

    def _close_up(self, coming: int, cache: KVCache) -> None:
        """Early release (APAR, section 3.4): what left the cache is attended to no more, and its
        slots are freed. The tokens move together when more than one slot in four is a hole, so a
        dropped token costs the moving of at most three. Behind them and the `coming` tokens of the
        feed a quarter more stays, to grow in.
        """
        close = len(self.holes) >= _LEAST_HOLES and 4 * len(self.holes) > self.high
        if close:
            kept = np.flatnonzero(self.owner[: self.high] != NO_TOKEN)
            cache.compact(self.start, kept)
            tokens = self.owner[kept]
            self.owner[: self.high] = NO_TOKEN
            self.high, self.holes = len(kept), []
            self.owner[: self.high] = tokens
            self.place[tokens] = np.arange(self.high)
        if close or 4 * (self.high + coming) < len(self.owner):
            size = LEAST_REGION * -(-5 * (self.high + coming) // (4 * LEAST_REGION))
            if size < len(self.owner):
                cache.free(self.start + size, len(self.owner) - size)
                self.owner = self.owner[:size].copy()

    def _enlarge(self, needed: int, cache: KVCache) -> None:
        size = max(LEAST_REGION, len(self.owner))
        while size < needed:
            size *= 2
        start = cache.alloc(size)
        if len(self.owner):
            cache.move(self.start, self.high, start)
            cache.free(self.start, len(self.owner))
        self.start = start
        self.owner = np.append(self.owner, np.full(size - len(self.owner), NO_TOKEN))

    def release(self, cache: KVCache) -> None:
        """Gives the region back; what was cached must be fed again, except what was dropped."""
        if len(self.owner):
            cache.free(self.start, len(self.owner))
        self.owner, self.high, self.holes, self.cached = np.zeros(0, dtype=np.int64), 0, [], 0
        self.place[: self.size] = _NO_SLOT
