"""Continuous batching of programs over one model.

Every step packs the feeds of the running programs into one flat forward pass, without padding
between sequences. It samples where a next token is wanted and resumes each program whose feed is
complete. New programs enter as others end. Long feeds are split into chunks within the token
budget, and are packed after the short feeds of programs that are decoding (scheduler.py).
"""

import gc
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

import raypd.decoding.attention.avx512 as avx512
import raypd.decoding.attention.sdpa as sdpa
from raypd.decoding.attention.kernels import choose_attention
from raypd.decoding.attention.step import Step
from raypd.decoding.counts import Finished
from raypd.decoding.few_tokens import FewTokens
from raypd.decoding.graphs import Graphs, max_graph_tokens
from raypd.decoding.kv_cache import NO_MEMORY, KVCache, cache_dtype_of
from raypd.decoding.layers.in_torch import Builder
from raypd.decoding.memory import (
    MIN_PASS_TOKENS,
    TokenBudget,
    is_out_of_memory,
    slots_that_fit,
)
from raypd.decoding.models.decoder import DecoderModel
from raypd.decoding.models.hybrid import Hybrid, is_hybrid
from raypd.decoding.models.registry import find_family
from raypd.decoding.models.stock import Stock
from raypd.decoding.passes import Samples, States, collect_samples, pack_inputs, states_of
from raypd.decoding.program import DraftRequest, Feed, Predictions, Program, ProgramError
from raypd.decoding.recurrence.states import StatePool, make_states
from raypd.decoding.sampling import GREEDY, Sampling, sample
from raypd.decoding.scheduler import Chunk, Scheduler
from raypd.decoding.sequence import Sequence
from raypd.decoding.transfer import to_host

_FIRST_SLOTS = 4096  # The initial size of a cache that grows.


@dataclass(slots=True)
class _Flight:
    """A pass that is running on the device."""

    chunks: list[Chunk]
    states: list[States]  # One for each chunk.
    # Waits for the pass; returns its tokens and log-probabilities, chunk after chunk.
    read_samples: Callable[[], list[Any]]


class Engine:
    """Runs many programs over one model.

    `submit` programs, then call `step` while any is `pending`.
    """

    def __init__(
        self,
        model: PreTrainedModel | DecoderModel,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        cache_tokens: int | None = None,
        memory_share: float = 1.0,
        attention: str = "auto",
        cuda_graphs: bool | None = None,
        stable: bool = False,
        passes: int | None = None,
        max_states: int | None = None,
        kv_cache: str = "auto",
    ) -> None:
        """Prepare a model for decoding.

        Args:
            model: A transformers model, or one that was packed. Afterwards, only the engine may
                call it.
            max_num_seqs: The number of programs that decode at the same time. If fewer of them fill
                a pass, fewer decode.
            max_num_batched_tokens: The largest number of tokens of one pass. Passes get smaller if
                the device runs out of memory.
            cache_tokens: The number of slots of the KV cache; None for as many as memory allows.
            memory_share: The share of a GPU's free memory that the cache may take.
            attention: "sdpa" (torch), "avx512" (CPU, bfloat16), "triton" (GPU), or "auto" for the
                fastest that computes correctly on the device.
            cuda_graphs: Whether small passes run as CUDA graphs. None uses them if attention is
                "triton".
            stable: Whether a token's logits are bit-identical in every pass. The model must be
                packed for this.
            passes: The number of passes in flight at the same time, each of different programs.
                None means 2 on a GPU and 1 elsewhere.
            max_states: The largest number of states of recurrent layers; None for as many as memory
                allows.
            kv_cache: "auto" for a KV cache in the dtype of the model, or "fp8" for one with 8 bits
                per element.

        Raises:
            ValueError: If the attention cannot run or has no CUDA graphs, the model cannot be
                stable, there is no such KV cache, or there is no memory for it or for recurrent
                states.
        """
        if cuda_graphs and attention != "triton":
            raise ValueError("cuda_graphs needs attention 'triton'")
        self.device = next(model.parameters()).device
        text_config = model.config.get_text_config()
        cache_dtype = cache_dtype_of(kv_cache)
        self.attend = choose_attention(
            attention, self.device, model.dtype, text_config, cache_dtype
        )
        self.model = _prepare(model)
        on_gpu = self.device.type == "cuda"
        if cuda_graphs is None:
            cuda_graphs = on_gpu and self.attend is not sdpa.attend
        self.few: FewTokens | None = None
        if isinstance(self.model, DecoderModel) and self.device.type == "cpu":
            self.few = FewTokens(self.model.head, text_config.vocab_size, self.model.finished)
        if stable:
            _require_stable(self.model)
            if cache_dtype is not None:
                raise ValueError(f"stable: its attention has no KV cache in {kv_cache}: use auto")
            self.attend = avx512.attend_stable
        self.cache = KVCache(_FIRST_SLOTS, cache_tokens, self.device, dtype=cache_dtype)
        self.graphs: Graphs | None = None
        self.budget = TokenBudget(max_num_batched_tokens)
        self.states: StatePool | None = None
        shapes = [recurrence.state for recurrence in self.model.recurrences]
        if shapes:
            self.states = make_states(shapes, self.device, max_num_seqs, max_states, memory_share)
        self.scheduler = Scheduler(self.cache, self.budget, max_num_seqs, self.states)
        self.flights: deque[_Flight] = deque()
        self.steps = 0
        # The bytes that the largest passes need besides the cache, measured when a GPU's cache is
        # sized.
        self.pass_bytes = 0
        if on_gpu and (cache_tokens is None or cache_tokens > _FIRST_SLOTS):
            graph_tokens = max_graph_tokens(text_config) if cuda_graphs else 0
            size_cache(self, cache_tokens, memory_share, graph_tokens)
        # The measurement above ran one pass at a time, so this is set only now.
        if passes is None:
            passes = 2 if on_gpu else 1
        self.scheduler.passes = passes
        if cuda_graphs:
            self.graphs = Graphs(self._logits, self.cache, text_config, self.states)

    def submit(
        self, program: Program[Any], *, tag: Any = None, sampling: Sampling = GREEDY, seed: int = 0
    ) -> None:
        """Queue a program.

        Args:
            program: A coroutine of a method.
            tag: Any value; it is returned as `Finished.tag`.
            sampling: How the program's tokens are picked.
            seed: Determines the program's random draws, independently of what it is batched with.
        """
        self.scheduler.waiting.append(Sequence(program, tag, sampling, seed))

    def resume(self, tag: Any) -> None:
        """Continue the paused program with this tag.

        Raises:
            KeyError: If no paused program has it.
        """
        self.scheduler.resume(tag)

    def cancel(self, tag: Any) -> None:
        """End the paused program with this tag, if there is one, and free its cache."""
        seq = self.scheduler.paused.get(tag)
        if seq is not None:
            self.scheduler.end(seq)

    # The engine computes during a step, so it never waits for anything (see `EngineContract`).
    patience: float | None = None
    waiting = ""

    def close(self) -> None:
        """Drop all programs and release the KV cache and the CUDA graphs."""
        self.flights.clear()
        self.graphs = None
        self.cache = KVCache(0, 0, self.device)
        self.states = None
        self.scheduler = Scheduler(self.cache, self.budget, self.scheduler.max_num_seqs)

    @property
    def sequences(self) -> list[Sequence]:
        """The programs being decoded. Each has a `tag`, and `counts` that grow with every step."""
        return self.scheduler.running

    @property
    def pending(self) -> int:
        """The number of programs that have not ended."""
        return len(self.scheduler.waiting) + len(self.scheduler.running)

    def run(
        self, programs: Iterable[Program[Any]], *, sampling: Sampling = GREEDY, seed: int = 0
    ) -> list[Any]:
        """Decode programs until all have ended.

        Args:
            programs: The programs; number n draws from `seed` + n.
            sampling: How their tokens are picked.
            seed: Seed of the first program.

        Returns:
            The programs' answers, in their order.

        Raises:
            Exception: The first exception that a program raised.
        """
        for number, program in enumerate(programs):
            self.submit(program, tag=number, sampling=sampling, seed=seed + number)
        answers: dict[int, Any] = {}
        while self.pending:
            for finished in self.step():
                if finished.error is not None:
                    raise finished.error
                answers[finished.tag] = finished.answer
        return [answers[number] for number in sorted(answers)]

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Start the next forward pass, and resume the programs of the earliest one in flight.

        No program is resumed while another pass may still be put in flight, so that the device
        always has work. A pass that does not fit into memory is rolled back, and the next ones are
        smaller.

        Returns:
            The programs that ended.

        Raises:
            RuntimeError: If the model fails, or if even the smallest passes do not fit into memory.
        """
        chunks, finished = self.scheduler.schedule()
        started = False
        if chunks:
            out_of_memory = self._start(chunks)
            if out_of_memory is None:
                started = True
            else:
                alone = not self.flights
                finished += self.scheduler.rollback(chunks, out_of_memory, alone=alone)
        if self.flights and (not started or len(self.flights) == self.scheduler.passes):
            finished += self._advance(self.flights.popleft())
        return finished

    # The forward pass

    def _start(self, chunks: list[Chunk]) -> str | None:
        """Start a forward pass and its sampling.

        Returns:
            None, or the device's error message if the pass does not fit into memory.
        """
        try:
            samples = collect_samples(chunks, self.few)
            logits, hidden = self._forward(chunks, samples)
            read_samples = to_host(self._sample(samples, logits, hidden))
            flight = _Flight(chunks, states_of(chunks, samples, logits, hidden), read_samples)
        except RuntimeError as error:  # torch.OutOfMemoryError is one.
            if not is_out_of_memory(error):
                raise
            reason = str(error)
        else:
            self.flights.append(flight)
            for chunk in chunks:
                chunk.seq.in_flight = True
            self.budget.record_success()
            self.steps += 1
            return None
        # The memory is freed here and not in the handler above, because the exception keeps the
        # pass's tensors alive.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return reason

    def _forward(
        self, chunks: list[Chunk], samples: Samples
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the model over the packed pass.

        Returns:
            Logits [full samples, vocabulary], and hidden states [samples, hidden size] if they are
            needed.
        """
        ids, positions, step = pack_inputs(chunks, samples, self.cache, self.attend, self.states)
        wants_hidden = any(chunk.seq.feed.want_hidden for chunk in chunks)
        if wants_hidden or samples.rank is not None:
            return self.model(ids, positions, step, samples.full_count, want_hidden=True)
        logits = None
        if self.graphs is not None:
            logits = self.graphs.logits(ids, positions, step)
        if logits is None:
            logits = self._logits(ids, positions, step)
            if self.graphs is not None:
                self.graphs.learn(step)
        return logits, None

    def _logits(self, ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        """Return logits [samples, vocabulary] for ids [tokens] at positions [tokens]."""
        return self.model(ids, positions, step)[0]

    def _sample(
        self, samples: Samples, logits: torch.Tensor, hidden: torch.Tensor | None
    ) -> torch.Tensor:
        """Return tokens and log-probabilities, [2, samples], chunk after chunk."""
        if samples.rank is None:
            return sample(logits, samples.requests)
        assert self.few is not None
        assert hidden is not None
        full_count = samples.full_count
        full_requests = samples.requests.part(0, full_count)
        few_requests = samples.requests.part(full_count, len(samples.requests))
        few = self.few.sample(hidden[full_count:], few_requests)
        full = sample(logits, full_requests)
        return torch.cat([full, few], 1)[:, samples.rank]

    # The programs

    def _advance(self, flight: _Flight) -> list[Finished]:
        """Wait for a pass, and resume each program whose feed is complete.

        Returns:
            The programs that ended.
        """
        finished: list[Finished] = []
        answered = _land(flight, self.scheduler)
        while answered:
            drafting: list[tuple[Sequence, DraftRequest]] = []
            for seq, predictions in answered:
                try:
                    feed = seq.program.send(predictions)
                    if feed.draft is not None:
                        drafting.append((seq, feed.draft))
                    elif feed.pause:
                        self.scheduler.pause(seq)
                    else:
                        seq.append_feed(feed)
                except StopIteration as end:
                    finished.append(self.scheduler.end(seq, end.value))
                except Exception as error:
                    finished.append(self.scheduler.end(seq, error=error))
            # Programs that asked for drafts are resumed with them immediately.
            answered = _draft(drafting)
        return finished


def _prepare(model: PreTrainedModel | DecoderModel) -> DecoderModel | Stock:
    """Return the model in the form that the engine calls."""
    if isinstance(model, DecoderModel):
        return model.eval()
    family = find_family(model)
    if family is None and is_hybrid(model):
        return Hybrid(model).eval()
    if family is None:
        return Stock(model).eval()
    return family.build(model, Builder()).eval()


def _require_stable(model: DecoderModel | Stock) -> None:
    """Raise ValueError unless all of the model's parts are computed by native.c."""
    if isinstance(model, DecoderModel) and model.is_stable:
        return
    kind = type(model.model if isinstance(model, Stock) else model).__name__
    raise ValueError(
        "stable: a model of a family such as Llama, Mistral, Qwen2 or Qwen3, in bfloat16, on a "
        f"processor with AVX-512 BF16; this is {kind}"
    )


def size_cache(
    engine: Engine, limit: int | None = None, share: float = 1.0, graph_tokens: int = 0
) -> None:
    """Make an engine's cache as large as a GPU's memory allows, next to the largest passes.

    The size is final. Passes get smaller until one fits next to a cache that holds its tokens.

    Args:
        engine: The engine, which must not be running anything yet.
        limit: Largest number of slots, or None.
        share: The share of the free memory that the cache may take.
        graph_tokens: The tokens of the largest CUDA graph, which needs additional memory.

    Raises:
        ValueError: If there is no room for a cache.
    """
    gc.collect()  # An engine that was deleted may still hold its cache.
    reason = "other processes use it"
    tokens = engine.budget.limit
    while tokens >= MIN_PASS_TOKENS:
        try:
            peak = _peak_of_full_pass(engine, tokens)
        except ProgramError as error:
            reason = str(error)
            break
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(engine.device)
        free += engine.cache.slot_bytes * engine.cache.allocator.slots
        peak += int(peak * min(1.0, graph_tokens / tokens))
        slots = slots_that_fit(int(share * free), total, peak, engine.cache.slot_bytes)
        if engine.budget.tokens == tokens and slots >= tokens:
            if limit is not None:
                slots = min(slots, limit)
            dtype = engine.cache.dtype
            engine.cache = KVCache(slots, slots, engine.device, NO_MEMORY, dtype)
            engine.scheduler.cache = engine.cache
            engine.steps = 0
            engine.pass_bytes = peak
            return
        tokens = min(engine.budget.tokens, tokens // 2)
        engine.budget.limit = tokens
        engine.budget.tokens = tokens
    raise ValueError(f"the GPU has no memory for the model's cache: {reason}")


def _peak_of_full_pass(engine: Engine, tokens: int) -> int:
    """Return the bytes that a pass of `tokens` tokens needs if it samples after each of them."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(engine.device)
    text_config = engine.model.config.get_text_config()
    longest = getattr(text_config, "max_position_embeddings", tokens)
    lengths = [min(longest, tokens)] * max(1, tokens // longest)
    # The first pass allocates the cache's layers, which are not part of the peak.
    engine.run([_full_pass(1)])
    # Of all sampling methods, top-p takes the most memory.
    engine.run(map(_full_pass, lengths), sampling=Sampling(1.0, top_p=0.9))
    peak = torch.cuda.max_memory_allocated(engine.device)
    return peak - torch.cuda.memory_allocated(engine.device)


def _full_pass(tokens: int) -> Program[None]:
    """Feed `tokens` tokens and ask for a next token after each."""
    yield Feed([0] * tokens, range(tokens), sample_at=range(tokens))


def _land(flight: _Flight, scheduler: Scheduler) -> list[tuple[Sequence, Predictions]]:
    """Wait for a pass, and return the sequences whose feed is complete with its predictions."""
    picked, logprobs = flight.read_samples()
    tokens = [int(token) for token in picked]
    begin = 0
    for chunk, states in zip(flight.chunks, flight.states, strict=True):
        end = begin + len(chunk.sample_numbers)
        predictions = Predictions(
            tokens[begin:end], logprobs[begin:end], states.logits, states.hidden
        )
        chunk.seq.add_predictions(chunk.sample_numbers, predictions)
        begin = end
    return [
        (chunk.seq, chunk.seq.predictions) for chunk in flight.chunks if scheduler.advance(chunk)
    ]


def _draft(drafting: list[tuple[Sequence, DraftRequest]]) -> list[tuple[Sequence, Predictions]]:
    """Return the drafts for each sequence.

    Each drafter runs once, with the contexts of all sequences that ask it for the same plan.
    """
    groups: dict[tuple[int, int], list[tuple[Sequence, DraftRequest]]] = {}
    for seq, request in drafting:
        groups.setdefault((id(request.drafter), id(request.plan)), []).append((seq, request))
    answered: list[tuple[Sequence, Predictions]] = []
    for members in groups.values():
        _, first = members[0]
        contexts = [context for _, request in members for context in request.contexts]
        drafts = iter(first.drafter.draft(contexts, first.plan))
        for seq, request in members:
            own_drafts = [next(drafts) for _ in request.contexts]
            answered.append((seq, Predictions([], [], drafts=own_drafts)))
    return answered
