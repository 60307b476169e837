"""Speculative decoding: a cheap drafter guesses the next tokens, and one pass of the model verifies
them all (Leviathan et al. 2023, algorithm 1; the baseline of HPD's table 3 and SPACE's table 2).

The drafter is a smaller model with the same tokenizer, or prompt lookup (Saxena 2023), which needs
no model and copies what followed an earlier occurrence of the text's last tokens. A pass holds the
text's last token, which is certain, and the drafts after it. A draft is accepted if the model
predicts it, and the first prediction that differs replaces the draft. So every token is one that
the model predicts after exactly the text before it: the text is identical under greedy decoding,
and has the same distribution when sampled. The paper draws the drafts and accepts them with
probability min(1, q/p); here they are the drafter's most likely tokens, fixed before the model's
draw, which gives the same distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raypd.decoding.methods.autoregressive import DraftedContinuation, count_leading
from raypd.decoding.program import DraftRequest, Feed, Program
from raypd.decoding.text import Prompt, Stops, TextMethod, TextModel


@dataclass
class SpeculativeAnswer(DraftedContinuation):
    """A text of accepted drafts, and of the model's own tokens after or in place of them."""

    COUNTERS = ("steps", "drafted", "accepted", "average_accepted_tokens")
    drafted: int = 0


class DraftedText(Protocol):
    """A text as its drafter knows it."""

    def extend(self, tokens: Sequence[int], max_drafts: int) -> None:
        """Append verified tokens, and set how many drafts may follow."""


class TextDrafter(Protocol):
    """Guesses how several texts continue: `PromptLookup`, or a `DraftModel`."""

    def open(self, prompt: Prompt) -> Any:
        """Return the `DraftedText` of a prompt."""

    def draft(self, contexts: Sequence[Any], plan: Any) -> list[list[int]]:
        """Return at most `max_drafts` drafts that continue each text."""

    def close(self, text: Any) -> None:
        """Forget a text."""


def speculative(
    prompt: Prompt,
    max_new_tokens: int,
    stops: Stops,
    drafter: TextDrafter,
    max_drafts: int,
) -> Program[SpeculativeAnswer]:
    """Decode the same text as `autoregressive`, in fewer passes.

    Args:
        prompt: The prompt that the text continues.
        max_new_tokens: The number of tokens after which the text is cut.
        stops: Whether the tokens decoded so far are a complete text.
        drafter: The drafter that guesses the next tokens.
        max_drafts: The largest number of drafts that one pass verifies.
    """
    text = drafter.open(prompt)
    try:
        return (yield from _decode(prompt, max_new_tokens, stops, drafter, text, max_drafts))
    finally:
        # This also happens if the program is cancelled.
        drafter.close(text)


def _decode(
    prompt: Prompt,
    max_new_tokens: int,
    stops: Stops,
    drafter: TextDrafter,
    text: DraftedText,
    max_drafts: int,
) -> Program[SpeculativeAnswer]:
    answer = SpeculativeAnswer()
    # The certain tokens that are not fed yet, the position of the first, and the drafts after them.
    tokens = list(prompt.tokens)
    position = 0
    drafts: list[int] = []
    fed = 0
    rejected = range(0)  # rows of rejected drafts, which leave the cache
    # The drafter knows the text up to its last call.
    unknown = list(prompt.tokens)
    while True:
        row = [*tokens, *drafts]
        predictions = yield Feed(
            row,
            range(position, position + len(row)),
            sample_at=range(len(tokens) - 1, len(row)),
            shared=prompt.shared if answer.steps == 0 else 0,
            drop=rejected,
            decoded=len(answer.tokens),
        )
        fed += len(row)
        answer.steps += 1
        answer.drafted += len(drafts)
        accepted = count_leading(
            draft == predicted for draft, predicted in zip(drafts, predictions.tokens, strict=False)
        )
        verified = predictions.tokens[: accepted + 1]
        for i, token in enumerate(verified):
            if i < accepted:
                answer.accepted += 1
            answer.tokens.append(token)
            answer.logprobs.append(predictions.logprobs[i])
            answer.stopped = stops(answer.tokens)
            if answer.stopped or len(answer.tokens) == max_new_tokens:
                return answer
        rejected = range(fed - len(drafts) + accepted, fed)
        position += len(tokens) + accepted
        tokens = verified[-1:]
        unknown += verified
        drafts = []
        # One of the remaining tokens is the model's own, after the drafts.
        limit = min(max_drafts, max_new_tokens - len(answer.tokens) - 1)
        if limit > 0:
            text.extend(unknown, limit)
            unknown = []
            drafted = yield Feed((), (), draft=DraftRequest(drafter, [text]))
            (drafts,) = drafted.drafts


@dataclass(eq=False)
class LookupText:
    """A text, and where its n-grams occurred.

    Attributes:
        tokens: The prompt and the verified tokens after it.
        ends: For each n-gram, the index after its last occurrence. The n-grams at the end of the
            text are not indexed yet.
        indexed: The n-grams that end at or before this index are indexed.
    """

    tokens: list[int] = field(default_factory=list)
    max_drafts: int = 0
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0

    def extend(self, tokens: Sequence[int], max_drafts: int) -> None:
        self.tokens += tokens
        self.max_drafts = max_drafts


class PromptLookup:
    """Drafts what followed the previous occurrence of the text's last tokens.

    Args:
        max_ngram: The largest number of tokens to look up; of several matches the longest counts.
    """

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram

    def open(self, prompt: Prompt) -> LookupText:
        return LookupText()

    def draft(self, contexts: Sequence[LookupText], plan: Any) -> list[list[int]]:
        return [self._copy(text) for text in contexts]

    def close(self, text: LookupText) -> None:
        pass

    def _copy(self, text: LookupText) -> list[int]:
        self._index(text)
        for size in range(min(self.max_ngram, len(text.tokens)), 0, -1):
            begin = text.ends.get(tuple(text.tokens[-size:]))
            if begin is not None:
                # If the copy reaches the end of the text, it repeats itself.
                period = len(text.tokens) - begin
                return [text.tokens[begin + i % period] for i in range(text.max_drafts)]
        return []

    def _index(self, text: LookupText) -> None:
        """Index the n-grams that end before the last token."""
        for end in range(text.indexed + 1, len(text.tokens)):
            for size in range(1, min(self.max_ngram, end) + 1):
                text.ends[tuple(text.tokens[end - size : end])] = end
        text.indexed = max(text.indexed, len(text.tokens) - 1)


class SpeculativeText(TextMethod):
    """Speculative decoding for text."""

    def __init__(self, model: TextModel) -> None:
        super().__init__(model)
        self.drafter = model.drafter or PromptLookup(self.method_options.max_ngram)

    def program(self, prompt: Prompt, stops: Stops, seed: int) -> Program[Any]:
        return speculative(
            prompt,
            self.options.max_new_tokens,
            stops,
            self.drafter,
            self.method_options.draft_tokens,
        )
