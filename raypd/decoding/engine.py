"""Continuous batching of programs over one model.

Every step packs what the running programs feed into one forward pass, flat, with no padding between sequences; samples
where a next token was asked for; and lets each program whose feed is complete go on. New programs come in as old ones
end; long feeds go in chunks of the token budget, behind the short feeds of programs that decode (scheduler.py).

    engine = Engine(model, max_num_seqs=16)
    engine.submit(autoregressive(prompt, 64, end), tag="a")
    while engine.pending:
        for done in engine.step():
            print(done.tag, done.answer)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, PreTrainedModel

from raypd.decoding.attention import sdpa
from raypd.decoding.attention.step import PrefixGroup, Span, Step
from raypd.decoding.kv_cache import KVCache
from raypd.decoding.memory import TokenBudget, is_out_of_memory
from raypd.decoding.program import DraftRequest, Predictions, Program
from raypd.decoding.sampling import GREEDY, SampleRequest, Sampling, sample
from raypd.decoding.scheduler import Chunk, Finished, Scheduler
from raypd.decoding.sequence import POSITION, SEGMENT, STEP, TOKEN, Sequence
from raypd.decoding.visibility import NO_TOKEN

__all__ = ["Engine", "Finished"]


@dataclass
class Output:
    """What a pass says: logits [asks, vocabulary], for each ask its sequence and number, and, where a feed wanted them,
    the last hidden states [asks, hidden size]."""

    logits: torch.Tensor
    asked: list[tuple[Sequence, int]]
    hidden: list[torch.Tensor] = field(default_factory=list)


class Engine:
    """Runs many programs over one model.

    Args:
        model: is switched to the engine's attention and must not be called otherwise afterwards.
        max_num_seqs: programs in decoding at the same time.
        max_num_batched_tokens: most tokens of one forward pass; fewer where the device runs out of memory.
        cache_tokens: most slots of the cache; None lets it grow as far as memory goes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 2048,
        cache_tokens: int | None = None,
    ) -> None:
        AttentionInterface.register(sdpa.NAME, sdpa.attention)
        model.set_attn_implementation(sdpa.NAME)
        self.model = model.eval()
        self.device = next(model.parameters()).device
        self.cache = KVCache(4096, cache_tokens, self.device)
        self.budget = TokenBudget(max_num_batched_tokens)
        self.scheduler = Scheduler(self.cache, self.budget, max_num_seqs)
        self.steps = 0

    # --------------------------------------------------------------------------------------------------- using it

    def submit(self, program: Program[Any], *, tag: Any = None, sampling: Sampling = GREEDY, seed: int = 0) -> None:
        """Queues a program. `seed` alone decides its random draws, whatever it is batched with."""
        self.scheduler.waiting.append(Sequence(program, tag, sampling, seed))

    @property
    def sequences(self) -> list[Sequence]:
        """The programs in decoding, each with `tag` and `counts`, which grow with every step."""
        return self.scheduler.running

    @property
    def pending(self) -> int:
        """Programs that were submitted and have not ended."""
        return len(self.scheduler.waiting) + len(self.scheduler.running)

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
        chunks, finished = self.scheduler.schedule()
        if not chunks:
            return finished
        reason = None
        try:
            _answer(self._forward(chunks))
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if not is_out_of_memory(error):
                raise
            reason = str(error)
        # Here and not above: while the exception lives, so do the tensors of the pass that failed.
        if reason is not None:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            return finished + self.scheduler.rollback(chunks, reason)
        self.budget.fitted()
        return finished + list(self._advance(chunks))

    def _forward(self, chunks: list[Chunk]) -> Output:
        """One pass over all chunks, side by side."""
        asked: list[tuple[Sequence, int]] = []
        keep: list[int] = []
        groups: list[PrefixGroup] = []
        for chunk in chunks:
            for number, place in chunk.seq.asked(chunk.tokens):
                asked.append((chunk.seq, number))
                keep.append(chunk.at + place)
            prefix = chunk.prefix
            if groups and prefix is not None and groups[-1].length and groups[-1].start == prefix.start:
                groups[-1].spans.append(_span(chunk))
            elif prefix is not None:
                groups.append(PrefixGroup([_span(chunk)], prefix.start, prefix.length))
            else:
                groups.append(PrefixGroup([_span(chunk)]))
        tables = np.concatenate([chunk.seq.table[:, chunk.tokens] for chunk in chunks], axis=1)  # [4, tokens]
        slots = np.concatenate([chunk.slots for chunk in chunks])
        ids, positions, to = torch.from_numpy(np.stack([tables[TOKEN], tables[POSITION], slots])).to(self.device)
        with self._hidden_states(chunks) as hidden:
            output = self.model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=torch.tensor(keep, dtype=torch.long, device=self.device),
                step=Step(self.cache, groups, to),
            )
        self.steps += 1
        return Output(output.logits[0], asked, hidden)

    @contextmanager
    def _hidden_states(self, chunks: list[Chunk]) -> Iterator[list[torch.Tensor]]:
        """Is filled with what the output embeddings read, asks x [hidden size], where a feed wants it."""
        found: list[torch.Tensor] = []
        if not any(chunk.seq.feed is not None and chunk.seq.feed.want_hidden for chunk in chunks):
            yield found
            return

        def keep(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            found.extend(inputs[0][0])

        with self.model.get_output_embeddings().register_forward_pre_hook(keep):
            yield found

    def _advance(self, chunks: list[Chunk]) -> Iterator[Finished]:
        """Tells the programs whose feed is complete what the model said, and takes their next feed."""
        answered = [(chunk.seq, chunk.seq.predictions()) for chunk in chunks if self.scheduler.advance(chunk)]
        while answered:
            asking: list[tuple[Sequence, DraftRequest]] = []
            for seq, predictions in answered:
                try:
                    feed = seq.program.send(predictions)
                    if feed.guess is not None:
                        asking.append((seq, feed.guess))
                    else:
                        seq.take(feed)
                except StopIteration as end:
                    yield self.scheduler.finish(seq, end.value)
                except Exception as error:
                    yield self.scheduler.fail(seq, error)
            answered = _guessed(asking)


def _answer(output: Output) -> None:
    """Samples every ask of a pass."""
    asks = []
    for seq, number in output.asked:
        assert seq.feed is not None
        draw = seq.draw(number) if seq.sampling.temperature > 0 else 0.0
        allowed = seq.feed.allowed_token_ids
        asks.append(SampleRequest(seq.sampling, draw, None if allowed is None else allowed[number]))
    tokens, logprobs = sample(output.logits, asks)
    for i, (seq, number) in enumerate(output.asked):
        seq.answers[number] = tokens[i], logprobs[i]
        if seq.feed is not None and seq.feed.want_logits:
            seq.logits[number] = output.logits[i]
        if seq.feed is not None and seq.feed.want_hidden:
            seq.hidden[number] = output.hidden[i]


def _guessed(asking: list[tuple[Sequence, DraftRequest]]) -> list[tuple[Sequence, Predictions]]:
    """What the heads say to each row, each heads called once with the hidden states of all rows that ask them."""
    together: dict[tuple[int, int], list[tuple[Sequence, DraftRequest]]] = {}
    for seq, guess in asking:
        together.setdefault((id(guess.heads), id(guess.tree)), []).append((seq, guess))
    answered: list[tuple[Sequence, Predictions]] = []
    for members in together.values():
        first = members[0][1]
        said = iter(first.heads.guess([state for _, guess in members for state in guess.hidden], first.tree))
        answered += [(seq, Predictions([], [], guesses=[next(said) for _ in guess.hidden])) for seq, guess in members]
    return answered


def _span(chunk: Chunk) -> Span:
    seq, table = chunk.seq, chunk.seq.table
    owner = seq.owner[: seq.high]
    keys = np.where(owner == NO_TOKEN, NO_TOKEN, table[SEGMENT, owner])
    return Span(
        a=chunk.at,
        b=chunk.at + len(chunk.tokens),
        start=seq.start,
        length=seq.high,
        reach=seq.reach,
        query_segments=table[SEGMENT, chunk.tokens],
        query_positions=table[POSITION, chunk.tokens],
        query_steps=table[STEP, chunk.tokens],
        key_segments=keys,
        key_positions=table[POSITION, owner],
        key_steps=table[STEP, owner],
    )
