"""A draft model: a second, smaller model that drafts for the programs of an engine.

It has an engine and a KV cache of its own. For each text that is decoded, one program runs in that
engine. It decodes drafts one after the other and pauses while the main model verifies them. Then it
drops the rejected ones from its cache and reads on, so that nothing is computed twice. The programs
of all texts draft side by side.
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
    """A text that is drafted for.

    Attributes:
        number: Tag of its program in the draft model's engine.
        shared: Leading tokens of the prompt that other prompts have, too.
        unread: Verified tokens behind those that the draft model has read, its drafts aside.
        drafts: The latest drafts. All but the last of them are in the draft model's cache.
        max_drafts: Most drafts that are to follow.
        length: Verified tokens in all.
        state: "failed" where its program ended with an error; nothing is drafted then.
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
        vocabulary: Token ids of the main model; the draft model may have more, which pad it.
        context_length: Positions that the draft model has; None: no limit.
        min_confidence: Drafting ends behind a token that is less likely than this, as in
            transformers' assisted generation (there 0.4). With 0 it never ends early.
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
        """Begin a text."""
        return ModelText(next(self._numbers), prompt.shared)

    def close(self, text: ModelText) -> None:
        """Forget a text and free its cache."""
        self.engine.cancel(text.number)

    def draft(self, contexts: Sequence[ModelText], plan: Any) -> list[list[int]]:
        """Draft at most `max_drafts` tokens behind each text.

        Args:
            contexts: The texts.
            plan: Not used.

        Returns:
            Token ids for each text; none where the draft model cannot take the text.
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
                # A program pauses and does not end by itself, unless its text does not fit.
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
        """Draft again and again, pausing whenever the drafts are to be verified."""
        fed = 0
        position = 0  # of the next token
        while True:
            # Accepted drafts are in the cache already, but for the last one, which was not fed.
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
