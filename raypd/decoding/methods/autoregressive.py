"""Autoregressive decoding, one token at a time. Every other method is measured against it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from raypd.decoding.program import Feed, Program
from raypd.decoding.sampling import AllowedTokens
from raypd.decoding.text import Decode, GeneratedText, Prompt, Stops, TextMethod


@dataclass
class Continuation:
    """The tokens decoded after a prompt.

    `stopped` is False if the text was cut at its maximum number of tokens.
    """

    # The fields and properties that are reported along with a generated text.
    COUNTERS: ClassVar[tuple[str, ...]] = ()
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False

    def generated(self, decode: Decode) -> GeneratedText:
        text = decode(self.tokens)
        return GeneratedText(
            text,
            cut=None if self.stopped else len(text),
            tokens=len(self.tokens),
            logprobs=self.logprobs,
            counters={name: getattr(self, name) for name in self.COUNTERS},
        )


@dataclass
class DraftedContinuation(Continuation):
    """A text decoded in `steps` forward passes, including that of the prompt.

    `accepted` of its tokens were drafted before the model predicted them.
    """

    COUNTERS: ClassVar[tuple[str, ...]] = ("steps", "accepted", "average_accepted_tokens")
    steps: int = 0
    accepted: int = 0

    @property
    def decoded(self) -> int:
        return len(self.tokens)

    @property
    def average_accepted_tokens(self) -> float:
        """Tokens decoded per forward pass (SPACE, section 4.1); autoregressive decoding has 1."""
        return len(self.tokens) / self.steps if self.steps else 0.0


def count_leading(passed: Iterable[bool]) -> int:
    """Count the drafts that passed before the first one that failed."""
    count = 0
    for draft_passed in passed:
        if not draft_passed:
            break
        count += 1
    return count


def autoregressive(
    prompt: Prompt,
    max_new_tokens: int,
    stops: Stops,
    allowed_token_ids: Callable[[Sequence[int]], AllowedTokens | None] | None = None,
    pattern: str | Mapping[str, Any] | None = None,
    forced: Callable[[Sequence[int]], Sequence[int]] = lambda tokens: (),
) -> Program[Continuation]:
    """Decode one token per forward pass. The last token is not fed.

    Args:
        prompt: The prompt that the text continues.
        max_new_tokens: The number of tokens after which the text is cut.
        stops: Whether the tokens decoded so far are a complete text.
        allowed_token_ids: The tokens that may follow those decoded so far; None for all.
        pattern: As `Feed.pattern`.
        forced: The tokens that must follow those decoded so far, whatever the model predicts. They
            take no pass.
    """
    answer = Continuation(list(forced([])))
    answer.logprobs += [0.0] * len(answer.tokens)
    # What is fed next, and the position of its first token.
    tokens = [*prompt.tokens, *answer.tokens]
    position = 0
    while True:
        allowed = None if allowed_token_ids is None else [allowed_token_ids(answer.tokens)]
        predictions = yield Feed(
            tokens,
            range(position, position + len(tokens)),
            sample_at=[len(tokens) - 1],
            allowed_token_ids=allowed,
            shared=0 if position else prompt.shared,
            pattern=None if position else pattern,
        )
        position += len(tokens)
        answer.tokens += predictions.tokens
        answer.logprobs += predictions.logprobs
        unchosen = forced(answer.tokens)[: max_new_tokens - len(answer.tokens)]
        answer.tokens += unchosen
        answer.logprobs += [0.0] * len(unchosen)
        tokens = [*predictions.tokens, *unchosen]
        answer.stopped = stops(answer.tokens)
        if answer.stopped or len(answer.tokens) == max_new_tokens:
            return answer


class AutoregressiveText(TextMethod):
    """`autoregressive` for text."""

    def program(self, prompt: Prompt, stops: Stops, seed: int) -> Program[Any]:
        return autoregressive(prompt, self.options.max_new_tokens, stops)
