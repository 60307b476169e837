"""Which programs run, which of their tokens go into the next pass, and what is preempted when the
cache or the memory is full.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from raypd.decoding.counts import Finished
from raypd.decoding.kv_cache import KVCache, OutOfSlots
from raypd.decoding.memory import TokenBudget
from raypd.decoding.program import Feed, Predictions, Program, ProgramError, StatesFull
from raypd.decoding.recurrence.chains import ChainPiece, Chains, RecurrentRun
from raypd.decoding.recurrence.states import EMPTY, StatePool
from raypd.decoding.sequence import Indices, Prefix, Sequence

# The number of shared prefixes that stay in the cache while no sequence uses them.
_MAX_IDLE_PREFIXES = 64
# With fewer tokens, a GPU takes about as long as with this many, so smaller passes are not split.
_MIN_SPLIT_TOKENS = 256
# States of a program besides those of the segments that its first feed opens: one for its prefix,
# one for its first segment, and two to write while others are read.
_FURTHER_STATES = 4
# The tag of the sequences that compute shared prefixes.
_PREFIX = object()


@dataclass
class Chunk:
    """The tokens of one sequence that go into a pass."""

    seq: Sequence
    # Own tokens of the sequence, [n].
    tokens: np.ndarray
    # Their slots in the cache, [n].
    slots: np.ndarray
    # The samples wanted after these tokens, as indices into the feed's `sample_at`.
    sample_numbers: Indices
    # The rows of this chunk after which these samples come.
    sample_rows: Indices
    # The runs of recurrent layers in it; empty if the model has no such layers.
    runs: list[RecurrentRun] = field(default_factory=list)
    # The row of the packed pass at which the chunk begins.
    start: int = 0

    @cached_property
    def table_index(self) -> np.ndarray | slice:
        """The tokens as an index into their sequence's table. A slice is faster than an array."""
        first = int(self.tokens[0])
        end = int(self.tokens[-1]) + 1
        if end - first == len(self.tokens):
            return slice(first, end)
        return self.tokens

    @property
    def prefix(self) -> Prefix | None:
        """The shared prefix that the sequence reads; None for one that computes it."""
        if self.seq.tag is _PREFIX:
            return None
        return self.seq.prefix


class Scheduler:
    """Continuous batching: admission, packing within the token budget, preemption.

    It does not touch sequences that are in flight.

    Attributes:
        passes: How many passes may be in flight at the same time, each with different sequences.
        waiting: Sequences that have not been admitted yet.
        sequences: Sequences that were admitted, including those that compute shared prefixes.
        prefixes: Shared prefixes by their tokens, the least recently used first.
        full: Whether the cache had no room, so that nothing is admitted until a sequence ends.
        states: The states of recurrent layers; None if the model has no such layers.
    """

    passes = 1

    def __init__(
        self,
        cache: KVCache,
        budget: TokenBudget,
        max_num_seqs: int,
        states: StatePool | None = None,
    ) -> None:
        self.cache = cache
        self.states = states
        self.budget = budget
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Sequence] = deque()
        self.sequences: list[Sequence] = []
        # Programs that have nothing to feed until they are resumed, by tag.
        self.paused: dict[Any, Sequence] = {}
        self.prefixes: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()
        self.full = False

    @property
    def running(self) -> list[Sequence]:
        """The sequences of programs that were admitted and have not ended."""
        return [seq for seq in self.sequences if seq.tag is not _PREFIX]

    def schedule(self) -> tuple[list[Chunk], list[Finished]]:
        """Choose what goes into the next pass.

        Returns:
            The chunks of the pass, with at most `budget.tokens` tokens in total, and the programs
            that ended or failed before it.
        """
        finished = self._admit()
        chunks = self._pack(finished)
        return chunks, finished

    # Admission

    def _admit(self) -> list[Finished]:
        """Start waiting programs until the batch or the next pass is full.

        Returns:
            The programs that ended or failed at their start.
        """
        finished: list[Finished] = []
        running = len(self.running)
        tokens = sum(seq.size - seq.cached for seq in self.sequences if not seq.in_flight)
        while self.waiting and not self.full:
            if running >= self.max_num_seqs or tokens >= self.budget.tokens:
                break
            seq = self.waiting.popleft()
            try:
                feed = self._first_feed(seq)
                if not self._has_states(feed):
                    self.waiting.appendleft(seq)
                    break
                seq.first_feed = None
                self._share_prefix(seq, feed)
                seq.append_feed(feed)
            except StopIteration as end:
                finished.append(self.end(seq, end.value))
            except Exception as error:
                finished.append(self.end(seq, error=error))
            else:
                self.sequences.append(seq)
                running += 1
                tokens += seq.size
        return finished

    def _first_feed(self, seq: Sequence) -> Feed:
        """Return a program's first feed, which opens no more segments than there are states."""
        if seq.first_feed is not None:
            return seq.first_feed
        feed = next(seq.program)
        if self.states is not None:
            max_segments = self.states.limit - _FURTHER_STATES
            if len(feed.continues) > max_segments:
                message = (
                    f"{len(feed.continues)} recurrent states are needed at the same time, and "
                    f"there is memory for {max_segments} of "
                    f"{self.states.state_bytes / 1e6:.3g} MB each"
                )
                feed = seq.program.throw(StatesFull(message, max_segments))
                if len(feed.continues) > max_segments:
                    raise StatesFull(message, max_segments)
            seq.chains = Chains(self.states)
        seq.first_feed = feed
        return feed

    def _has_states(self, feed: Feed) -> bool:
        """Return whether there are enough states for a program besides the running ones."""
        if self.states is None or not self.sequences:
            return True
        demand = len(feed.continues) + _FURTHER_STATES
        promised = sum(prefix.users > 0 for prefix in self.prefixes.values())
        for seq in self.sequences:
            if seq.chains is not None:
                promised += seq.chains.demand
        return promised + demand <= self.states.limit

    def _share_prefix(self, seq: Sequence, feed: Feed) -> None:
        """Let a sequence share the prefix that its first feed names. A new prefix is scheduled."""
        # The tokens after which something is sampled, and the last one, go through the model.
        first_sample = min(feed.sample_at, default=len(feed.tokens))
        length = min(feed.shared, first_sample, len(feed.tokens) - 1)
        if self.states is not None:
            # Only the state after the last token of a prefix is kept.
            length = min(length, 1 + min(feed.continues.values(), default=length))
        if length <= 0:
            return
        segments = feed.segments or ()
        if list(feed.positions[:length]) != list(range(length)) or any(segments[:length]):
            raise ProgramError("shared tokens must be segment 0 at positions 0, 1, 2, ...")
        key = tuple(feed.tokens[:length])
        prefix = self.prefixes.get(key)
        if prefix is None:
            prefix = Prefix(0, length)
            self.prefixes[key] = prefix
            self._compute_prefix(key, prefix)
            seq.counts.prefill_tokens += length
        else:
            self.prefixes.move_to_end(key)
            seq.counts.shared_tokens += length
        prefix.users += 1
        seq.prefix = prefix
        seq.shared = length

    def _compute_prefix(self, tokens: tuple[int, ...], prefix: Prefix) -> None:
        """Add a sequence that computes a prefix."""
        seq = Sequence(_feed_once(tokens), tag=_PREFIX)
        if self.states is not None:
            seq.chains = Chains(self.states)
        seq.append_feed(next(seq.program))
        seq.prefix = prefix
        self.sequences.insert(0, seq)

    # Packing

    def _pack(self, finished: list[Finished]) -> list[Chunk]:
        """Fill a pass up to the budget.

        Sequences that are decoding come first, then prompts in chunks, then prefixes that others
        wait for. A sequence that can never fit the cache fails, and is added to `finished`.
        """
        if self.states is not None:
            self.states.settle()
        idle = [seq for seq in self.sequences if not seq.in_flight]
        ready = [seq for seq in idle if _may_run(seq)]
        pending = {id(seq): seq.pending_tokens() for seq in ready}
        ready.sort(key=lambda seq: (seq.tag is _PREFIX, seq.steps == 0, len(pending[id(seq)])))
        alone = len(idle) == len(self.sequences)  # No other pass is in flight.
        limit = self._pass_limit(alone)
        room = self.budget.tokens
        chunks: list[Chunk] = []
        for seq in ready:
            tokens = pending[id(seq)][:room]
            if not len(tokens) or self.budget.tokens - room >= limit:
                break
            pieces: list[ChainPiece] = []
            try:
                if seq.chains is not None:
                    pieces = seq.chains.pieces(seq.table, tokens)
                    seq.chains.reserve(pieces)
                slots = seq.allocate(tokens, self.cache)
            except OutOfSlots as full:
                self.full = True
                if self.evict_prefix():
                    continue  # The next step tries this sequence again.
                if not chunks and alone:
                    self._preempt(seq, full, finished)
                break
            numbers, rows = seq.samples_in(tokens)
            chunk = Chunk(seq, tokens, slots, numbers, rows)
            if seq.chains is not None:
                state = EMPTY if chunk.prefix is None else chunk.prefix.state
                chunk.runs = seq.chains.plan(pieces, state)
            chunks.append(chunk)
            room -= len(tokens)
        if not chunks and alone and ready and self.sequences:
            # Something was evicted or preempted, so there is room now.
            return self._pack(finished)
        # Attention reads a prefix only once for all adjacent sequences that share it.
        chunks.sort(key=lambda chunk: 0 if chunk.seq.prefix is None else id(chunk.seq.prefix))
        row = 0
        for chunk in chunks:
            chunk.start = row
            row += len(chunk.tokens)
        return chunks

    def _pass_limit(self, alone: bool) -> int:
        """Return the token count at which a pass stops admitting sequences.

        This divides the work evenly among the passes in flight.
        """
        tokens = sum(seq.size - seq.cached for seq in self.sequences)
        if tokens < self.passes * _MIN_SPLIT_TOKENS:
            # There are few tokens, so they all go into one pass, which waits for the one in flight.
            return tokens if alone else 0
        return max(_MIN_SPLIT_TOKENS, -(-tokens // self.passes))

    # A full cache

    def evict_prefix(self) -> bool:
        """Free the least recently used prefix that no sequence uses; return False for none."""
        for key, prefix in self.prefixes.items():
            if prefix.users == 0 and prefix.ready:
                self._free_prefix(prefix)
                del self.prefixes[key]
                return True
        return False

    def _free_prefix(self, prefix: Prefix) -> None:
        """Free the slots of a prefix in the cache, and its recurrent state."""
        self.cache.free(prefix.start, prefix.length)
        if self.states is not None:
            self.states.drop(prefix.state)
            prefix.state = EMPTY

    def pause(self, seq: Sequence) -> None:
        """Set a sequence aside until `resume`. It keeps its slots unless they are needed."""
        self.sequences.remove(seq)
        self.paused[seq.tag] = seq
        # Its slots can be taken now, so waiting programs may be admitted.
        self.full = False

    def resume(self, tag: Any) -> None:
        """Continue a paused sequence; whatever it lost from the cache is recomputed."""
        seq = self.paused.pop(tag)
        seq.append_feed(seq.program.send(Predictions([], [])))
        self.sequences.append(seq)

    def _preempt(self, seq: Sequence, full: OutOfSlots, finished: list[Finished]) -> None:
        """Make room for a sequence when none can continue.

        A paused sequence, or else the youngest other sequence, loses its cache and is fed again
        later. If no other sequence holds any cache, a prefix is freed and recomputed later. If the
        sequence is alone, it fails.
        """
        for candidate in reversed([*self.sequences, *self.paused.values()]):
            if candidate is not seq and candidate.region.slots:
                candidate.release(self.cache)
                return
        for key, prefix in self.prefixes.items():
            if prefix.ready and prefix is not seq.prefix:
                self._free_prefix(prefix)
                prefix.ready = False
                self._compute_prefix(key, prefix)
                return
        finished += self._fail(seq, f"does not fit the cache: {full}")

    def _fail(self, seq: Sequence, error: str) -> list[Finished]:
        """End a sequence with an error.

        If it computes a prefix, the sequences that wait for the prefix end instead.
        """
        if seq.tag is not _PREFIX:
            return [self.end(seq, error=ProgramError(error))]
        self.sequences.remove(seq)
        seq.release(self.cache)
        for key, prefix in list(self.prefixes.items()):
            if prefix is seq.prefix:
                del self.prefixes[key]
        users = [user for user in self.sequences if user.prefix is seq.prefix]
        return [self.end(user, error=ProgramError(error)) for user in users]

    # Results of a pass

    def rollback(self, chunks: list[Chunk], reason: str, alone: bool = True) -> list[Finished]:
        """Take back a pass that ran out of memory, and lower the budget.

        If the pass was as small as passes get and was `alone` in flight, the program that holds the
        most cache fails.

        Args:
            chunks: The chunks of the pass.
            reason: The device's message.
            alone: Whether no other pass is in flight.

        Returns:
            The programs that failed.

        Raises:
            RuntimeError: If the smallest passes keep failing, too.
        """
        for chunk in chunks:
            if chunk.seq.chains is None:
                chunk.seq.region.deallocate(chunk.tokens.tolist())
            else:
                # Some layers have overwritten their states, and others have not.
                chunk.seq.release(self.cache)
        tokens = sum(len(chunk.tokens) for chunk in chunks)
        if self.budget.shrink(tokens) or not alone:
            return []
        if self.budget.hopeless:
            raise RuntimeError(f"even the smallest passes no longer fit the memory: {reason}")
        sequences = [chunk.seq for chunk in chunks]
        largest = max(sequences, key=lambda seq: seq.region.slots + seq.shared)
        return self._fail(largest, f"out of memory, and passes cannot get smaller: {reason}")

    def advance(self, chunk: Chunk) -> bool:
        """Count a chunk that went through the model.

        Returns:
            Whether the feed of its program is complete.
        """
        seq = chunk.seq
        seq.in_flight = False
        if seq.steps == 0:
            seq.counts.prefill_tokens += len(chunk.tokens)
        if seq.feed.decoded is None:
            seq.counts.decode_tokens += _decoded_tokens(chunk)
        seq.cached = int(chunk.tokens[-1]) + 1
        if seq.cached < seq.size:
            return False
        if seq.tag is _PREFIX:
            self._complete_prefix(seq)
            return False
        seq.steps += 1
        seq.counts.steps += 1
        return True

    def _complete_prefix(self, seq: Sequence) -> None:
        """Hand the region of a sequence that computed a prefix over to the prefix."""
        assert seq.prefix is not None
        self.sequences.remove(seq)
        region = seq.region
        seq.prefix.start = region.start
        seq.prefix.ready = True
        if seq.chains is not None:
            seq.prefix.state = seq.chains.hand_over()
        self.cache.free(region.start + seq.size, region.slots - seq.size)
        idle_prefixes = sum(prefix.users == 0 for prefix in self.prefixes.values())
        if idle_prefixes > _MAX_IDLE_PREFIXES:
            self.evict_prefix()

    def end(self, seq: Sequence, answer: Any = None, error: Exception | None = None) -> Finished:
        """Remove a program and free its region.

        Args:
            seq: The program's sequence.
            answer: What the program returned.
            error: The exception that the program raised, or with which it is ended.
        """
        seq.program.close()
        if seq in self.sequences:
            self.sequences.remove(seq)
        elif self.paused.get(seq.tag) is seq:
            del self.paused[seq.tag]
        self.full = False
        seq.release(self.cache)
        # A method that drafts counts for itself which tokens became part of the answer.
        seq.counts.decode_tokens = getattr(answer, "decoded", seq.counts.decode_tokens)
        if seq.prefix is not None:
            seq.prefix.users -= 1
        return Finished(seq.tag, answer, error, seq.counts)


def _may_run(seq: Sequence) -> bool:
    """Return whether a sequence can go into a pass, that is, whether its prefix is computed."""
    return seq.tag is _PREFIX or seq.prefix is None or seq.prefix.ready


def _decoded_tokens(chunk: Chunk) -> int:
    """Return how many tokens of the answer a chunk decoded."""
    seq = chunk.seq
    if seq.steps == 0:
        return len(chunk.sample_numbers)
    # Tokens that are fed again after a preemption do not count.
    fed_before = seq.size - len(seq.feed.tokens)
    return int(np.count_nonzero(chunk.tokens >= fed_before))


def _feed_once(tokens: tuple[int, ...]) -> Program[None]:
    """Feed tokens and ask for nothing."""
    yield Feed(tokens, range(len(tokens)))
