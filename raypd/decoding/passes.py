"""Build a forward pass from the chunks that the scheduler chose."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from raypd.decoding.attention.step import Attend, PrefixGroup, Span, Step
from raypd.decoding.few_tokens import FewTokens
from raypd.decoding.kv_cache import KVCache
from raypd.decoding.recurrence.chains import RecurrentRun
from raypd.decoding.recurrence.plan import RecurrentPass
from raypd.decoding.recurrence.states import StatePool
from raypd.decoding.sampling import AllowedTokens, SampleRequests
from raypd.decoding.scheduler import Chunk
from raypd.decoding.sequence import TOKEN
from raypd.decoding.transfer import to_device
from raypd.decoding.visibility import NO_TOKEN, POSITION, SEGMENT


@dataclass(slots=True)
class Samples:
    """The next tokens that a pass is asked for, in the order in which they are computed.

    Those with few allowed tokens come last, because their logits are computed separately
    (few_tokens.py).
    """

    requests: SampleRequests
    # The row of the pass that each token follows, [samples].
    rows: list[int]
    # How many of them, at the beginning, have the logits of all tokens.
    full_count: int
    # The index of each sample in this order, chunk by chunk; None if the orders are the same.
    rank: list[int] | None = None


@dataclass(slots=True)
class States:
    """The logits [vocabulary] and hidden states [hidden size] of a chunk's samples, if wanted."""

    logits: list[torch.Tensor] | None
    hidden: list[torch.Tensor] | None


class Inputs(NamedTuple):
    """What the model reads in a pass."""

    ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    step: Step


def collect_samples(chunks: list[Chunk], few: FewTokens | None) -> Samples:
    """List the next tokens that a pass is asked for.

    Args:
        chunks: The chunks of the pass.
        few: Samples those with few allowed tokens, which come last; None if there is no such
            sampler.
    """
    requests = SampleRequests()
    rows: list[int] = []
    is_few: list[bool] = []
    for chunk in chunks:
        seq = chunk.seq
        count = len(chunk.sample_numbers)
        allowed = _allowed_tokens(chunk)
        requests.sampling += [seq.sampling] * count
        requests.draws += seq.draws(chunk.sample_numbers)
        requests.allowed_token_ids += allowed
        rows += [chunk.start + row for row in chunk.sample_rows]
        if few is not None:
            if seq.feed.want_logits:
                is_few += [False] * count
            else:
                is_few += map(few.takes, allowed)
    if not any(is_few):
        return Samples(requests, rows, len(rows))
    order = sorted(range(len(rows)), key=is_few.__getitem__)
    rank = sorted(range(len(rows)), key=order.__getitem__)
    return Samples(
        requests.in_order(order),
        [rows[number] for number in order],
        len(rows) - sum(is_few),
        rank,
    )


def _allowed_tokens(chunk: Chunk) -> list[AllowedTokens | None]:
    """Return the allowed tokens for each sample of a chunk; None allows any token."""
    sets = chunk.seq.feed.allowed_token_ids
    if sets is None:
        return [None] * len(chunk.sample_numbers)
    return [sets[number] for number in chunk.sample_numbers]


def pack_inputs(
    chunks: list[Chunk],
    samples: Samples,
    cache: KVCache,
    attend: Attend,
    states: StatePool | None = None,
) -> Inputs:
    """Pack the tokens of a pass into one row, and copy them to the device of the cache.

    Args:
        chunks: The chunks of the pass.
        samples: What the pass is asked for.
        cache: The KV cache.
        attend: The attention function.
        states: The states of the recurrent layers; None if the model has none.
    """
    # [4, tokens]
    table = np.concatenate([chunk.seq.table[:, chunk.table_index] for chunk in chunks], axis=1)
    slots = np.concatenate([chunk.slots for chunk in chunks])
    sample_rows = np.array(samples.rows, dtype=np.int64)
    # One transfer for all four arrays is faster than four.
    packed = np.concatenate([table[TOKEN], table[POSITION], slots, sample_rows])
    tokens = len(slots)
    lengths = [tokens, tokens, tokens, len(sample_rows)]
    moved = to_device(packed, cache.device).split(lengths)
    ids, positions, slots_there, sample_rows_there = moved
    step = Step(cache, _prefix_groups(chunks), slots_there, sample_rows_there, attend)
    if states is not None:
        step.recurrence = RecurrentPass(_runs(chunks), tokens, states)
    return Inputs(ids, positions, step)


def _runs(chunks: list[Chunk]) -> list[RecurrentRun]:
    """Return the runs of all chunks, with their rows in the pass."""
    runs: list[RecurrentRun] = []
    for chunk in chunks:
        runs += [replace(run, rows=chunk.start + run.rows) for run in chunk.runs]
    return runs


def _prefix_groups(chunks: list[Chunk]) -> list[PrefixGroup]:
    """Group adjacent chunks that share a prefix, and put every other chunk into its own group."""
    groups: list[PrefixGroup] = []
    for chunk in chunks:
        prefix = chunk.prefix
        start = 0
        length = 0
        if prefix is not None:
            start = prefix.start
            length = prefix.length
        last = groups[-1] if groups else None
        if length == 0 or last is None or (last.start, last.length) != (start, length):
            groups.append(PrefixGroup([], start, length))
        groups[-1].spans.append(_span(chunk, length))
    return groups


def _span(chunk: Chunk, prefix_length: int) -> Span:
    """Describe a chunk to attention."""
    seq = chunk.seq
    region = seq.region
    rows = seq.table[:TOKEN]  # Position, segment and step of each own token, [3, tokens].
    if region.high > chunk.tokens[-1]:
        # Every token is still in the slot with its index.
        keys = rows[:, : region.high]
    else:
        # Some tokens have left the cache, so others may be in their slots.
        owner = region.owner[: region.high]
        keys = rows[:, owner]
        keys[SEGMENT, owner == NO_TOKEN] = NO_TOKEN
    return Span(
        query_start=chunk.start,
        query_end=chunk.start + len(chunk.tokens),
        key_start=region.start,
        key_count=region.high,
        reach=seq.reach,
        queries=rows[:, chunk.table_index],
        keys=keys,
        prefix_length=prefix_length,
    )


def states_of(
    chunks: list[Chunk], samples: Samples, logits: torch.Tensor, hidden: torch.Tensor | None
) -> list[States]:
    """Return the logits and hidden states that each chunk's feed asked for."""
    rank: list[int] | range = range(len(samples.rows))
    if samples.rank is not None:
        rank = samples.rank
    begin = 0
    states: list[States] = []
    for chunk in chunks:
        feed = chunk.seq.feed
        end = begin + len(chunk.sample_numbers)
        chunk_states = States(None, None)
        if feed.want_logits:
            chunk_states.logits = [logits[row] for row in rank[begin:end]]
        if feed.want_hidden and hidden is not None:
            chunk_states.hidden = [hidden[row] for row in rank[begin:end]]
        states.append(chunk_states)
        begin = end
    return states
