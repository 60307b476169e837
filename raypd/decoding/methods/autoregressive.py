"""One token after the other: what every other method is measured against."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from raypd.decoding.program import Feed, Program
from raypd.decoding.sampling import AllowedTokens
from raypd.decoding.text import Decode, GeneratedText, Prompt, Stops, TextMethod


@dataclass
class Continuation:
    """What was decoded; `stopped` is False when it was cut at the most tokens."""

    COUNTERS: ClassVar[tuple[str, ...]] = ()  # its figures that go with a generated text
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False

    def generated(self, decode: Decode) -> GeneratedText:
        text = decode(self.tokens)
        counters = {name: getattr(self, name) for name in self.COUNTERS}
        cut = None if self.stopped else len(text)
        return GeneratedText(text, cut, len(self.tokens), self.logprobs, counters=counters)


@dataclass
class DraftedContinuation(Continuation):
    """What was decoded in `steps` forward passes (the prompt's included), `accepted` of it drafted
    before.
    """

    COUNTERS: ClassVar[tuple[str, ...]] = ("steps", "accepted", "average_accepted_tokens")
    steps: int = 0
    accepted: int = 0

    @property
    def decoded(self) -> int:
        return len(self.tokens)

    @property
    def average_accepted_tokens(self) -> float:
        """Tokens decoded a forward pass (SPACE, section 4.1): 1 is autoregressive."""
        return len(self.tokens) / self.steps if self.steps else 0.0


def autoregressive(
    prompt: Prompt,
    max_new_tokens: int,
    stops: Stops,  # whether the text is complete
    # What may come next; None: all.
    allowed_token_ids: Callable[[Sequence[int]], AllowedTokens | None] | None = None,
    pattern: str | Mapping[str, Any] | None = None,  # as `Feed.pattern`
    forced: Callable[[Sequence[int]], Sequence[int]] = lambda tokens: (),
) -> Program[Continuation]:
    """Decodes one token a pass; the last one is not fed.

    The rules are given the tokens decoded so far; what is `forced` comes next whatever the model
    says, and takes no pass.
    """
    answer = Continuation(list(forced([])))
    answer.logprobs += [0.0] * len(answer.tokens)
    # To be fed, and the position of the first.
    tokens, position = [*prompt.tokens, *answer.tokens], 0
    while True:
        predictions = yield Feed(
            tokens,
            range(position, position + len(tokens)),
            sample_at=[len(tokens) - 1],
            allowed_token_ids=None
            if allowed_token_ids is None
            else [allowed_token_ids(answer.tokens)],
            shared=0 if position else prompt.shared,
            pattern=None if position else pattern,
        )
        position += len(tokens)
        unchosen = forced([*answer.tokens, *predictions.tokens])[
            : max_new_tokens - len(answer.tokens) - 1
        ]
        tokens = [*predictions.tokens, *unchosen]
        answer.tokens += tokens
        answer.logprobs += [*predictions.logprobs, *[0.0] * len(unchosen)]
        answer.stopped = stops(answer.tokens)
        if answer.stopped or len(answer.tokens) == max_new_tokens:
            return answer


class AutoregressiveText(TextMethod):
    def program(self, prompt: Prompt, stops: Stops, seed: int) -> Program[Any]:
        return autoregressive(prompt, self.options.max_new_tokens, stops)
