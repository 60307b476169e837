"""Next tokens where a grammar leaves few: their logits alone are computed.

The output embeddings of a whole vocabulary are a fifth of what a decoded token of a small model costs. What a value may
begin with, or an enum's next token, is one of some hundreds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import get_args

import numpy as np
import torch
from transformers import PreTrainedModel

from raypd.decoding.packed import AnyLinear, narrowed
from raypd.decoding.sampling import AllowedTokens, SampleRequest, sample

_SHARE = 8  # the vocabulary is at least so many times as large


class FewTokens:
    """Samples from rows of a model's output embeddings.

    Args:
        model: on a CPU, whose logits are what its output embeddings give.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._most = int(model.config.get_text_config().vocab_size) // _SHARE
        self._ids = np.zeros(0, dtype=np.int64)  # of the rows, in rising order: all that were asked for, up to _most
        self._rows: torch.nn.Module | None = None

    @cached_property
    def _can(self) -> bool:
        """Whether it knows how the output embeddings, which may have been packed by now, hold their rows."""
        head = self.model.get_output_embeddings()
        return type(head) in get_args(AnyLinear) and head.bias is None

    def takes(self, allowed: AllowedTokens | None) -> bool:
        """Whether a next token of these is sampled here."""
        return allowed is not None and len(allowed.ids) <= self._most and self._can

    def sample(self, hidden: torch.Tensor, requests: list[SampleRequest]) -> tuple[list[int], list[float]]:
        """Picks next tokens, as `sampling.sample` does.

        Args:
            hidden: last hidden states [requests, hidden size].
            requests: of which each is taken.

        Raises:
            ValueError: a request allows no token.
        """
        distinct = {
            id(allowed): allowed
            for allowed in (request.allowed_token_ids for request in requests)
            if allowed is not None
        }
        if not distinct:
            return [], []
        self._widen(np.unique(np.concatenate([allowed.ids for allowed in distinct.values()])))
        assert self._rows is not None
        columns = {
            key: AllowedTokens(np.searchsorted(self._ids, allowed.ids), allowed.outcomes)
            for key, allowed in distinct.items()
        }
        inside = [replace(request, allowed_token_ids=columns[id(request.allowed_token_ids)]) for request in requests]
        tokens, logprobs = sample(self._rows(hidden), inside)
        return self._ids[tokens].tolist(), logprobs

    def _widen(self, ids: np.ndarray) -> None:
        """Takes up the rows of some tokens, in place of the others where they would become too many."""
        all_ids = np.union1d(self._ids, ids)
        if len(all_ids) == len(self._ids) and self._rows is not None:
            return
        self._ids = all_ids if len(all_ids) <= self._most else ids
        self._rows = narrowed(self.model.get_output_embeddings(), torch.from_numpy(self._ids))
