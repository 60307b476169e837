"""Speculative decoding with a draft model, as transformers' own `generate(assistant_model=...)` does it: a baseline.

It is no program of the engine: one prompt at a time, two unmodified models, each with a cache of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from raypd.decoding.attention import sdpa
from raypd.decoding.engine import Finished
from raypd.decoding.methods.autoregressive import Continuation
from raypd.decoding.program import Predictions, Program
from raypd.decoding.row import Counts
from raypd.decoding.sampling import GREEDY, Sampling


@dataclass
class AssistedAnswer(Continuation):
    """What was decoded in `steps` forward passes of the model (the prompt's included; not those of the draft model)."""

    steps: int = 0

    @property
    def average_accepted_tokens(self) -> float:
        """Tokens decoded a forward pass of the model."""
        return len(self.tokens) / self.steps if self.steps else 0.0


class AssistedGenerator:
    """Decodes with `model`, drafting with `draft_model`.

    Neither may belong to an engine. What their checkpoints prefer in generation (penalties, sampling) is set aside, so
    that greedy decoding says what the model says. Raises ValueError where the two do not share one vocabulary: sizes
    are compared, and the tokenizers' ids where these are given.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        draft_model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        draft_tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        sizes = [m.config.get_text_config().vocab_size for m in (model, draft_model)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the draft model has a vocabulary of {sizes[1]} tokens and the model one of {sizes[0]}: a draft model "
                "must share the model's tokenizer; choose a smaller model of the same family"
            )
        if tokenizer is not None and draft_tokenizer is not None:
            ours, theirs = tokenizer.get_vocab(), draft_tokenizer.get_vocab()
            if ours != theirs:
                token = min(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t))
                raise ValueError(
                    f"the draft model's tokenizer is another one: {token!r} is {theirs.get(token)} there and "
                    f"{ours.get(token)} in the model's; choose a smaller model of the same family"
                )
        for one in (model, draft_model):
            if one.config._attn_implementation == sdpa.NAME:
                raise ValueError("this model belongs to a raypd engine: load another for assisted generation")
            one.generation_config = GenerationConfig()
        self.model, self.draft_model = model.eval(), draft_model.eval()

    @torch.inference_mode()
    def generate(
        self,
        tokens: Sequence[int],
        max_new_tokens: int,
        ends: Collection[int],
        stops: Callable[[Sequence[int]], bool] | None = None,
        sampling: Sampling = GREEDY,
        seed: int = 0,
    ) -> AssistedAnswer:
        """Decodes behind `tokens` until one of the ids `ends`, or `stops(tokens decoded)`, or `max_new_tokens`.

        The last token, an end token too, is part of the answer, as in `autoregressive`. `seed` decides the draws.
        """
        start = len(tokens)
        ids = torch.tensor([list(tokens)], device=self.model.device)
        until = _Until(start, frozenset(ends), stops, max_new_tokens)
        chosen: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            chosen = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
            }
        answer = AssistedAnswer()

        def count(*_: Any) -> None:
            answer.steps += 1

        cuda = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.random.fork_rng(cuda), self.model.register_forward_hook(count):
            torch.manual_seed(seed)
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=self.draft_model,
                generation_config=GenerationConfig(
                    max_new_tokens=max_new_tokens,
                    eos_token_id=sorted(ends) or None,
                    pad_token_id=min(ends, default=0),
                    return_dict_in_generate=True,
                    output_logits=True,
                    **chosen,
                ),
                stopping_criteria=StoppingCriteriaList([until]),
            )
        said = output.sequences[0, start:].tolist()
        until.read(said)
        answer.tokens = said[: until.length]
        answer.stopped = until.stopped
        chance = torch.cat(output.logits[: len(answer.tokens)]).float().log_softmax(-1)  # [tokens, vocabulary]
        picked = torch.tensor(answer.tokens, device=chance.device)[:, None]
        answer.logprobs = chance.gather(1, picked)[:, 0].tolist()
        return answer


class _Until(StoppingCriteria):
    """Finds where an answer is complete. A pass adds many tokens: each is looked at in turn, and what follows is cut.

    length: tokens of the answer up to there, or all that were read.
    """

    def __init__(
        self, start: int, ends: frozenset[int], stops: Callable[[Sequence[int]], bool] | None, most: int
    ) -> None:
        self.start, self.ends, self.stops, self.most = start, ends, stops, most
        self.length = 0
        self.stopped = False

    def read(self, said: list[int]) -> None:
        while not self.stopped and self.length < min(len(said), self.most):
            self.length += 1
            self.stopped = said[self.length - 1] in self.ends or (
                self.stops is not None and self.stops(said[: self.length])
            )

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self.read(input_ids[0, self.start :].tolist())
        return torch.full((input_ids.shape[0],), self.stopped, device=input_ids.device)


class AssistedEngine:
    """Runs `autoregressive` programs one by one with assisted generation: the surface of an Engine, for comparison.

    A program's first feed is its prompt; what the two models decode behind it answers that and all later feeds.
    """

    def __init__(self, generator: AssistedGenerator, max_new_tokens: int, ends: Collection[int]) -> None:
        self.generator, self.max_new_tokens, self.ends = generator, max_new_tokens, ends
        self.queue: deque[tuple[Program[Any], Any, Sampling, int]] = deque()

    def submit(self, program: Program[Any], *, tag: Any = None, sampling: Sampling = GREEDY, seed: int = 0) -> None:
        self.queue.append((program, tag, sampling, seed))

    @property
    def pending(self) -> int:
        return len(self.queue)

    def step(self) -> list[Finished]:
        """Decodes one program to its end."""
        program, tag, sampling, seed = self.queue.popleft()
        counts = Counts()
        try:
            tokens = next(program).tokens
            said = self.generator.generate(tokens, self.max_new_tokens, self.ends, sampling=sampling, seed=seed % 2**63)
            counts = Counts(prefill_tokens=len(tokens), decode_tokens=len(said.tokens), steps=said.steps)
            for token, logprob in zip(said.tokens, said.logprobs, strict=True):
                program.send(Predictions([token], [logprob]))
            raise RuntimeError("a program asked for more tokens than assisted generation decoded")
        except StopIteration as end:
            return [Finished(tag, end.value, None, counts)]
        except Exception as error:
            program.close()
            return [Finished(tag, None, error, counts)]
