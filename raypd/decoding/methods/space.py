"""SPACE, smart parallel auto-correct decoding: one pass verifies the drafted tokens and drafts the
next ones ("Generation Meets Verification", section 3.2, algorithm 1, equations 4 to 7, appendix
A.3).

A pass holds the text, k candidates in a chain, and a group of k mask tokens after the text and
after each candidate. The outputs of a group draft what may follow if everything before the group is
accepted. The text is what the model would write one token at a time: identical under greedy
decoding, and with the same distribution when sampled. This holds for any model, trained to draft or
not.

Two things differ from the paper. Line 18 samples the extra token from Q even after a rejected
candidate, which would favour the tokens that the draft favours. Here it comes from the residual
max(0, Q - P), normalised, so that the output has Q's distribution (Leviathan et al. 2023, theorem
1); P is what the candidate was drawn from, temperature, top-k and top-p included. And if fewer than
k more tokens are wanted, fewer are drafted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from raypd.decoding.methods.autoregressive import DraftedContinuation, count_leading
from raypd.decoding.program import Feed, Predictions, Program
from raypd.decoding.sampling import GREEDY, Sampling, pick, probabilities
from raypd.decoding.text import Prompt, Stops, TextMethod
from raypd.decoding.visibility import Reach


@dataclass
class SpaceAnswer(DraftedContinuation):
    """A text of accepted candidates, and of the model's tokens in place of rejected ones.

    Candidates after a rejected one, or after the end of the text, count neither as accepted nor as
    rejected.
    """

    COUNTERS = ("steps", "accepted", "rejected", "average_accepted_tokens")
    rejected: int = 0


@dataclass
class Candidates:
    """The candidates L_c: [c] token ids.

    When sampling, `chance` is P_c [c, vocabulary], the distributions from which they were drawn.
    """

    tokens: list[int] = field(default_factory=list)
    chance: torch.Tensor | None = None


@dataclass
class _PassInput:
    """The input of a pass (equation 4), without the earlier tokens in the cache.

    Attributes:
        ends: The index of the token that each mask group follows: the last token of the text, then
            the candidates.
        groups: The indices of each group's mask tokens.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    groups: list[range] = field(default_factory=list)

    def append(self, tokens: Sequence[int], position: int, segment: int) -> range:
        """Append a run of tokens; return their indices."""
        begin = len(self.tokens)
        self.tokens += tokens
        self.positions += range(position, position + len(tokens))
        self.segments += [segment] * len(tokens)
        return range(begin, len(self.tokens))

    @property
    def sample_at(self) -> list[int]:
        return [*self.ends, *(index for group in self.groups for index in group)]

    def predictions_of(self, group: int) -> range:
        """Return the indices of a group's predictions, in the order of `sample_at`."""
        begin = len(self.ends) + sum(len(earlier) for earlier in self.groups[:group])
        return range(begin, begin + len(self.groups[group]))


def segments_seen(k: int) -> dict[tuple[int, int], Reach]:
    """Return equation 5 as segments.

    The text is segment 0, candidate i is i, and mask group g (after candidate g) is k + 1 + g.
    """
    reach: dict[tuple[int, int], Reach] = {}
    for i in range(k + 1):
        group = k + 1 + i
        for source in range(i + 1):
            reach[i, source] = Reach.CAUSAL
            reach[group, source] = Reach.CAUSAL
        reach[group, group] = Reach.CAUSAL
    return reach


def _layout(
    text: Sequence[int], position: int, candidates: list[int], k: int, mask: int, remaining: int
) -> _PassInput:
    """Lay out the text, the candidates, and a mask group after each (equation 4).

    Args:
        text: The part of the text that is fed in this pass.
        position: The position of its first token.
        candidates: The drafted tokens.
        k: The number of mask tokens of a group.
        mask: The id of the mask token.
        remaining: The number of tokens that may still be decoded; groups shrink if fewer than k are
            wanted.
    """
    layout = _PassInput()
    end = position + len(text)
    for g in range(len(candidates) + 1):
        if g == 0:
            run = layout.append(text, position, 0)
        else:
            run = layout.append([candidates[g - 1]], end + g - 1, g)
        layout.ends.append(run[-1])
        count = max(0, min(k, remaining - g - 2))
        layout.groups.append(layout.append([mask] * count, end + g, k + 1 + g))
    return layout


def space(
    prompt: Prompt,
    max_new_tokens: int,
    k: int,
    mask_token: int,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    stops: Stops = lambda tokens: False,
) -> Program[SpaceAnswer]:
    """Decode with auto-correct decoding (algorithm 1).

    Args:
        prompt: The prompt that the text continues.
        max_new_tokens: The number of tokens after which the text is cut.
        k: The number of mask tokens of a group; 0 is autoregressive decoding.
        mask_token: The id of the mask token. If it is drafted, it is a candidate like any other.
        sampling: If it is not greedy, all draws are made here and none by the engine.
        seed: The seed of these draws.
        stops: Whether the tokens decoded so far are a complete text.

    Raises:
        ValueError: If k is negative.
    """
    if k < 0:
        raise ValueError(f"k is {k}: the number of mask tokens cannot be negative")
    answer = SpaceAnswer()
    random = np.random.Generator(np.random.Philox(key=seed))
    # The part of the text that is fed in this pass, and the position of its first token.
    text = list(prompt.tokens)
    position = 0
    candidates = Candidates()
    first_row = 0  # of this feed
    # What happens to the rows of the previous feed.
    drop: list[int] = []
    move: dict[int, int] = {}
    while True:
        remaining = max_new_tokens - len(answer.tokens)
        layout = _layout(text, position, candidates.tokens, k, mask_token, remaining)
        predictions = yield Feed(
            layout.tokens,
            layout.positions,
            layout.segments,
            drop=drop,
            move=move,
            reach=segments_seen(k) if k and answer.steps == 0 else {},
            sample_at=layout.sample_at,
            shared=prompt.shared if answer.steps == 0 else 0,
            want_logits=sampling.temperature > 0,
            decoded=len(answer.tokens),
        )
        answer.steps += 1
        verified = _verify(predictions, candidates, sampling, random)
        accepted = len(verified) - 1
        logprobs = _logprobs(predictions, verified)
        for i, (token, logprob) in enumerate(zip(verified, logprobs, strict=True)):
            if i < accepted:
                answer.accepted += 1
            elif accepted < len(candidates.tokens):
                answer.rejected += 1
            answer.tokens.append(token)
            answer.logprobs.append(logprob)
            answer.stopped = stops(answer.tokens)
            if answer.stopped or len(answer.tokens) == max_new_tokens:
                return answer
        candidates = _draft(predictions, layout.predictions_of(accepted), sampling, random)
        # Accepted candidates become text; all other candidates and masks leave the cache.
        move = {first_row + index: 0 for index in layout.ends[1 : accepted + 1]}
        behind_text = range(first_row + len(text), first_row + len(layout.tokens))
        drop = [row for row in behind_text if row not in move]
        first_row += len(layout.tokens)
        position += len(text) + accepted
        text = verified[-1:]


def _verify(
    predictions: Predictions,
    candidates: Candidates,
    sampling: Sampling,
    random: np.random.Generator,
) -> list[int]:
    """Return the accepted candidates and one extra token (lines 6 to 19).

    Q is in the first predictions: after the text and after each candidate.
    """
    count = len(candidates.tokens)
    if predictions.logits is None:
        verified = predictions.tokens[: count + 1]
        accepted = count_leading(a == b for a, b in zip(verified, candidates.tokens, strict=False))
        return verified[: accepted + 1]
    q = probabilities(torch.stack(predictions.logits[: count + 1]), sampling)  # [c + 1, vocabulary]
    accepted = 0
    if candidates.chance is not None:
        ids = torch.tensor(candidates.tokens, device=q.device)[:, None]
        draws = torch.from_numpy(random.random((count, 1))).to(q)
        # Line 10, without the division.
        passed = draws * candidates.chance.gather(1, ids) < q[:count].gather(1, ids)
        accepted = count_leading(passed[:, 0].tolist())
    extra = q[accepted]
    if accepted < count and candidates.chance is not None:
        residual = (extra - candidates.chance[accepted]).clamp_min(0)
        # Nothing is left if P and Q differ only by rounding.
        extra = torch.where(residual.sum() > 0, residual, extra)
    picked = pick(extra[None], _draws(random, extra[None]))
    return [*candidates.tokens[:accepted], *picked.tolist()]


def _draft(
    predictions: Predictions, group: range, sampling: Sampling, random: np.random.Generator
) -> Candidates:
    """Return the next candidates, from the mask group after what was accepted (lines 23 and 24).

    Args:
        predictions: The predictions of the whole pass.
        group: Which of them are the group's.
        sampling: How the candidates are drawn.
        random: The source of these draws.
    """
    if not group or predictions.logits is None:
        return Candidates([predictions.tokens[i] for i in group])
    chance = probabilities(torch.stack([predictions.logits[i] for i in group]), sampling)
    return Candidates(pick(chance, _draws(random, chance)).tolist(), chance)


def _logprobs(predictions: Predictions, verified: list[int]) -> list[float]:
    if predictions.logits is None:
        return predictions.logprobs[: len(verified)]
    logits = torch.stack(predictions.logits[: len(verified)])
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ids = torch.tensor(verified, device=logits.device)[:, None]
    return wide.log_softmax(-1).gather(1, ids)[:, 0].tolist()


def _draws(random: np.random.Generator, chance: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(random.random(len(chance))).to(chance.device)


class SpaceText(TextMethod):
    """SPACE for text."""

    def program(self, prompt: Prompt, stops: Stops, seed: int) -> Program[Any]:
        # With `mask_tokens: 0` the tokenizer needs no mask token, and none is fed.
        mask_token = self.model.control_tokens[0] if self.model.control_tokens else 0
        return space(
            prompt,
            self.options.max_new_tokens,
            self.method_options.mask_tokens,
            mask_token,
            self.model.sampling,
            seed,
            stops,
        )
