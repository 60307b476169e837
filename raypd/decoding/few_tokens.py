"""Next tokens where a grammar leaves few (some hundreds): their logits alone are computed, since
the output embeddings of a whole vocabulary are a fifth of what a decoded token of a small model
costs.
"""

from typing import Any, get_args

import numpy as np
import torch

from raypd.decoding.linear import AnyLinear, narrowed
from raypd.decoding.sampling import AllowedTokens, SampleRequests, sample

_SHARE = 8  # the vocabulary is at least so many times as large


class FewTokens:
    """Samples from rows of a model's output embeddings `head` of a vocabulary."""

    def __init__(self, head: Any, vocabulary: int) -> None:
        self.head = head
        self._limit = vocabulary // _SHARE
        self._possible = type(head) in get_args(AnyLinear) and head.bias is None
        # Of the rows, in rising order: all that were needed, up to _limit.
        self._ids = np.zeros(0, dtype=np.int64)
        self._rows: torch.nn.Module | None = None

    def takes(self, allowed: AllowedTokens | None) -> bool:
        """Whether a next token of these is sampled here."""
        return allowed is not None and len(allowed.ids) <= self._limit and self._possible

    def sample(self, hidden: torch.Tensor, requests: SampleRequests) -> torch.Tensor:
        """`sample`, behind hidden states [requests, hidden size]."""
        distinct = {
            id(allowed): allowed for allowed in requests.allowed_token_ids if allowed is not None
        }
        if not distinct:
            return sample(hidden, requests)
        self._widen(np.unique(np.concatenate([allowed.ids for allowed in distinct.values()])))
        assert self._rows is not None
        columns = {
            key: AllowedTokens(np.searchsorted(self._ids, a.ids), a.outcomes)
            for key, a in distinct.items()
        }
        inside: list[AllowedTokens | None] = [
            columns[id(allowed)] for allowed in requests.allowed_token_ids
        ]
        picked = sample(
            self._rows(hidden), SampleRequests(requests.sampling, requests.draws, inside)
        )
        picked[0] = torch.from_numpy(self._ids)[picked[0].long()]
        return picked

    def _widen(self, ids: np.ndarray) -> None:
        """Takes up the rows of some tokens, in place of the others where they would become too
        many.
        """
        all_ids = np.union1d(self._ids, ids)
        if len(all_ids) == len(self._ids) and self._rows is not None:
            return
        self._ids = all_ids if len(all_ids) <= self._limit else ids
        self._rows = narrowed(self.head, torch.from_numpy(self._ids))
