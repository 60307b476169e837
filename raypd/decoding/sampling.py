"""Pick next tokens (greedy, temperature, top-k, top-p) among all tokens or only the allowed ones.

Random draws come from the sequence, one uniform number per token, so an answer does not depend on
the other programs in its batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

import raypd.decoding.native as native
from raypd.decoding.transfer import to_device


@dataclass(frozen=True)
class Sampling:
    """How a program's tokens are picked."""

    temperature: float = 0.0  # 0 is greedy.
    top_k: int = 0  # 0 keeps all tokens.
    top_p: float = 1.0


GREEDY = Sampling()

# The number of rows of logits that are processed together.
_CPU_ROWS = 16
_DEVICE_ROWS = 512
# Sets with more allowed tokens are applied as a mask; smaller ones are read out of the logits.
_MANY_ALLOWED = 1024
_native_refusal = cache(native.refusal)


@dataclass
class AllowedTokens:
    """Token ids allowed next.

    Several tokens may lead to the same outcome: `t`, `tr` and `true` all become `true`. Outcomes
    are numbered so that those still possible after a token form an interval. The intervals of two
    tokens are equal or disjoint, or one contains the other.
    """

    # Allowed ids in ascending order, [n].
    ids: np.ndarray
    # The first and last outcome that are possible after each token, [n, 2]. None means that each
    # token is a separate outcome.
    outcomes: np.ndarray | None = None
    _masks: dict[tuple[torch.device, int], torch.Tensor] = field(default_factory=dict)

    @property
    def masked(self) -> bool:
        """Whether the set is applied as a mask."""
        return self.outcomes is None and len(self.ids) > _MANY_ALLOWED

    def mask(self, vocabulary: int, device: torch.device) -> torch.Tensor:
        """Return the set as one bit per token, uint8 [vocabulary / 8], on a device.

        It is sent to the device once, because a grammar keeps the sets that it allows.
        """
        mask = self._masks.get((device, vocabulary))
        if mask is None:
            bits = np.zeros(vocabulary, dtype=bool)
            bits[self.ids] = True
            mask = to_device(np.packbits(bits, bitorder="little"), device)
            self._masks[device, vocabulary] = mask
        return mask

    def where(self, condition: np.ndarray) -> "AllowedTokens":
        """Return the tokens for which `condition`, bool [n], is True."""
        outcomes = None
        if self.outcomes is not None:
            outcomes = self.outcomes[condition]
        return AllowedTokens(self.ids[condition], outcomes)

    def table(self) -> np.ndarray:
        """Return id, first and last outcome of each token, [n, 3]."""
        if self.outcomes is None:
            numbers = np.arange(len(self.ids))
            return np.column_stack([self.ids, numbers, numbers])
        return np.column_stack([self.ids, self.outcomes])


@dataclass(slots=True)
class SampleRequests:
    """Next tokens to pick. Each list has one entry per token, [n]."""

    sampling: list[Sampling] = field(default_factory=list)
    # Uniform numbers in [0, 1), which greedy requests do not use.
    draws: list[float] = field(default_factory=list)
    # None allows any token.
    allowed_token_ids: list[AllowedTokens | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.draws)

    def part(self, begin: int, end: int) -> "SampleRequests":
        """Return the requests from index `begin` up to, but not including, `end`."""
        return SampleRequests(
            self.sampling[begin:end],
            self.draws[begin:end],
            self.allowed_token_ids[begin:end],
        )

    def in_order(self, order: Sequence[int]) -> "SampleRequests":
        """Return the requests with these indices, in this order."""
        return SampleRequests(
            [self.sampling[number] for number in order],
            [self.draws[number] for number in order],
            [self.allowed_token_ids[number] for number in order],
        )


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the distribution from which a sampling draws.

    Args:
        logits: [..., n]
        sampling: Top-p keeps the fewest most likely tokens whose probability reaches p. Ties with
            the last token that is kept are broken by id.

    Returns:
        Probabilities [..., n], in at least float32; one-hot for greedy sampling.
    """
    logits = _widen(logits)
    if sampling.temperature == 0:
        best = logits.argmax(-1)
        return torch.nn.functional.one_hot(best, logits.shape[-1]).to(logits.dtype)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        top = logits.topk(sampling.top_k, dim=-1)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, top.indices, top.values)
    chances = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = chances.sort(dim=-1, descending=True, stable=True)
        # For each token, the total probability of all more likely tokens, [..., n].
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill(before >= sampling.top_p, 0)
        chances = torch.zeros_like(chances).scatter(-1, order, ordered)
        chances = chances / chances.sum(-1, keepdim=True)
    return chances


def pick(chances: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Draw from distributions by the inverse of their cumulative sums.

    Args:
        chances: Probabilities [n, choices].
        draws: Uniform numbers in [0, 1), [n].

    Returns:
        The index of each choice, [n].
    """
    cumulative = chances.double().cumsum(-1)
    thresholds = draws.double()[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, thresholds, right=True)[:, 0]
    # Because of rounding, the result may lie beyond the last choice with a nonzero probability.
    numbers = torch.arange(chances.shape[-1], device=chances.device)
    last = (chances > 0).long().mul(numbers).amax(-1)
    return torch.minimum(index, last)


def sample(logits: torch.Tensor, requests: SampleRequests) -> torch.Tensor:
    """Pick next tokens.

    Log-probabilities are the model's at temperature 1, among the allowed tokens. A token gets the
    probability of all tokens that lead to the same outcome, however they spell it.

    Args:
        logits: [requests, vocabulary]
        requests: The tokens to pick.

    Returns:
        Token ids and log-probabilities, [2, requests], in float64, which holds both exactly.

    Raises:
        ValueError: If a request allows no token.
    """
    if len(requests) == 0:
        return logits.new_empty(2, 0, dtype=torch.float64)
    # Processing a few rows at a time keeps them in the processor's caches.
    rows = _CPU_ROWS if logits.device.type == "cpu" else _DEVICE_ROWS
    parts: list[torch.Tensor] = []
    for begin in range(0, len(requests), rows):
        end = begin + rows
        parts.append(_sample_rows(logits[begin:end], requests.part(begin, end)))
    return torch.cat(parts, dim=1)


def _sample_rows(logits: torch.Tensor, requests: SampleRequests) -> torch.Tensor:
    """Pick next tokens as `sample` does, in groups of requests that are computed the same way."""
    picked = torch.empty(2, len(requests), dtype=torch.float64, device=logits.device)
    for (sampling, masked), members in _groups(requests).items():
        draws = [requests.draws[member] for member in members]
        if masked is None and len(members) == len(requests):
            # All requests may pick any token, so no rows have to be copied.
            tokens, logprobs = _pick_from_all(logits, sampling, draws)
            picked[:] = torch.stack([tokens.double(), logprobs.double()])
            continue
        sets = _Sets([requests.allowed_token_ids[member] for member in members])
        index, set_index = to_device(np.array([members, sets.numbers]), logits.device)
        if masked is False:
            tokens, logprobs = _pick_from_listed(logits, index, sets, set_index, sampling, draws)
        else:
            rows = logits[index]
            if masked:
                rows.masked_fill_(_forbidden(sets.distinct, rows)[set_index], -torch.inf)
            tokens, logprobs = _pick_from_all(rows, sampling, draws)
        picked[:, index] = torch.stack([tokens.double(), logprobs.double()])
    return picked


def _groups(requests: SampleRequests) -> dict[tuple[Sampling, bool | None], list[int]]:
    """Group request indices by sampling and by the kind of their allowed tokens.

    The kind is None if any token is allowed, True for a mask, False for a short list.
    """
    groups: dict[tuple[Sampling, bool | None], list[int]] = {}
    # The same groups are kept by the samplings' ids, because hashing every sampling takes longer.
    groups_by_id: dict[tuple[int, bool | None], list[int]] = {}
    pairs = zip(requests.sampling, requests.allowed_token_ids, strict=True)
    for number, (sampling, allowed) in enumerate(pairs):
        masked = None if allowed is None else allowed.masked
        key = (id(sampling), masked)
        if key not in groups_by_id:
            groups_by_id[key] = groups.setdefault((sampling, masked), [])
        groups_by_id[key].append(number)
    return groups


class _Sets:
    """Sets of allowed tokens without duplicates; many requests are in the same grammar state."""

    def __init__(self, sets: list[AllowedTokens | None]) -> None:
        by_id = {id(tokens): tokens for tokens in sets}
        self.distinct = list(by_id.values())
        number_of_id = {key: number for number, key in enumerate(by_id)}
        # The index in `distinct` of each set.
        self.numbers = [number_of_id[id(tokens)] for tokens in sets]


def _pick_from_all(
    rows: torch.Tensor, sampling: Sampling, draws: list[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick tokens [n] from logits [n, vocabulary]; return them with their log-probabilities [n]."""
    on_cpu = rows.device.type == "cpu"
    in_c = on_cpu and rows.dtype == torch.bfloat16 and _native_refusal() is None
    if sampling.temperature == 0 and in_c:
        return native.greedy(rows.contiguous())
    scores = _widen(rows)
    tokens = _choose(scores, sampling, draws)
    logprobs = scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(-1)
    return tokens, logprobs


def _pick_from_listed(
    logits: torch.Tensor,
    index: torch.Tensor,
    sets: _Sets,
    set_index: torch.Tensor,
    sampling: Sampling,
    draws: list[float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick among allowed tokens, reading only their logits.

    Args:
        logits: [requests, vocabulary]
        index: The requests' rows, [n].
        sets: The requests' sets of allowed tokens.
        set_index: The index of each request's set in `sets.distinct`, [n].
        sampling: The sampling of all of them.
        draws: Their random numbers, [n].

    Returns:
        Tokens [n] and log-probabilities [n].
    """
    # [n, allowed, 3]; -1 pads.
    table = to_device(_padded_tables(sets.distinct), logits.device)[set_index]
    ids = table[..., 0]
    scores = _widen(logits[index[:, None], ids.clamp_min(0)])
    scores = scores.masked_fill(ids < 0, -torch.inf)
    choices = _choose(scores, sampling, draws)[:, None]
    tokens = ids.gather(1, choices)[:, 0]
    logprobs = _outcome_logprobs(scores, table[..., 1], table[..., 2], choices)
    return tokens, logprobs


def _outcome_logprobs(
    scores: torch.Tensor, first: torch.Tensor, last: torch.Tensor, choices: torch.Tensor
) -> torch.Tensor:
    """Return the log-probability of the outcomes to which the chosen tokens lead, [n].

    A token whose outcomes include more than the chosen ones says nothing about how likely the
    chosen ones are. It is left out, as if its probability were divided among its outcomes like the
    rest.

    Args:
        scores: Logits [n, allowed]; -inf pads.
        first: The first outcome after each token, [n, allowed].
        last: The last outcome after each token, [n, allowed].
        choices: The chosen tokens as indices into `allowed`, [n, 1].
    """
    begin = first.gather(1, choices)
    end = last.gather(1, choices)
    within = (first >= begin) & (last <= end)
    wider = (first <= begin) & (last >= end) & ~within
    inside = scores.masked_fill(~within, -torch.inf).logsumexp(-1)
    total = scores.masked_fill(wider, -torch.inf).logsumexp(-1)
    return inside - total


def _widen(logits: torch.Tensor) -> torch.Tensor:
    """Convert to float32 at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _choose(scores: torch.Tensor, sampling: Sampling, draws: list[float]) -> torch.Tensor:
    """Choose one index per row of scores [n, choices]."""
    if sampling.temperature == 0:
        return scores.argmax(-1)
    chances = probabilities(scores, sampling)
    return pick(chances, to_device(np.array(draws, dtype=np.float32), scores.device))


def _forbidden(sets: list[AllowedTokens | None], logits: torch.Tensor) -> torch.Tensor:
    """Return the tokens that are not in each set, bool [sets, vocabulary]."""
    vocabulary = logits.shape[-1]
    masks = torch.stack(
        [tokens.mask(vocabulary, logits.device) for tokens in sets if tokens is not None]
    )
    bits = 2 ** torch.arange(8, dtype=torch.uint8, device=logits.device)
    return ((masks[:, :, None] & bits) == 0).flatten(1)[:, :vocabulary]


def _padded_tables(sets: list[AllowedTokens | None]) -> np.ndarray:
    """Return the tables of sets, [sets, allowed, 3], padded with -1."""
    tables = [torch.from_numpy(tokens.table()) for tokens in sets if tokens is not None]
    if any(len(table) == 0 for table in tables):
        raise ValueError("a request allows no token at all")
    padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True, padding_value=-1)
    return padded.numpy()
