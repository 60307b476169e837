"""Sampling of next tokens for which a grammar allows only a few hundred candidates.

Only the logits of these are computed, because in a small model the output embeddings of a whole
vocabulary are a fifth of the cost of a decoded token.
"""

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import torch

from raypd.decoding.linear import AnyLinear, narrowed
from raypd.decoding.sampling import AllowedTokens, SampleRequests, sample

# The vocabulary must be at least this many times as large as the allowed tokens.
_MIN_RATIO = 8


class FewTokens:
    """Samples from some rows of a model's output embeddings."""

    def __init__(
        self, head: Any, vocabulary: int, finished: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """
        Args:
            head: The model's output embeddings, a linear layer.
            vocabulary: The size of the vocabulary.
            finished: Scales or bounds the logits from the output embeddings.
        """
        self.head = head
        self._finished = finished
        self._limit = vocabulary // _MIN_RATIO
        self._is_possible = type(head) in get_args(AnyLinear) and head.bias is None
        # The ids whose rows are loaded, in ascending order: all that were needed so far, up to
        # `_limit`.
        self._ids = np.zeros(0, dtype=np.int64)
        self._rows: torch.nn.Module | None = None

    def takes(self, allowed: AllowedTokens | None) -> bool:
        """Return whether a next token with these allowed tokens is sampled here."""
        return allowed is not None and len(allowed.ids) <= self._limit and self._is_possible

    def sample(self, hidden: torch.Tensor, requests: SampleRequests) -> torch.Tensor:
        """Pick next tokens after hidden states [requests, hidden size], as `sample` does."""
        sets = {
            id(allowed): allowed for allowed in requests.allowed_token_ids if allowed is not None
        }
        if not sets:
            return sample(hidden, requests)
        self._load_rows(np.unique(np.concatenate([allowed.ids for allowed in sets.values()])))
        assert self._rows is not None
        # The same sets, but with columns of the narrow logits instead of token ids.
        narrow_sets = {
            key: AllowedTokens(np.searchsorted(self._ids, allowed.ids), allowed.outcomes)
            for key, allowed in sets.items()
        }
        narrow_allowed: list[AllowedTokens | None] = [
            narrow_sets[id(allowed)] for allowed in requests.allowed_token_ids
        ]
        logits = self._finished(self._rows(hidden))  # [requests, loaded rows]
        picked = sample(logits, SampleRequests(requests.sampling, requests.draws, narrow_allowed))
        picked[0] = torch.from_numpy(self._ids)[picked[0].long()]
        return picked

    def _load_rows(self, ids: np.ndarray) -> None:
        """Load the rows of some ids. They replace earlier rows if all would be too many."""
        all_ids = np.union1d(self._ids, ids)
        if len(all_ids) == len(self._ids) and self._rows is not None:
            return
        if len(all_ids) > self._limit:
            all_ids = ids
        self._ids = all_ids
        self._rows = narrowed(self.head, torch.from_numpy(self._ids))
