"""SPACE, smart parallel auto-correct decoding: one pass verifies the drafted tokens and drafts the
next ones ("Generation Meets Verification", section 3.2, algorithm 1, equations 4 to 7, appendix
A.3).

A pass holds the text, k candidates in a chain, and behind the text and behind each candidate a
group of k mask tokens, whose outputs draft what may follow if everything before the group is
accepted. The text is what the model would write one token at a time: greedily token for token,
sampled in distribution, for any model, trained to draft or not. Where it differs from the paper:
line 18 samples the extra token from Q even behind a rejected candidate, which would favour what the
draft favours. Here it comes from the residual max(0, Q - P), normalised, for the output to have Q's
distribution (Leviathan et al. 2023, theorem 1); P is what the candidate was drawn from,
temperature, top-k and top-p included. And where fewer than k more tokens are wanted, fewer are
drafted.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from raypd.decoding.methods.autoregressive import DraftedContinuation
from raypd.decoding.program import Feed, Predictions, Program
from raypd.decoding.sampling import GREEDY, Sampling, pick, probabilities
from raypd.decoding.text import Prompt, Stops, TextMethod
from raypd.decoding.visibility import Reach


@dataclass
class SpaceAnswer(DraftedContinuation):
    """A text of accepted candidates, and of what the model says in place of `rejected` ones."""

    COUNTERS = ("steps", "accepted", "rejected", "average_accepted_tokens")
    # Not those behind a failed one, which were not looked at, or behind the end of the text.
    rejected: int = 0


@dataclass
class Candidates:
    """The candidates L_c."""

    tokens: list[int] = field(default_factory=list)  # [c]
    # When sampling: P_c [c, vocabulary], which they were drawn from.
    chance: torch.Tensor | None = None


def segments_seen(k: int) -> dict[tuple[int, int], Reach]:
    """Equation 5 as segments: the text is 0, candidate i is i, mask group g (behind candidate g) is
    k + 1 + g.
    """
    reach: dict[tuple[int, int], Reach] = {}
    for i in range(k + 1):
        for source in range(i + 1):
            reach[i, source] = reach[k + 1 + i, source] = Reach.CAUSAL
        reach[k + 1 + i, k + 1 + i] = Reach.CAUSAL
    return reach


def space(
    prompt: Prompt,
    max_new_tokens: int,
    k: int,  # mask tokens a group; 0 is autoregressive decoding
    # One that is drafted is a candidate as any other: it stays only where the model says it.
    mask_token: int,
    # Greedy: the engine's picks; else all draws are the program's own, not the engine's.
    sampling: Sampling = GREEDY,
    seed: int = 0,  # of these draws
    stops: Stops = lambda tokens: False,
) -> Program[SpaceAnswer]:
    """Algorithm 1. Raises ValueError where k is negative."""
    if k < 0:
        raise ValueError(f"k is {k}: the number of mask tokens cannot be negative")
    answer = SpaceAnswer()
    random = np.random.Generator(np.random.Philox(key=seed))
    # What is fed of the text in this step, and its first position.
    text, position = list(prompt.tokens), 0
    drafted = Candidates()
    drop: list[int] = []
    move: dict[int, int] = {}
    first = 0  # the row index of a feed's first token, and what becomes of the feed before
    while True:
        remaining = max_new_tokens - len(answer.tokens)
        # Of each group.
        masks = [max(0, min(k, remaining - g - 2)) for g in range(len(drafted.tokens) + 1)]
        end = position + len(text)
        tokens, positions, segments = [*text], [*range(position, end)], [0] * len(text)
        ends = [len(text) - 1]  # what each group stands behind: the text, then the candidates
        for g, count in enumerate(masks):
            if g > 0:
                ends.append(len(tokens))
                tokens.append(drafted.tokens[g - 1])
                positions.append(end + g - 1)
                segments.append(g)
            tokens += [mask_token] * count  # equation 4
            positions += range(end + g, end + g + count)
            segments += [k + 1 + g] * count
        groups = [
            range(place + 1, place + 1 + count) for place, count in zip(ends, masks, strict=True)
        ]
        predictions = yield Feed(
            tokens,
            positions,
            segments,
            drop=drop,
            move=move,
            reach=segments_seen(k) if k and answer.steps == 0 else {},
            sample_at=[*ends, *(index for group in groups for index in group)],
            shared=prompt.shared if answer.steps == 0 else 0,
            want_logits=sampling.temperature > 0,
            decoded=len(answer.tokens),
        )
        answer.steps += 1
        verified = _verify(predictions, drafted, sampling, random)
        accepted = len(verified) - 1
        for place, (token, logprob) in enumerate(
            zip(verified, _logprobs(predictions, verified), strict=True)
        ):
            answer.accepted += int(place < accepted)
            answer.rejected += int(place == accepted < len(drafted.tokens))
            answer.tokens.append(token)
            answer.logprobs.append(logprob)
            answer.stopped = stops(answer.tokens)
            if answer.stopped or len(answer.tokens) == max_new_tokens:
                return answer
        begin = len(ends) + sum(masks[:accepted])
        drafted = _draft(predictions, range(begin, begin + masks[accepted]), sampling, random)
        move = {first + place: 0 for place in ends[1 : accepted + 1]}
        drop = [
            first + index for index in range(ends[0] + 1, len(tokens)) if first + index not in move
        ]
        first += len(tokens)
        text, position = verified[-1:], end + accepted


def _verify(
    predictions: Predictions, drafted: Candidates, sampling: Sampling, random: np.random.Generator
) -> list[int]:
    """Lines 6 to 19: the accepted candidates and the one extra token.

    Q stands in the first predictions.
    """
    count = len(drafted.tokens)
    if predictions.logits is None:
        verified, accepted = predictions.tokens[: count + 1], 0
        while accepted < count and verified[accepted] == drafted.tokens[accepted]:
            accepted += 1
        return verified[: accepted + 1]
    # [candidates + 1, vocabulary].
    q = probabilities(torch.stack(predictions.logits[: count + 1]), sampling)
    accepted, extra = 0, q[0]
    if drafted.chance is not None:
        ids = torch.tensor(drafted.tokens, device=q.device)[:, None]
        draws = torch.from_numpy(random.random((count, 1))).to(q)
        passed = (draws * drafted.chance.gather(1, ids) < q[:count].gather(1, ids))[:, 0].tolist()
        accepted = [*passed, False].index(False)
        extra = q[accepted]
        if accepted < count:
            residual = (extra - drafted.chance[accepted]).clamp_min(0)
            # Nothing is left where both are one by rounding.
            extra = torch.where(residual.sum() > 0, residual, extra)
    return [*drafted.tokens[:accepted], *pick(extra[None], _draws(random, extra[None])).tolist()]


def _draft(
    predictions: Predictions, asks: range, sampling: Sampling, random: np.random.Generator
) -> Candidates:
    """Lines 23 and 24: the next candidates, from the mask group behind what was accepted."""
    if not asks or predictions.logits is None:
        return Candidates([predictions.tokens[ask] for ask in asks])
    chance = probabilities(torch.stack([predictions.logits[ask] for ask in asks]), sampling)
    return Candidates(pick(chance, _draws(random, chance)).tolist(), chance)


def _logprobs(predictions: Predictions, verified: list[int]) -> list[float]:
    if predictions.logits is None:
        return predictions.logprobs[: len(verified)]
    logits = torch.stack(predictions.logits[: len(verified)])
    chance = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return chance.gather(1, torch.tensor(verified, device=logits.device)[:, None])[:, 0].tolist()


def _draws(random: np.random.Generator, chance: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(random.random(len(chance))).to(chance.device)


class SpaceText(TextMethod):
    def program(self, prompt: Prompt, stops: Stops, seed: int) -> Program[Any]:
        options, (mask, *_) = self.options, (*self.model.control_tokens, 0)
        return space(
            prompt,
            options.max_new_tokens,
            options.mask_tokens,
            mask,
            self.model.sampling,
            seed,
            stops,
        )
