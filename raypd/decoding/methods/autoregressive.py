"""One token after the other: what every other method is measured against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from raypd.decoding.program import Feed, Program


@dataclass
class Prompt:
    """Token ids, of which the first `shared` are an instruction in common with other prompts."""

    tokens: Sequence[int]
    shared: int = 0


@dataclass
class Continuation:
    """What was decoded; `stopped` is False when it was cut at the most tokens."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False


def autoregressive(
    prompt: Prompt,
    max_new_tokens: int,
    stops: Callable[[Sequence[int]], bool],
    allowed_token_ids: Callable[[Sequence[int]], np.ndarray | None] | None = None,
) -> Program[Continuation]:
    """Decodes until `stops(tokens)` says so of what was decoded, or `max_new_tokens`; the last token is not fed.

    allow: the ids that may come next behind what was decoded; None, or returning None: all.
    """
    answer = Continuation()
    at = len(prompt.tokens)
    limits = [allowed_token_ids([])] if allowed_token_ids is not None else None
    predictions = yield Feed(
        prompt.tokens, range(at), sample_at=[at - 1], allowed_token_ids=limits, shared=prompt.shared
    )
    while True:
        answer.tokens += predictions.tokens
        answer.logprobs += predictions.logprobs
        answer.stopped = stops(answer.tokens)
        if answer.stopped or len(answer.tokens) == max_new_tokens:
            return answer
        limits = [allowed_token_ids(answer.tokens)] if allowed_token_ids is not None else None
        predictions = yield Feed([answer.tokens[-1]], [at], sample_at=[0], allowed_token_ids=limits)
        at += 1
