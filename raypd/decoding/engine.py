"""Continuous batching of programs over one model.

Every step packs what the running programs feed into one forward pass, flat, with no padding between rows; samples
where a next token was asked for; and lets each program whose feed is complete go on. New programs come in as old ones
end; long feeds go in chunks of the token budget, behind the short feeds of programs that decode.

    engine = Engine(model, batch=16)
    engine.submit(autoregressive(prompt, 64, end), tag="a")
    while engine.pending:
        for done in engine.step():
            print(done.tag, done.answer)
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, PreTrainedModel

from raypd.decoding.attention import sdpa
from raypd.decoding.attention.step import Group, Span, Step
from raypd.decoding.cache.pool import OutOfSlots, Pool
from raypd.decoding.memory import TokenBudget, is_out_of_memory
from raypd.decoding.program import Feed, Guess, Predictions, Program
from raypd.decoding.row import POSITION, SEGMENT, STEP, TOKEN, Counts, Prefix, ProgramError, Row
from raypd.decoding.sampling import GREEDY, Ask, Sampling, sample
from raypd.decoding.visibility import GONE

PREFIXES_KEPT = 64  # shared prefixes that stay in the cache while no row uses them


@dataclass
class Finished:
    """A program that ended: with its answer, or with the exception that it raised."""

    tag: Any
    answer: Any
    error: Exception | None
    counts: Counts


@dataclass
class Chunk:
    """The tokens [n] of one row that go into a step, and where they stand in the packed pass."""

    row: Row
    tokens: np.ndarray
    slots: np.ndarray
    at: int = 0


class Engine:
    """Runs many programs over one model.

    batch: programs in decoding at the same time. token_budget: most tokens of one forward pass. cache_tokens: most
    slots of the cache; None lets it grow. Budget and cache give way when the device runs out of memory. The model is
    switched to the engine's attention and must not be called otherwise afterwards.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        batch: int = 16,
        token_budget: int = 2048,
        cache_tokens: int | None = None,
    ) -> None:
        AttentionInterface.register(sdpa.NAME, sdpa.attention)
        model.set_attn_implementation(sdpa.NAME)
        self.model = model.eval()
        self.device = next(model.parameters()).device
        self.batch, self.budget = batch, TokenBudget(token_budget)
        self.pool = Pool(4096, cache_tokens, self.device)
        self.prefixes: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()
        self.queue: deque[Row] = deque()
        self.rows: list[Row] = []
        self.full = False  # the cache had no room: admit nothing until a row ends
        self.steps = 0
        self.hidden: torch.Tensor | None = None  # [asks, hidden size] of this pass, where a feed wanted it

    # --------------------------------------------------------------------------------------------------- using it

    def submit(self, program: Program[Any], *, tag: Any = None, sampling: Sampling = GREEDY, seed: int = 0) -> None:
        """Queues a program. `seed` alone decides its random draws, whatever it is batched with."""
        self.queue.append(Row(program, tag, sampling, seed))

    @property
    def pending(self) -> int:
        """Programs that were submitted and have not ended."""
        return len(self.queue) + sum(row.tag is not _PREFIX for row in self.rows)

    def run(self, programs: Iterable[Program[Any]], *, sampling: Sampling = GREEDY, seed: int = 0) -> list[Any]:
        """Answers of the programs, in their order. Raises the first exception that a program raised."""
        for number, program in enumerate(programs):
            self.submit(program, tag=number, sampling=sampling, seed=seed + number)
        answers: dict[int, Any] = {}
        while self.pending:
            for done in self.step():
                if done.error is not None:
                    raise done.error
                answers[done.tag] = done.answer
        return [answers[number] for number in sorted(answers)]

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """One forward pass; returns the programs that ended with it.

        A pass that the device has no memory for is undone, and the next ones are smaller.
        """
        finished = list(self._admit())
        chunks = self._pack(finished)
        if not chunks:
            return finished
        reason = None
        try:
            self._answer(*self._forward(chunks))
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if not is_out_of_memory(error):
                raise
            reason = str(error)
        # Here and not above: while the exception lives, so do the tensors of the pass that failed.
        if reason is not None:
            return finished + self._undo(chunks, reason)
        self.budget.fitted()
        return finished + list(self._advance(chunks))

    def _undo(self, chunks: list[Chunk], reason: str) -> list[Finished]:
        """Takes a pass back that ran out of memory. At the least budget, the program that holds most of it fails."""
        for chunk in chunks:
            chunk.row.unplace(chunk.tokens)
        self.hidden = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if self.budget.too_much(sum(len(chunk.tokens) for chunk in chunks)):
            return []
        if self.budget.hopeless:
            raise RuntimeError(f"not even the smallest steps fit the memory any more: {reason}")
        largest = max((chunk.row for chunk in chunks), key=lambda row: len(row.owner) + row.base)
        rows = [row for row in self.rows if row is largest]
        if largest.tag is _PREFIX:  # whoever waits for it fails with it
            rows = [row for row in self.rows if row.prefix is largest.prefix and row is not largest]
            self.rows.remove(largest)
            largest.release(self.pool)
            self.prefixes = OrderedDict((k, p) for k, p in self.prefixes.items() if p is not largest.prefix)
        for row in rows:
            self.rows.remove(row)
        return [self._end(row, ProgramError(f"out of memory, and no step is smaller: {reason}")) for row in rows]

    # ------------------------------------------------------------------------------------------------- admission

    def _admit(self) -> Iterator[Finished]:
        """Starts queued programs while there is a place in the batch."""
        while self.queue and not self.full and sum(row.tag is not _PREFIX for row in self.rows) < self.batch:
            row = self.queue.popleft()
            try:
                feed = next(row.program)
                self._share(row, feed)
                row.take(feed)
            except StopIteration as end:
                yield Finished(row.tag, end.value, None, row.counts)
            except Exception as error:
                yield self._end(row, error)
            else:
                self.rows.append(row)

    def _share(self, row: Row, feed: Feed) -> None:
        """Finds or starts the shared prefix of a row's first feed."""
        length = min(feed.shared, min(feed.ask, default=len(feed.tokens)), len(feed.tokens) - 1)
        if length <= 0:
            return
        if list(feed.positions[:length]) != list(range(length)) or any((feed.segments or ())[:length]):
            raise ProgramError("shared tokens must be segment 0 at positions 0, 1, 2, ...")
        key = tuple(feed.tokens[:length])
        prefix = self.prefixes.get(key)
        if prefix is None:
            prefix = self.prefixes[key] = Prefix(key, 0, length)
            first = Row(_feed_once(key), tag=_PREFIX)
            first.take(next(first.program))
            first.prefix = prefix
            self.rows.insert(0, first)
            row.counts.prefill_tokens += length
        else:
            self.prefixes.move_to_end(key)
            row.counts.shared_tokens += length
        prefix.users += 1
        row.prefix, row.base = prefix, length

    # --------------------------------------------------------------------------------------------------- packing

    def _pack(self, finished: list[Finished]) -> list[Chunk]:
        """What goes into this step: decoding rows first, then prefills in chunks, up to the token budget."""
        ready = [row for row in self.rows if row.tag is _PREFIX or row.prefix is None or row.prefix.ready]
        waiting = {id(row): row.waiting() for row in ready}
        ready.sort(key=lambda row: (row.steps == 0 and row.tag is not _PREFIX, len(waiting[id(row)])))
        chunks: list[Chunk] = []
        room = self.budget.tokens
        for row in ready:
            tokens = waiting[id(row)][:room]
            if not len(tokens):
                break
            try:
                chunks.append(Chunk(row, tokens, row.place_tokens(tokens, self.pool)))
                room -= len(tokens)
            except OutOfSlots as full:
                self.full = True
                if self._evict_prefix():
                    continue  # tried again in the next step
                if not chunks:
                    self._make_room(row, full, finished)
                break
        if not chunks and ready and self.rows:
            return self._pack(finished)
        # rows with a prefix in common stand side by side
        chunks.sort(key=lambda chunk: 0 if chunk.row.prefix is None else id(chunk.row.prefix))
        at = 0
        for chunk in chunks:
            chunk.at, at = at, at + len(chunk.tokens)
        return chunks

    def _evict_prefix(self) -> bool:
        for key, prefix in self.prefixes.items():
            if prefix.users == 0 and prefix.ready:
                self.pool.give(prefix.start, prefix.length)
                del self.prefixes[key]
                return True
        return False

    def _make_room(self, row: Row, full: OutOfSlots, finished: list[Finished]) -> None:
        """No row can go on: the youngest other row gives its region up and is fed again later; a row alone fails."""
        others = [other for other in self.rows if other is not row and len(other.owner)]
        if others:
            others[-1].release(self.pool)
            return
        self.rows.remove(row)
        finished.append(self._end(row, ProgramError(f"does not fit the cache: {full}; raise engine.cache_tokens")))

    # --------------------------------------------------------------------------------------------------- forward

    def _forward(self, chunks: list[Chunk]) -> tuple[torch.Tensor, list[tuple[Row, int]]]:
        """One pass: logits [asks, vocabulary] and for each ask its row and number."""
        asked: list[tuple[Row, int]] = []
        keep: list[int] = []
        groups: list[Group] = []
        for chunk in chunks:
            row = chunk.row
            for number, place in row.asked(chunk.tokens):
                asked.append((row, number))
                keep.append(chunk.at + place)
            prefix = row.prefix if row.tag is not _PREFIX else None
            if groups and prefix is not None and groups[-1].length and groups[-1].start == prefix.start:
                groups[-1].spans.append(_span(chunk))
            elif prefix is not None:
                groups.append(Group([_span(chunk)], prefix.start, prefix.length))
            else:
                groups.append(Group([_span(chunk)]))
        tables = np.concatenate([chunk.row.table[:, chunk.tokens] for chunk in chunks], axis=1)  # [4, tokens]
        slots = np.concatenate([chunk.slots for chunk in chunks])
        ids, positions, to = torch.from_numpy(np.stack([tables[TOKEN], tables[POSITION], slots])).to(self.device)
        with self._hidden_states(chunks):
            output = self.model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=torch.tensor(keep, dtype=torch.long, device=self.device),
                step=Step(self.pool, groups, to),
            )
        self.steps += 1
        return output.logits[0], asked

    @contextmanager
    def _hidden_states(self, chunks: list[Chunk]) -> Iterator[None]:
        """Keeps what the output embeddings read, [1, asks, hidden size], where a feed wants the last hidden states."""
        self.hidden = None
        if not any(chunk.row.feed is not None and chunk.row.feed.want_hidden for chunk in chunks):
            yield
            return

        def keep(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            self.hidden = inputs[0][0]

        with self.model.get_output_embeddings().register_forward_pre_hook(keep):
            yield

    def _answer(self, logits: torch.Tensor, asked: list[tuple[Row, int]]) -> None:
        """Samples every ask of the step."""
        asks = []
        for row, number in asked:
            assert row.feed is not None
            draw = row.draw(number) if row.sampling.temperature > 0 else 0.0
            allow = row.feed.allow[number] if row.feed.allow is not None else None
            asks.append(Ask(row.sampling, draw, allow))
        tokens, logprobs = sample(logits, asks)
        for i, (row, number) in enumerate(asked):
            row.answers[number] = tokens[i], logprobs[i]
            if row.feed is not None and row.feed.want_logits:
                row.logits[number] = logits[i]
            if row.feed is not None and row.feed.want_hidden:
                assert self.hidden is not None
                row.hidden[number] = self.hidden[i]

    # --------------------------------------------------------------------------------------------------- advance

    def _advance(self, chunks: list[Chunk]) -> Iterator[Finished]:
        """Tells the programs whose feed is complete what the model said, and takes their next feed."""
        answered: list[tuple[Row, Predictions]] = []
        for chunk in chunks:
            row = chunk.row
            if row.steps == 0:
                row.counts.prefill_tokens += len(chunk.tokens)
            else:
                row.counts.decode_tokens += len(chunk.tokens)
            row.cached = int(chunk.tokens[-1]) + 1
            if row.cached < row.size:
                continue
            if row.tag is _PREFIX:
                self._prefix_ready(row)
                continue
            answered.append((row, row.predictions()))
            row.steps += 1
            row.counts.steps += 1
        while answered:
            asking: list[tuple[Row, Guess]] = []
            for row, predictions in answered:
                try:
                    feed = row.program.send(predictions)
                    if feed.guess is not None:
                        asking.append((row, feed.guess))
                    else:
                        row.take(feed)
                except StopIteration as end:
                    self.rows.remove(row)
                    self._free(row)
                    yield Finished(row.tag, end.value, None, row.counts)
                except Exception as error:
                    self.rows.remove(row)
                    yield self._end(row, error)
            answered = _guessed(asking)

    def _prefix_ready(self, row: Row) -> None:
        """The region of a prefix row becomes the prefix's."""
        assert row.prefix is not None
        self.rows.remove(row)
        row.prefix.start, row.prefix.ready = row.start, True
        self.pool.give(row.start + row.size, len(row.owner) - row.size)
        if sum(prefix.users == 0 for prefix in self.prefixes.values()) > PREFIXES_KEPT:
            self._evict_prefix()

    def _end(self, row: Row, error: Exception) -> Finished:
        row.program.close()
        self._free(row)
        return Finished(row.tag, None, error, row.counts)

    def _free(self, row: Row) -> None:
        self.full = False
        row.release(self.pool)
        if row.prefix is not None:
            row.prefix.users -= 1


_PREFIX = object()  # the tag of the rows that compute shared prefixes


def _guessed(asking: list[tuple[Row, Guess]]) -> list[tuple[Row, Predictions]]:
    """What the heads say to each row, each heads called once with the hidden states of all rows that ask them."""
    together: dict[tuple[int, int], list[tuple[Row, Guess]]] = {}
    for row, guess in asking:
        together.setdefault((id(guess.heads), id(guess.tree)), []).append((row, guess))
    answered: list[tuple[Row, Predictions]] = []
    for members in together.values():
        first = members[0][1]
        said = iter(first.heads.guess([state for _, guess in members for state in guess.hidden], first.tree))
        answered += [(row, Predictions([], [], guesses=[next(said) for _ in guess.hidden])) for row, guess in members]
    return answered


def _feed_once(tokens: tuple[int, ...]) -> Program[None]:
    yield Feed(tokens, range(len(tokens)))


def _span(chunk: Chunk) -> Span:
    row, table = chunk.row, chunk.row.table
    owner = row.owner[: row.high]
    keys = np.where(owner == GONE, GONE, table[SEGMENT, owner])
    return Span(
        a=chunk.at,
        b=chunk.at + len(chunk.tokens),
        start=row.start,
        length=row.high,
        reach=row.reach,
        query_segments=table[SEGMENT, chunk.tokens],
        query_positions=table[POSITION, chunk.tokens],
        query_steps=table[STEP, chunk.tokens],
        key_segments=keys,
        key_positions=table[POSITION, owner],
        key_steps=table[STEP, owner],
    )
