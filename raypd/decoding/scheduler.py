"""Which programs run, what of each goes into the next pass, and which is preempted when cache or
memory are full.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from raypd.decoding.counts import Finished
from raypd.decoding.kv_cache import KVCache, OutOfSlots
from raypd.decoding.memory import TokenBudget
from raypd.decoding.program import Feed, Program
from raypd.decoding.sequence import Indices, Prefix, ProgramError, Sequence

_PREFIXES_KEPT = 64  # shared prefixes that stay in the cache while no sequence uses them
_LEAST_HALF = 256  # tokens: of fewer, a pass takes a GPU about as long as one of so many
_PREFIX = object()  # the tag of the sequences that compute shared prefixes


@dataclass
class Chunk:
    """The tokens of one sequence that go into a pass."""

    seq: Sequence
    tokens: np.ndarray  # [n]
    slots: np.ndarray  # [n]
    samples: Indices  # of next tokens that are wanted behind them: into the feed's `sample_at`
    places: Indices  # of these in the chunk
    start: int = 0  # where they begin in the packed pass

    @cached_property
    def rows(self) -> np.ndarray | slice:
        """The tokens, as the fastest index into their sequence's table."""
        first, end = int(self.tokens[0]), int(self.tokens[-1]) + 1
        return slice(first, end) if end - first == len(self.tokens) else self.tokens

    @property
    def prefix(self) -> Prefix | None:
        """The shared prefix that the sequence reads; None for one that computes it."""
        return None if self.seq.tag is _PREFIX else self.seq.prefix


class Scheduler:
    """Continuous batching: admission, packing within the budget, preemption; what is in flight is
    left alone.
    """

    passes = 1  # that may be in flight at the same time, each of other sequences

    def __init__(self, cache: KVCache, budget: TokenBudget, max_num_seqs: int) -> None:
        self.cache, self.budget, self.max_num_seqs = cache, budget, max_num_seqs
        self.waiting: deque[Sequence] = deque()
        self.sequences: list[Sequence] = []
        self.prefixes: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()
        self.full = False  # the cache had no room: admit nothing until a sequence ends

    @property
    def running(self) -> list[Sequence]:
        """The sequences of programs that were admitted and have not ended."""
        return [seq for seq in self.sequences if seq.tag is not _PREFIX]

    def schedule(self) -> tuple[list[Chunk], list[Finished]]:
        """What goes into the next pass, at most `budget.tokens`, and the programs that ended or
        failed before it.
        """
        finished = list(self._admit())
        return self._pack(finished), finished

    def _admit(self) -> Iterator[Finished]:
        """Starts waiting programs while there is a place in the batch, and room in the next pass
        for what they feed.
        """
        running = len(self.running)
        tokens = sum(seq.size - seq.cached for seq in self.sequences if not seq.in_flight)
        while (
            self.waiting
            and not self.full
            and running < self.max_num_seqs
            and tokens < self.budget.tokens
        ):
            seq = self.waiting.popleft()
            try:
                feed = next(seq.program)
                self._share(seq, feed)
                seq.take(feed)
            except StopIteration as end:
                yield self.end(seq, end.value)
            except Exception as error:
                yield self.end(seq, error=error)
            else:
                self.sequences.append(seq)
                running, tokens = running + 1, tokens + seq.size

    def _share(self, seq: Sequence, feed: Feed) -> None:
        length = min(
            feed.shared, min(feed.sample_at, default=len(feed.tokens)), len(feed.tokens) - 1
        )
        if length <= 0:
            return
        if list(feed.positions[:length]) != list(range(length)) or any(
            (feed.segments or ())[:length]
        ):
            raise ProgramError("shared tokens must be segment 0 at positions 0, 1, 2, ...")
        key = tuple(feed.tokens[:length])
        prefix = self.prefixes.get(key)
        if prefix is None:
            prefix = self.prefixes[key] = Prefix(0, length)
            self._compute(key, prefix)
            seq.counts.prefill_tokens += length
        else:
            self.prefixes.move_to_end(key)
            seq.counts.shared_tokens += length
        prefix.users += 1
        seq.prefix, seq.base = prefix, length

    def _compute(self, key: tuple[int, ...], prefix: Prefix) -> None:
        seq = Sequence(_feed_once(key), tag=_PREFIX)
        seq.take(next(seq.program))
        seq.prefix = prefix
        self.sequences.insert(0, seq)

    def _pack(self, finished: list[Finished]) -> list[Chunk]:
        """Decoding sequences first, then prefills in chunks, then prefixes that others wait for, up
        to the budget.
        """
        landed = [seq for seq in self.sequences if not seq.in_flight]
        ready = [
            seq for seq in landed if seq.tag is _PREFIX or seq.prefix is None or seq.prefix.ready
        ]
        waiting = {id(seq): seq.waiting() for seq in ready}
        ready.sort(key=lambda seq: (seq.tag is _PREFIX, seq.steps == 0, len(waiting[id(seq)])))
        chunks: list[Chunk] = []
        alone = len(landed) == len(self.sequences)  # no other pass is in flight
        room, most = self.budget.tokens, self._most(alone)
        for seq in ready:
            tokens = waiting[id(seq)][:room]
            if not len(tokens) or self.budget.tokens - room >= most:
                break
            try:
                chunks.append(
                    Chunk(
                        seq, tokens, seq.place_tokens(tokens, self.cache), *seq.samples_in(tokens)
                    )
                )
                room -= len(tokens)
            except OutOfSlots as full:
                self.full = True
                if self._evict_prefix():
                    continue  # tried again in the next step
                if not chunks and alone:
                    self._preempt(seq, full, finished)
                break
        if not chunks and alone and ready and self.sequences:
            return self._pack(finished)
        # Sequences with a prefix in common stand side by side.
        chunks.sort(key=lambda chunk: 0 if chunk.seq.prefix is None else id(chunk.seq.prefix))
        begin = 0
        for chunk in chunks:
            chunk.start, begin = begin, begin + len(chunk.tokens)
        return chunks

    def _most(self, alone: bool) -> int:
        """Tokens from which on a pass takes no further sequence: its share of all, so that the
        others have theirs.
        """
        tokens = sum(seq.size - seq.cached for seq in self.sequences)
        if tokens < self.passes * _LEAST_HALF:
            return tokens if alone else 0  # they go in one pass
        return max(_LEAST_HALF, -(-tokens // self.passes))

    def _evict_prefix(self) -> bool:
        for key, prefix in self.prefixes.items():
            if prefix.users == 0 and prefix.ready:
                self.cache.free(prefix.start, prefix.length)
                del self.prefixes[key]
                return True
        return False

    def _preempt(self, seq: Sequence, full: OutOfSlots, finished: list[Finished]) -> None:
        """No sequence has room to go on: the youngest other one is released, to be fed again later,
        then a prefix whose users hold nothing, to be computed again; one alone fails.
        """
        candidates = [
            candidate
            for candidate in self.sequences
            if candidate is not seq and len(candidate.owner)
        ]
        if candidates:
            candidates[-1].release(self.cache)
            return
        for key, prefix in self.prefixes.items():
            if prefix.ready and prefix is not seq.prefix:
                self.cache.free(prefix.start, prefix.length)
                prefix.ready = False
                return self._compute(key, prefix)
        finished += self._failed(seq, f"does not fit the cache: {full}")
        return None

    def _failed(self, seq: Sequence, error: str) -> list[Finished]:
        """Ends a sequence; in place of one that computes a prefix, those that wait for it."""
        victims = [seq]
        if seq.tag is _PREFIX:
            victims = [
                user for user in self.sequences if user.prefix is seq.prefix and user is not seq
            ]
            self.sequences.remove(seq)
            seq.release(self.cache)
            self.prefixes = OrderedDict(
                (k, p) for k, p in self.prefixes.items() if p is not seq.prefix
            )
        return [self.end(victim, error=ProgramError(error)) for victim in victims]

    def rollback(self, chunks: list[Chunk], reason: str, alone: bool = True) -> list[Finished]:
        """Takes back a pass that ran out of memory, and halves the budget; at the least one, where
        it was `alone` in flight, the program that holds most of the cache fails. Raises
        RuntimeError where the smallest fail, too.
        """
        for chunk in chunks:
            chunk.seq.unplace(chunk.tokens.tolist())
        if self.budget.too_much(sum(len(chunk.tokens) for chunk in chunks)) or not alone:
            return []
        if self.budget.hopeless:
            raise RuntimeError(f"not even the smallest steps fit the memory any more: {reason}")
        largest = max((chunk.seq for chunk in chunks), key=lambda seq: len(seq.owner) + seq.base)
        return self._failed(largest, f"out of memory, and no step is smaller: {reason}")

    def advance(self, chunk: Chunk) -> bool:
        """Counts a chunk that went through the model; whether the feed of its program is
        complete.
        """
        seq = chunk.seq
        seq.in_flight = False
        if seq.steps == 0:
            seq.counts.prefill_tokens += len(chunk.tokens)
        if seq.feed.decoded is None:
            # What a preempted sequence is fed again does not count.
            fed_before = seq.size - len(seq.feed.tokens)
            count = (
                len(chunk.samples)
                if seq.steps == 0
                else int(np.count_nonzero(chunk.tokens >= fed_before))
            )
            seq.counts.decode_tokens += count
        seq.cached = int(chunk.tokens[-1]) + 1
        if seq.cached < seq.size:
            return False
        if seq.tag is _PREFIX:
            self._prefix_ready(seq)
            return False
        seq.steps += 1
        seq.counts.steps += 1
        return True

    def _prefix_ready(self, seq: Sequence) -> None:
        assert seq.prefix is not None
        self.sequences.remove(seq)
        seq.prefix.start, seq.prefix.ready = seq.start, True
        self.cache.free(seq.start + seq.size, len(seq.owner) - seq.size)
        if sum(prefix.users == 0 for prefix in self.prefixes.values()) > _PREFIXES_KEPT:
            self._evict_prefix()

    def end(self, seq: Sequence, answer: Any = None, error: Exception | None = None) -> Finished:
        """Frees the region of a program that returned its answer, or raised an error or is ended
        with it here.
        """
        seq.program.close()
        if seq in self.sequences:
            self.sequences.remove(seq)
        self.full = False
        seq.release(self.cache)
        # Of a method that drafts.
        seq.counts.decode_tokens = getattr(answer, "decoded", seq.counts.decode_tokens)
        if seq.prefix is not None:
            seq.prefix.users -= 1
        return Finished(seq.tag, answer, error, seq.counts)


def _feed_once(tokens: tuple[int, ...]) -> Program[None]:
    yield Feed(tokens, range(len(tokens)))
