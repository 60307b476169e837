"""Picking the next token: greedy, temperature, top-k, top-p, among all or allowed tokens.

Random draws come from the sequence, one uniform number a token, so that an answer does not depend
on its batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from raypd.decoding import native
from raypd.decoding.transfer import to_device


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0


GREEDY = Sampling()
_CPU_ROWS, _DEVICE_ROWS = 16, 512  # rows of logits that are looked at together
_MANY = 1024  # allowed tokens: more are masked in a row of logits, fewer are picked out of it
_native_refusal = cache(native.refusal)


@dataclass
class AllowedTokens:
    """Tokens of which the next one is to be.

    `outcomes`: the first and the last of what may still come out behind each, in an order in which
    that is always an interval; of two tokens they are the same, apart, or one within the other.
    """

    ids: np.ndarray  # [n] in rising order
    outcomes: np.ndarray | None = None  # [n, 2]; None: each has its own
    _masks: dict[tuple[torch.device, int], torch.Tensor] = field(default_factory=dict)

    @property
    def masked(self) -> bool:
        return self.outcomes is None and len(self.ids) > _MANY

    def mask(self, vocabulary: int, device: torch.device) -> torch.Tensor:
        """[vocabulary / 8] uint8, a bit a token, on a device: sent there once, as a grammar keeps
        what it allows.
        """
        if (device, vocabulary) not in self._masks:
            bits = np.zeros(vocabulary, dtype=bool)
            bits[self.ids] = True
            self._masks[device, vocabulary] = to_device(
                np.packbits(bits, bitorder="little"), device
            )
        return self._masks[device, vocabulary]

    def where(self, kept: np.ndarray) -> "AllowedTokens":
        """Some of them: kept [n] bool."""
        return AllowedTokens(self.ids[kept], None if self.outcomes is None else self.outcomes[kept])

    def table(self) -> np.ndarray:
        """[n, 3] id, first and last outcome."""
        numbers = np.arange(len(self.ids))
        return np.column_stack(
            [self.ids, *((numbers, numbers) if self.outcomes is None else self.outcomes.T)]
        )


@dataclass(slots=True)
class SampleRequests:
    """Next tokens to pick, [n] of each list."""

    sampling: list[Sampling] = field(default_factory=list)
    draws: list[float] = field(default_factory=list)  # uniform in [0, 1), unused when greedy
    allowed_token_ids: list[AllowedTokens | None] = field(default_factory=list)  # None: all

    def __len__(self) -> int:
        return len(self.draws)

    def part(self, begin: int, end: int) -> "SampleRequests":
        return SampleRequests(
            self.sampling[begin:end], self.draws[begin:end], self.allowed_token_ids[begin:end]
        )

    def in_order(self, order: Sequence[int]) -> "SampleRequests":
        lists = self.sampling, self.draws, self.allowed_token_ids
        return SampleRequests(*([some[i] for i in order] for some in lists))  # type: ignore[arg-type]


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution [..., n] that `sampling` draws from, in float32 at least; one-hot where it
    is greedy. Top-p keeps the fewest most likely tokens whose probability reaches p; ties with the
    last one kept are broken by id.
    """
    logits = _wide(logits)
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kept = logits.topk(sampling.top_k, dim=-1)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept.indices, kept.values)
    chance = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = chance.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # [..., n] what is more likely than this token
        ordered = ordered.masked_fill(before >= sampling.top_p, 0)
        chance = torch.zeros_like(chance).scatter(-1, order, ordered)
        chance = chance / chance.sum(-1, keepdim=True)
    return chance


def pick(chance: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Draws [n] from distributions [n, choices] by the inverse of their cumulative sums; draws: [n]
    in [0, 1).
    """
    cumulative = chance.double().cumsum(-1)
    index = torch.searchsorted(
        cumulative, draws.double()[:, None] * cumulative[:, -1:], right=True
    )[:, 0]
    # rounding may land behind the last token that has any probability
    last = (chance > 0).long().mul(torch.arange(chance.shape[-1], device=chance.device)).amax(-1)
    return torch.minimum(index, last)


def sample(logits: torch.Tensor, requests: SampleRequests) -> torch.Tensor:
    """Picks next tokens, row after row of logits [requests, vocabulary], some at a time: they stay
    in the caches then. [2, requests] tokens and log-probabilities, in float64, which holds both as
    they are. Those are the model's at temperature 1, among the allowed tokens; a token stands there
    for all that lead to the same outcome, however they write it. Raises ValueError where a request
    allows no token.
    """
    rows = _CPU_ROWS if logits.device.type == "cpu" else _DEVICE_ROWS
    begins = range(0, len(requests), rows)
    parts = [
        _sample(logits[begin : begin + rows], requests.part(begin, begin + rows))
        for begin in begins
    ]
    return torch.cat(parts, dim=1) if parts else logits.new_empty(2, 0, dtype=torch.float64)


def _sample(logits: torch.Tensor, requests: SampleRequests) -> torch.Tensor:
    groups: dict[tuple[Sampling, bool | None], list[int]] = {}
    # Of the groups: to hash every sampling takes longer.
    parts: dict[tuple[int, bool | None], list[int]] = {}
    for i, (sampling, allowed) in enumerate(
        zip(requests.sampling, requests.allowed_token_ids, strict=True)
    ):
        part = id(sampling), None if allowed is None else allowed.masked
        if part not in parts:
            parts[part] = groups.setdefault((sampling, part[1]), [])
        parts[part].append(i)
    picked = torch.empty(2, len(requests), dtype=torch.float64, device=logits.device)
    for (sampling, masked), members in groups.items():
        draws = [requests.draws[i] for i in members]
        index: Any = slice(None)  # all requests, whose tokens are not limited
        if masked is not None or len(members) < len(requests):
            sets = [requests.allowed_token_ids[i] for i in members]
            # Many ask in the same state of a grammar.
            distinct = list({id(tokens): tokens for tokens in sets}.values())
            place = {id(tokens): n for n, tokens in enumerate(distinct)}
            index, which = to_device(
                np.array([members, [place[id(tokens)] for tokens in sets]]), logits.device
            )
        if masked is False:  # the allowed tokens alone are read
            # [members, most allowed, 3], -1 pads.
            table = to_device(_padded(distinct), logits.device)[which]
            ids = table[..., 0]
            scores = _wide(logits[index[:, None], ids.clamp_min(0)]).masked_fill(
                ids < 0, -torch.inf
            )
            chosen = _choose(scores, sampling, draws)[:, None]
            tokens = ids.gather(1, chosen)[:, 0]
            logprobs = _outcome_logprobs(scores, table[..., 1], table[..., 2], chosen)
        else:
            rows = logits[index]
            if masked:
                rows.masked_fill_(_forbidden(distinct, rows)[which], -torch.inf)
            in_c = (
                rows.device.type == "cpu"
                and rows.dtype == torch.bfloat16
                and _native_refusal() is None
            )
            if sampling.temperature == 0 and in_c:
                tokens, logprobs = native.greedy(rows.contiguous())
            else:
                scores = _wide(rows)
                tokens = _choose(scores, sampling, draws)
                logprobs = scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(-1)
        picked[:, index] = torch.stack([tokens.double(), logprobs.double()])
    return picked


def _outcome_logprobs(
    scores: torch.Tensor, first: torch.Tensor, last: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """How likely [n] the outcomes of the token at place `chosen` [n, 1] are.

    `scores` [n, allowed] are logits, -inf pads; `first`, `last` [n, allowed] intervals of outcomes.
    What lies behind a token that leaves more open than the chosen one is not known: it is taken to
    be shared as the rest is.
    """
    begin, end = first.gather(1, chosen), last.gather(1, chosen)
    within = (first >= begin) & (last <= end)
    wider = (first <= begin) & (last >= end) & ~within
    inside, total = (scores.masked_fill(out, -torch.inf).logsumexp(-1) for out in (~within, wider))
    return inside - total


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _choose(scores: torch.Tensor, sampling: Sampling, draws: list[float]) -> torch.Tensor:
    if sampling.temperature == 0:
        return scores.argmax(-1)
    return pick(
        probabilities(scores, sampling), to_device(np.array(draws, dtype=np.float32), scores.device)
    )


def _forbidden(allowed: list[AllowedTokens | None], logits: torch.Tensor) -> torch.Tensor:
    """bool [sets, vocabulary] of the tokens that are not in each set."""
    vocabulary = logits.shape[-1]
    masks = torch.stack(
        [tokens.mask(vocabulary, logits.device) for tokens in allowed if tokens is not None]
    )
    bits = 2 ** torch.arange(8, dtype=torch.uint8, device=logits.device)
    return ((masks[:, :, None] & bits) == 0).flatten(1)[:, :vocabulary]


def _padded(allowed: list[AllowedTokens | None]) -> np.ndarray:
    rows = [torch.from_numpy(tokens.table()) for tokens in allowed if tokens is not None]
    if not all(map(len, rows)):
        raise ValueError("a request allows no token at all")
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1).numpy()
