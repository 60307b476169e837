"""The scans of recurrent layers, over the chunks of a pass.

Within a chunk, a recurrence is a matrix product that needs no state. These products are computed
together for all chunks of one size. Then the states advance through the chunks level by level, with
one call for all chunks of a level. A chunk of one token is a plain step of the recurrence, so all
branches are decoded at once.

In formulas, with what remains of the state up to token i of a chunk, d(i) = exp(sum of decays), and
the state S before the chunk:

    gated delta rule    u = solve(A, beta v - beta d (k S)),   A(i, j) = beta k(i) k(j) d(i) / d(j)
                        out = d (q S) + (q k^T d(i) / d(j)) u
                        S' = d(end) S + (k d(end) / d)^T u
    Mamba-2             out = d (C S) + (C B^T d(i) / d(j)) step x
                        S' = d(end) S + (step x)^T (B d(end) / d)
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from raypd.decoding.recurrence.plan import ChunkGroup, Scan


class DeltaInputs(NamedTuple):
    """What the gated delta rule reads, in float32."""

    query: torch.Tensor  # Unit vectors times key_dim^-0.5, [tokens, heads, key dimension].
    key: torch.Tensor  # Unit vectors, [tokens, heads, key dimension].
    value: torch.Tensor  # [tokens, heads, value dimension]
    decay: torch.Tensor  # The logarithm of what remains of the state, [tokens, heads].
    beta: torch.Tensor  # The rate of writing, [tokens, heads].


def delta_chunks(group: ChunkGroup, inputs: DeltaInputs) -> Scan:
    """Prepare the chunks of one size for the gated delta rule.

    With decay 0 and beta 0, padding leaves the states unchanged.
    """
    parts = DeltaInputs(
        group.take(inputs.query),
        group.take(inputs.key),
        group.take(inputs.value),
        group.take_masked(inputs.decay),
        group.take_masked(inputs.beta),
    )
    if group.size == 1:
        return _DeltaSteps(parts)
    return _DeltaChunks(parts)


class _DeltaSteps:
    """Chunks of one token."""

    def __init__(self, parts: DeltaInputs) -> None:
        query, key, value, decay, beta = (part.squeeze(2) for part in parts)
        # The key and the query of each head read the state in one product.
        self._both = torch.stack([key, query], 2)  # [chunks, heads, 2, key dimension]
        self._products = (key * query).sum(-1, keepdim=True)  # [chunks, heads, 1]
        self._value = value
        self._kept = decay.exp()[..., None]  # [chunks, heads, 1]
        self._beta = beta[..., None]

    def through(self, chunks: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = self._both[chunks]
        kept = self._kept[chunks]
        read = _product(both, state)  # [chunks, heads, 2, value dimension]
        change = (self._value[chunks] - kept * read[:, :, 0]) * self._beta[chunks]
        out = kept * read[:, :, 1] + self._products[chunks] * change
        key = both[:, :, 0, :, None]
        behind = torch.addcmul(state * kept[..., None], key, change[:, :, None])
        return out[:, :, None], behind


class _DeltaChunks:
    """Chunks of several tokens."""

    def __init__(self, parts: DeltaInputs) -> None:
        query, key, value, decay, beta = parts
        total = decay.cumsum(-1)[..., None]  # [chunks, heads, size, 1]
        between = _between(total)
        written = key * beta[..., None]
        key_columns = key.transpose(-1, -2)
        system = (written @ key_columns) * between
        right = torch.cat([value * beta[..., None], written * total.exp()], -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        self._new, reads = solved.split([value.shape[-1], key.shape[-1]], -1)
        # What reads the state: the correction of the values, and the queries.
        self._reads = torch.cat([reads, query * total.exp()], -2)  # [..., 2 * size, key dimension]
        self._scores = (query @ key_columns) * between
        self._keys = (key * (total[..., -1:, :] - total).exp()).transpose(-1, -2)
        self._kept = total[..., -1:, :].exp()  # [chunks, heads, 1, 1]

    def through(self, chunks: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        correction, read = _product(self._reads[chunks], state).chunk(2, -2)
        new = self._new[chunks] - correction
        out = read + _product(self._scores[chunks], new)
        behind = state * self._kept[chunks] + _product(self._keys[chunks], new)
        return out, behind


class MambaInputs(NamedTuple):
    """What Mamba-2 reads, in float32."""

    inputs: torch.Tensor  # [tokens, heads, head dimension]
    steps: torch.Tensor  # [tokens, heads]
    keys: torch.Tensor  # What is written into the state (B), [tokens, heads, state size].
    queries: torch.Tensor  # What is read from it (C), [tokens, heads, state size].
    rates: torch.Tensor  # The rate of forgetting (A), [heads].


def mamba_chunks(group: ChunkGroup, inputs: MambaInputs) -> Scan:
    """Prepare the chunks of one size for Mamba-2.

    With steps of 0, padding leaves the states unchanged.
    """
    steps = group.take_masked(inputs.steps)
    written = group.take(inputs.inputs) * steps[..., None]
    decay = steps * inputs.rates[:, None]
    return _MambaChunks(written, group.take(inputs.keys), group.take(inputs.queries), decay)


class _MambaChunks:
    """Chunks of any size."""

    def __init__(
        self,
        written: torch.Tensor,
        keys: torch.Tensor,
        queries: torch.Tensor,
        decay: torch.Tensor,
    ) -> None:
        """
        Args:
            written: The inputs times their steps, [chunks, heads, size, head dimension].
            keys: [chunks, heads, size, state size]
            queries: [chunks, heads, size, state size]
            decay: The logarithm of what remains of the state, [chunks, heads, size].
        """
        total = decay.cumsum(-1)[..., None]  # [chunks, heads, size, 1]
        self._written = written.transpose(-1, -2)  # [..., head dimension, size]
        self._keys = keys * (total[..., -1:, :] - total).exp()
        # A state is [head dimension, state size], so queries read its transpose.
        self._queries = queries * total.exp()
        self._kept = total[..., -1:, :].exp()
        self._is_step = decay.shape[-1] == 1
        # What the tokens of a chunk read from each other.
        self._inside = ((queries @ keys.transpose(-1, -2)) * _between(total)) @ written

    def through(self, chunks: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        read = _product(self._queries[chunks], state.transpose(-1, -2))
        kept = state * self._kept[chunks]
        written = self._written[chunks]
        keys = self._keys[chunks]
        if self._is_step:
            behind = torch.addcmul(kept, written, keys)
        else:
            behind = kept + _product(written, keys)
        return self._inside[chunks] + read, behind


def _between(total: torch.Tensor) -> torch.Tensor:
    """Return what remains at token i of what token j wrote, [..., size, size], 0 for j > i.

    Args:
        total: The logarithm of what remains at each token of the state before the chunk,
            [..., size, 1].
    """
    size = total.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    return (total - total.transpose(-1, -2)).masked_fill(later, -torch.inf).exp()


def _product(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return first @ second for [chunks, heads, n, m] and [chunks, heads, m, k].

    `matmul` would copy parts of a larger tensor.
    """
    product = torch.bmm(first.flatten(0, 1), second.flatten(0, 1))
    return product.unflatten(0, first.shape[:2])
