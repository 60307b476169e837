"""Continuous batching of programs over one model.

Every step packs what the running programs feed into one forward pass, flat, with no padding between
sequences; samples where a next token was asked for; and lets each program whose feed is complete go
on. New programs come in as old ones end; long feeds go in chunks of the token budget, behind the
short feeds of programs that decode (scheduler.py).
"""

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from raypd.decoding.attention import avx512, sdpa
from raypd.decoding.attention.kernels import chosen
from raypd.decoding.attention.step import PrefixGroup, Span, Step
from raypd.decoding.counts import Finished
from raypd.decoding.few_tokens import FewTokens
from raypd.decoding.graphs import Graphs, most_tokens
from raypd.decoding.kv_cache import NO_MEMORY, KVCache
from raypd.decoding.llama import Llama, NativeLayer, is_llama
from raypd.decoding.memory import LEAST_TOKENS, TokenBudget, is_out_of_memory, slots_that_fit
from raypd.decoding.program import DraftRequest, Feed, Predictions, Program
from raypd.decoding.sampling import GREEDY, SampleRequests, Sampling, sample
from raypd.decoding.scheduler import Chunk, Scheduler
from raypd.decoding.sequence import POSITION, TOKEN, ProgramError, Sequence
from raypd.decoding.stock import Stock
from raypd.decoding.transfer import to_device, to_host
from raypd.decoding.visibility import NO_TOKEN

_FIRST_SLOTS = 4096  # of a cache that grows


@dataclass(slots=True)
class _Samples:
    """The next tokens that a pass is asked for; those of few allowed ones last, their logits apart
    (few_tokens.py).
    """

    requests: SampleRequests
    places: list[int]  # in the pass, of the token before each
    full: int  # come first, with the logits of all tokens
    rank: list[int] | None = None  # which of them each one is, chunk after chunk; None: just so


@dataclass(slots=True)
class _Flight:
    """A pass that the device was given."""

    chunks: list[Chunk]
    # Logits, hidden: of each, where wanted.
    states: list[tuple[list[torch.Tensor] | None, list[torch.Tensor] | None]]
    # Tokens and log-probabilities, chunk after chunk, once they are there.
    picked: Callable[[], list[Any]]


class Engine:
    """Runs many programs over one model: `submit` them, then `step` while any is `pending`. Raises
    ValueError where attention cannot run or has no CUDA graphs, the model cannot be `stable`, or a
    GPU has no memory for the cache.
    """

    def __init__(
        self,
        model: PreTrainedModel | Llama,  # or `pack`ed; not to be called otherwise afterwards
        *,
        # Most programs in decoding at the same time; fewer where they fill a pass.
        max_num_seqs: int = 256,
        # Most tokens of one pass; fewer where the device runs out of memory.
        max_num_batched_tokens: int = 2048,
        cache_tokens: int | None = None,  # most slots of the cache; None: as far as memory goes
        # Of what is free on a GPU, that the cache may take: others may need the rest.
        memory_share: float = 1.0,
        # Sdpa (torch), avx512 (CPU, bfloat16), triton (GPU); auto: the fastest there.
        attention: str = "auto",
        # Small passes run as CUDA graphs; None: of a `Llama` with attention triton.
        cuda_graphs: bool | None = None,
        # A token's logits are the same bits in every pass: the model is `pack`ed so.
        stable: bool = False,
        # In flight at the same time, of different programs; None: on CUDA 2, else 1.
        passes: int | None = None,
    ) -> None:
        if cuda_graphs and attention != "triton":
            raise ValueError("cuda_graphs needs attention 'triton'")
        self.device = next(model.parameters()).device
        text = model.config.get_text_config()
        self.attend = chosen(attention, self.device, model.dtype, text)
        self.few: FewTokens | None = None
        if isinstance(model, Llama):
            self.model: Llama | Stock = model
        else:
            self.model = Llama(model) if is_llama(model) else Stock(model)
        self.model.eval()
        if cuda_graphs is None:
            kernel = self.device.type == "cuda" and self.attend is not sdpa.attend
            cuda_graphs = kernel and isinstance(self.model, Llama)
        if isinstance(self.model, Llama) and self.device.type == "cpu":
            self.few = FewTokens(self.model.head, text.vocab_size)
        if stable:
            if type(getattr(self.model, "layers", [None])[0]) is not NativeLayer:
                raise ValueError(
                    "stable: Llama, Mistral, Qwen2 or Qwen3 in bfloat16, on a processor with "
                    "AVX-512 BF16"
                )
            self.attend = avx512.attend_stable
        self.cache = KVCache(_FIRST_SLOTS, cache_tokens, self.device)
        self.graphs: Graphs | None = None
        self.budget = TokenBudget(max_num_batched_tokens)
        self.scheduler = Scheduler(self.cache, self.budget, max_num_seqs)
        self.flights: deque[_Flight] = deque()
        self.steps = 0
        if self.device.type == "cuda" and (cache_tokens is None or cache_tokens > _FIRST_SLOTS):
            self.size_cache(cache_tokens, memory_share, most_tokens(text) if cuda_graphs else 0)
        self.scheduler.passes = passes or (2 if self.device.type == "cuda" else 1)
        if cuda_graphs:
            self.graphs = Graphs(self._logits, self.cache, text)

    def submit(
        self, program: Program[Any], *, tag: Any = None, sampling: Sampling = GREEDY, seed: int = 0
    ) -> None:
        """Queues a program.

        `tag` comes back as `Finished.tag`; `seed` alone decides its random draws.
        """
        self.scheduler.waiting.append(Sequence(program, tag, sampling, seed))

    def size_cache(
        self, most: int | None = None, share: float = 1.0, graph_tokens: int = 0
    ) -> None:
        """Makes the cache as large as a GPU's memory allows beside the largest passes, for good:
        full of tokens, with a next one behind each. Graphs hold a pass of `graph_tokens` more.
        Raises ValueError where there is no room.
        """
        gc.collect()  # an engine that is gone may still hold its own
        tokens, reason = self.budget.most, ""
        length = getattr(self.model.config.get_text_config(), "max_position_embeddings", tokens)
        while tokens >= LEAST_TOKENS:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            texts = [min(length, tokens)] * max(1, tokens // length)
            try:
                self.run([_full_pass(1)])  # its layers are in the cache then
                # What takes most.
                self.run(map(_full_pass, texts), sampling=Sampling(1.0, top_p=0.9))
            except ProgramError as error:
                reason = str(error)
                break
            peak = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(
                self.device
            )
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self.device)
            free += self.cache.slot_bytes * self.cache.allocator.slots
            peak += int(peak * min(1.0, graph_tokens / tokens))
            slots = slots_that_fit(int(share * free), total, peak, self.cache.slot_bytes)
            if self.budget.tokens == tokens and slots >= tokens:
                slots = slots if most is None else min(slots, most)
                self.cache = self.scheduler.cache = KVCache(slots, slots, self.device, NO_MEMORY)
                self.steps = 0
                return
            tokens = min(self.budget.tokens, tokens // 2)
            self.budget.most = self.budget.tokens = tokens
        raise ValueError(
            f"the GPU has no memory for the model's cache: {reason or 'other processes use it'}"
        )

    # It computes during a step, so it never waits for anything (see `EngineContract`).
    patience: float | None = None
    waiting = ""

    def close(self) -> None:
        """Drop all programs and release the KV cache and the CUDA graphs."""
        self.flights.clear()
        self.graphs = None
        self.cache = KVCache(0, 0, self.device)
        self.scheduler = Scheduler(self.cache, self.budget, self.scheduler.max_num_seqs)

    @property
    def sequences(self) -> list[Sequence]:
        """The programs in decoding, each with `tag` and `counts`, which grow with every step."""
        return self.scheduler.running

    @property
    def pending(self) -> int:
        return len(self.scheduler.waiting) + len(self.scheduler.running)

    def run(
        self, programs: Iterable[Program[Any]], *, sampling: Sampling = GREEDY, seed: int = 0
    ) -> list[Any]:
        """The programs' answers, in their order; program n draws from `seed` + n.

        Raises the first exception of one.
        """
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
        """Gives the device a forward pass over what the scheduler chose; then, unless it may have
        one more, programs of the earliest go on, while the device has the other. The programs that
        ended. A pass without memory is taken back, and the next are smaller. Raises RuntimeError of
        the model, or where not even these fit.
        """
        chunks, finished = self.scheduler.schedule()
        out_of_memory = self._start(chunks) if chunks else None
        if out_of_memory is not None:
            finished += self.scheduler.rollback(chunks, out_of_memory, alone=not self.flights)
        started = bool(chunks) and out_of_memory is None
        if self.flights and (not started or len(self.flights) == self.scheduler.passes):
            finished += self._advance(self.flights.popleft())
        return finished

    def _start(self, chunks: list[Chunk]) -> str | None:
        """The forward pass and its sampling; the message of the device where it has no memory for
        them.
        """
        try:
            samples = self._samples(chunks)
            logits, hidden = self._forward(chunks, samples)
            picked = to_host(self._sample(samples, logits, hidden))
            flight = _Flight(chunks, _states(chunks, samples, logits, hidden), picked)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if not is_out_of_memory(error):
                raise
            reason = str(error)
        else:
            self.flights.append(flight)
            for chunk in chunks:
                chunk.seq.in_flight = True
            self.budget.fitted()
            self.steps += 1
            return None
        # Here and not above: while the exception lives, so do the pass's tensors.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return reason

    def _samples(self, chunks: list[Chunk]) -> _Samples:
        """What a pass is asked for, in the order in which it is computed."""
        requests, places, few = SampleRequests(), list[int](), list[bool]()
        for chunk in chunks:
            seq, feed, asked = chunk.seq, chunk.seq.feed, len(chunk.samples)
            sets = feed.allowed_token_ids
            allowed = [None] * asked if sets is None else [sets[number] for number in chunk.samples]
            requests.sampling += [seq.sampling] * asked
            requests.draws += seq.draws(chunk.samples)
            requests.allowed_token_ids += allowed
            places += [chunk.start + place for place in chunk.places]
            if self.few is not None:
                few += [False] * asked if feed.want_logits else map(self.few.takes, allowed)
        if not any(few):
            return _Samples(requests, places, len(places))
        order = sorted(range(len(few)), key=few.__getitem__)
        rank = sorted(range(len(few)), key=order.__getitem__)
        return _Samples(
            requests.in_order(order), [places[i] for i in order], len(few) - sum(few), rank
        )

    def _forward(
        self, chunks: list[Chunk], samples: _Samples
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [samples but the few, vocabulary] and, where they are needed, hidden states
        [samples, hidden size].
        """
        groups: list[PrefixGroup] = []
        for chunk in chunks:
            shared = (0, 0) if chunk.prefix is None else (chunk.prefix.start, chunk.prefix.length)
            if not groups or shared[1] == 0 or (groups[-1].start, groups[-1].length) != shared:
                groups.append(PrefixGroup([], *shared))
            groups[-1].spans.append(_span(chunk))
        # [4, tokens].
        tables = np.concatenate([chunk.seq.table[:, chunk.rows] for chunk in chunks], axis=1)
        slots = np.concatenate([chunk.slots for chunk in chunks])
        packed = np.concatenate(
            [tables[TOKEN], tables[POSITION], slots, np.array(samples.places, dtype=np.int64)]
        )
        ids, positions, to, kept = to_device(packed, self.device).split(
            [*[len(slots)] * 3, len(samples.places)]
        )
        step = Step(self.cache, groups, to, kept, self.attend)
        if samples.rank is not None or any(chunk.seq.feed.want_hidden for chunk in chunks):
            return self.model(ids, positions, step, samples.full, want_hidden=True)
        logits = None if self.graphs is None else self.graphs.logits(ids, positions, step)
        return self._logits(ids, positions, step) if logits is None else logits, None

    def _logits(self, ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        """[samples, vocabulary] of tokens `ids` [tokens] at their positions [tokens]."""
        return self.model(ids, positions, step)[0]

    def _sample(
        self, samples: _Samples, logits: torch.Tensor, hidden: torch.Tensor | None
    ) -> torch.Tensor:
        """[2, samples] tokens and log-probabilities, as `sample`, chunk after chunk."""
        if samples.rank is None:
            return sample(logits, samples.requests)
        assert self.few is not None
        assert hidden is not None
        full, requests = samples.full, samples.requests
        few = self.few.sample(hidden[full:], requests.part(full, len(requests)))
        return torch.cat([sample(logits, requests.part(0, full)), few], 1)[:, samples.rank]

    def _advance(self, flight: _Flight) -> Iterator[Finished]:
        """Waits for a pass, and lets each program go on whose feed is complete."""
        picked, logprobs = flight.picked()
        tokens, begin = list(map(int, picked)), 0
        for chunk, (logits, hidden) in zip(flight.chunks, flight.states, strict=True):
            end = begin + len(chunk.samples)
            chunk.seq.take_samples(
                chunk.samples, Predictions(tokens[begin:end], logprobs[begin:end], logits, hidden)
            )
            begin = end
        answered = [
            (chunk.seq, chunk.seq.predictions)
            for chunk in flight.chunks
            if self.scheduler.advance(chunk)
        ]
        while answered:
            drafting: list[tuple[Sequence, DraftRequest]] = []
            for seq, predictions in answered:
                try:
                    feed = seq.program.send(predictions)
                    if feed.draft is not None:
                        drafting.append((seq, feed.draft))
                    else:
                        seq.take(feed)
                except StopIteration as end:
                    yield self.scheduler.end(seq, end.value)
                except Exception as error:
                    yield self.scheduler.end(seq, error=error)
            answered = _draft(drafting)


def _states(
    chunks: list[Chunk], samples: _Samples, logits: torch.Tensor, hidden: torch.Tensor | None
) -> list[tuple[list[torch.Tensor] | None, list[torch.Tensor] | None]]:
    """Of each chunk's samples the logits [vocabulary] and hidden states [hidden size], where its
    feed wants them.
    """
    rank, begin, states = samples.rank or range(len(samples.places)), 0, []
    for chunk in chunks:
        feed, rows = chunk.seq.feed, rank[begin : begin + len(chunk.samples)]
        begin += len(rows)
        states.append(
            (
                [logits[row] for row in rows] if feed.want_logits else None,
                [hidden[row] for row in rows] if feed.want_hidden and hidden is not None else None,
            )
        )
    return states


def _full_pass(tokens: int) -> Program[None]:
    yield Feed([0] * tokens, range(tokens), sample_at=range(tokens))


def _draft(drafting: list[tuple[Sequence, DraftRequest]]) -> list[tuple[Sequence, Predictions]]:
    """What the heads draft for each sequence; each heads run once, with the hidden states of all
    that ask them.
    """
    together: dict[tuple[int, int], list[tuple[Sequence, DraftRequest]]] = {}
    for seq, request in drafting:
        together.setdefault((id(request.heads), id(request.tree)), []).append((seq, request))
    answered: list[tuple[Sequence, Predictions]] = []
    for members in together.values():
        first = members[0][1]
        drafts = iter(
            first.heads.draft([state for _, ask in members for state in ask.hidden], first.tree)
        )
        answered += [
            (seq, Predictions([], [], drafts=[next(drafts) for _ in ask.hidden]))
            for seq, ask in members
        ]
    return answered


def _span(chunk: Chunk) -> Span:
    seq = chunk.seq
    keys = seq.table[1:, : seq.high]  # position, segment, step
    # Some have left the cache, so that the others are not in its slots in their order.
    if seq.high <= chunk.tokens[-1]:
        owner = seq.owner[: seq.high]
        keys = seq.table[1:, owner]
        keys[1, owner == NO_TOKEN] = NO_TOKEN
    end = chunk.start + len(chunk.tokens)
    shared = 0 if chunk.prefix is None else chunk.prefix.length
    return Span(
        chunk.start, end, seq.start, seq.high, seq.reach, seq.table[1:, chunk.rows], keys, shared
    )
