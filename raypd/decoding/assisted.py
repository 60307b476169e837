"""Speculative decoding with a draft model, as transformers' own `generate(assistant_model=...)` does it: a baseline
beside the engine, one prompt at a time. Before every pass `draft_tokens` tokens are drafted; None: at most 20, up to
the first of which the draft model is not sure. HPD's table 3 was measured with that dynamic threshold, which
transformers adapts with scikit-learn: without, it would silently stay at 0.4."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.utils import is_sklearn_available

from raypd.decoding.attention.kernels import NAME
from raypd.decoding.counts import Finished, TokenCounts
from raypd.decoding.methods.autoregressive import Continuation, DraftedContinuation
from raypd.decoding.program import Feed, Predictions, Program
from raypd.decoding.sampling import GREEDY, Sampling
from raypd.decoding.sequence import ProgramError


@dataclass
class AssistedAnswer(DraftedContinuation):
    """A text in `steps` forward passes of the model (those of the draft model do not count), `drafted` tokens tried."""

    COUNTERS = ("steps", "drafted", "accepted", "average_accepted_tokens")
    drafted: int = 0


class AssistedEngine:
    """Runs `autoregressive` programs one by one: the surface of an Engine, for comparison. What checkpoints prefer in
    generation (penalties, sampling) is set aside: greedy decoding says what the model says. Raises ValueError where the
    two do not share one vocabulary, or scikit-learn is missing for `draft_tokens` None."""

    def __init__(
        self,
        model: PreTrainedModel,  # neither may belong to an engine
        draft_model: PreTrainedModel,
        *,
        draft_tokens: int | None,  # before every pass; None: while the draft model is sure
        max_new_tokens: int,
        ends: Collection[int],  # no draft goes beyond an end token, and every program must end at one
        tokenizer: PreTrainedTokenizerBase | None = None,
        draft_tokenizer: PreTrainedTokenizerBase | None = None,  # where both are given, their ids are compared, too
    ) -> None:
        _check_pair(model, draft_model, tokenizer, draft_tokenizer)
        model.generation_config = GenerationConfig()
        if draft_tokens is None and not is_sklearn_available():
            raise ValueError("a draft that ends where the draft model is unsure needs scikit-learn")
        draft_model.generation_config = GenerationConfig(
            num_assistant_tokens=20 if draft_tokens is None else draft_tokens,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.4 if draft_tokens is None else 0.0,
        )
        self.model, self.draft_model = model.eval(), draft_model.eval()
        self.draft_tokens = draft_tokens
        self.max_new_tokens, self.ends = max_new_tokens, ends
        self.queue: deque[tuple[Program[Any], Any, Sampling, int]] = deque()
        self.sequences = ()  # none is left between two steps

    def submit(self, program: Program[Any], *, tag: Any = None, sampling: Sampling = GREEDY, seed: int = 0) -> None:
        """Queues a program, as `Engine.submit` does; one that is not `autoregressive` fails in its step."""
        self.queue.append((program, tag, sampling, seed))

    @property
    def pending(self) -> int:
        return len(self.queue)

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Decodes one program to its end."""
        program, tag, sampling, seed = self.queue.popleft()
        receiver = _Receiver(program)
        try:
            prompt = next(program)
            _check_feed(prompt)
            receiver.length = receiver.counts.prefill_tokens = len(prompt.tokens)
            self._generate(list(prompt.tokens), receiver, sampling, seed)
            if not receiver.ended:
                raise ProgramError("a program asked for more tokens than assisted generation may decode")
        except Exception as error:
            program.close()
            return [Finished(tag, None, error, receiver.counts)]
        answer = receiver.answer
        if isinstance(answer, Continuation):
            steps, drafted, accepted = receiver.counts.steps, receiver.drafted, receiver.accepted
            answer = AssistedAnswer(**vars(answer), steps=steps, drafted=drafted, accepted=accepted)
        return [Finished(tag, answer, None, receiver.counts)]

    def _generate(self, prompt: list[int], receiver: _Receiver, sampling: Sampling, seed: int) -> None:
        ids = torch.tensor([prompt], device=self.model.device)
        chosen: dict[str, Any] = {"do_sample": True, **asdict(sampling)} if sampling.temperature else {}
        cuda = [self.model.device] if self.model.device.type == "cuda" else []
        hook = self.model.register_forward_hook(receiver.passed, with_kwargs=True)
        with torch.random.fork_rng(cuda), hook:
            torch.manual_seed(seed % 2**63)
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=self.draft_model,
                generation_config=GenerationConfig(
                    max_new_tokens=self.max_new_tokens,
                    eos_token_id=sorted(self.ends) or None,
                    pad_token_id=min(self.ends, default=0),
                    **chosen,
                ),
                stopping_criteria=StoppingCriteriaList([receiver]),
            )


class _Receiver(StoppingCriteria):
    """Sends a program what each pass has brought, token by token; the generation stops where the program ends."""

    def __init__(self, program: Program[Any]) -> None:
        self.program = program
        self.counts = TokenCounts()
        self.length = self.drafted = self.accepted = 0
        self.ended = False
        self.answer: Any = None
        self.drafts: list[int] = []  # of the latest pass
        self.logprobs = torch.empty(0)  # [1 + drafts, vocabulary] behind the text and each of them

    def passed(self, model: torch.nn.Module, _: Any, inputs: dict[str, Any], output: Any) -> None:
        """After a forward pass of the model, whose first takes the whole prompt and later ones the last token."""
        ids = inputs["input_ids"][0]
        self.drafts = ids[self.length if self.counts.steps == 0 else 1 :].tolist()
        # Here and not later: where it samples, `generate` writes its warped logits over these.
        self.logprobs = output.logits[0, -1 - len(self.drafts) :].float().log_softmax(-1)
        self.counts.steps += 1
        self.drafted += len(self.drafts)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        new = input_ids[0, self.length :].to(self.logprobs.device)
        self.length += len(new)
        logprobs = self.logprobs[: len(new)].gather(1, new[:, None])[:, 0].tolist()
        for number, (token, logprob) in enumerate(zip(new.tolist(), logprobs, strict=True)):
            self.counts.decode_tokens += 1
            self.accepted += self.drafts[number : number + 1] == [token]
            try:
                _check_feed(self.program.send(Predictions([token], [logprob])), token)
            except StopIteration as end:
                self.ended, self.answer = True, end.value
                break
        return torch.full((len(input_ids),), self.ended, device=input_ids.device)


def _check_feed(feed: Feed, token: int | None = None) -> None:
    """Raises ProgramError where a feed is not that of `autoregressive`: a prompt, or `token`, which came last."""
    limited = any(ids is not None for ids in feed.allowed_token_ids or ())
    another = token is not None and list(feed.tokens) != [token]
    if limited or another or feed.segments or feed.draft or list(feed.sample_at) != [len(feed.tokens) - 1]:
        raise ProgramError("assisted generation runs autoregressive programs alone, whose next token may be any")


def _check_pair(
    model: PreTrainedModel,
    draft_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    draft_tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    if model is draft_model:
        raise ValueError("the draft model is the model itself: load it a second time")
    sizes = [member.config.get_text_config().vocab_size for member in (model, draft_model)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the draft model has a vocabulary of {sizes[1]} tokens and the model one of {sizes[0]}: a draft model "
            "must share the model's tokenizer; choose a smaller model of the same family"
        )
    if tokenizer is not None and draft_tokenizer is not None:
        vocabulary, draft_vocabulary = tokenizer.get_vocab(), draft_tokenizer.get_vocab()
        if vocabulary != draft_vocabulary:
            token = min(
                t for t in vocabulary.keys() | draft_vocabulary.keys() if vocabulary.get(t) != draft_vocabulary.get(t)
            )
            raise ValueError(
                f"the draft model's tokenizer is another one: {token!r} is {draft_vocabulary.get(token)} there and "
                f"{vocabulary.get(token)} in the model's; choose a smaller model of the same family"
            )
    for member in (model, draft_model):
        if member.config._attn_implementation == NAME:
            raise ValueError("this model belongs to a raypd engine: load another for assisted generation")
