"""A draft model: a second, smaller model that drafts for the programs of an engine.

It has its own engine and KV cache. For each text being decoded, one program runs in that engine.
The program decodes drafts one after the other and pauses while the main model verifies them. It
then drops the rejected ones from its cache and continues, so that nothing is computed twice. The
programs of all texts draft in parallel.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from raypd.decoding.engine import Engine
from raypd.decoding.methods.autoregressive import count_leading
from raypd.decoding.program import Feed, Program
from raypd.decoding.text import Prompt


@dataclass(eq=False)
class ModelText:
    """A text for which the draft model drafts.

    Attributes:
        number: The tag of its program in the draft model's engine.
        shared: The number of leading tokens that the prompt has in common with others.
        unread: The verified tokens that the draft model has not read yet, except its own drafts.
        drafts: The latest drafts. All but the last of them are in the draft model's cache.
        max_drafts: The largest number of drafts to make next.
        length: The total number of verified tokens.
        state: "failed" if its program ended with an error; nothing is drafted then.
    """

    number: int
    shared: int
    unread: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    max_drafts: int = 0
    length: int = 0
    state: str = "new"

    def extend(self, tokens: Sequence[int], max_drafts: int) -> None:
        self.unread += tokens
        self.length += len(tokens)
        self.max_drafts = max_drafts


class DraftModel:
    """Drafts with a model of the same tokenizer.

    Args:
        engine: An engine of the draft model, used for nothing else.
        vocabulary: The number of token ids of the main model; the draft model may have more, as
            padding.
        context_length: The number of positions of the draft model; None for no limit.
        min_confidence: Drafting ends after a token that is less likely than this, as in
            transformers' assisted generation (where it is 0.4). With 0 it never ends early.
    """

    def __init__(
        self,
        engine: Engine,
        vocabulary: int,
        context_length: int | None = None,
        min_confidence: float = 0.0,
    ) -> None:
        self.engine = engine
        self.vocabulary = vocabulary
        self.context_length = context_length
        self.min_confidence = min_confidence
        self._numbers = count()

    def open(self, prompt: Prompt) -> ModelText:
        """Start a text."""
        return ModelText(next(self._numbers), prompt.shared)

    def close(self, text: ModelText) -> None:
        """Forget a text and free its cache."""
        self.engine.cancel(text.number)

    def draft(self, contexts: Sequence[ModelText], plan: Any) -> list[list[int]]:
        """Draft at most `max_drafts` tokens after each text.

        Args:
            contexts: The texts.
            plan: Not used.

        Returns:
            The token ids for each text; empty if the draft model cannot take the text.
        """
        by_number = {text.number: text for text in contexts if self._can_draft(text)}
        for text in by_number.values():
            if text.state == "new":
                text.state = "drafting"
                self.engine.submit(self._program(text), tag=text.number)
            else:
                self.engine.resume(text.number)
        while self.engine.pending:
            for finished in self.engine.step():
                # A program pauses instead of ending, unless its text does not fit.
                by_number[finished.tag].state = "failed"
        return [self._usable(text) if text.number in by_number else [] for text in contexts]

    def _can_draft(self, text: ModelText) -> bool:
        if text.state == "failed":
            return False
        longest = text.length + text.max_drafts
        return self.context_length is None or longest <= self.context_length

    def _usable(self, text: ModelText) -> list[int]:
        """Return the drafts up to the first that the main model does not know."""
        if text.state == "failed":
            return []
        known = count_leading(token < self.vocabulary for token in text.drafts)
        return text.drafts[:known]

    def _program(self, text: ModelText) -> Program[None]:
        """Draft repeatedly, pausing whenever the drafts are to be verified."""
        fed = 0
        position = 0  # of the next token
        while True:
            # Accepted drafts are already in the cache, except for the last one, which was not fed.
            cached = text.drafts[:-1]
            accepted = count_leading(
                draft == token for draft, token in zip(cached, text.unread, strict=False)
            )
            rejected = len(cached) - accepted
            position -= rejected
            drop = range(fed - rejected, fed)
            tokens = text.unread[accepted:]
            text.unread = []
            text.drafts = []
            is_sure = True
            while is_sure and len(text.drafts) < text.max_drafts:
                predictions = yield Feed(
                    tokens,
                    range(position, position + len(tokens)),
                    sample_at=[len(tokens) - 1],
                    shared=text.shared if fed == 0 else 0,
                    drop=drop,
                )
                fed += len(tokens)
                position += len(tokens)
                drop = range(0)
                tokens = predictions.tokens
                text.drafts += tokens
                is_sure = math.exp(predictions.logprobs[0]) >= self.min_confidence
            yield Feed((), (), pause=True)
