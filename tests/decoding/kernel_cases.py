"""Random passes for an attention function, without a model.

The tests in triton's interpreter and those on a GPU share them.
"""

import random
from typing import Any

import numpy as np
import pytest
import torch

from raypd.decoding.attention import sdpa
from raypd.decoding.attention.step import Attend, AttentionLayer, PrefixGroup, Span, Step
from raypd.decoding.kv_cache import KVCache
from raypd.decoding.visibility import NO_TOKEN, POSITION, SEGMENT, STEP, Reach, one_segment


def slow(*cases: tuple[Any, ...]) -> list[Any]:
    """Mark parameters of a test as slow."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def text(
    rng: random.Random, row: int, start: int, prefix: int, query_count: int, key_count: int
) -> Span:
    """Return the last tokens of a text that is read in order, with gaps in its positions."""
    keys = np.zeros((3, key_count), dtype=np.int64)
    keys[POSITION] = prefix + np.cumsum([rng.choice([1, 1, 1, 9]) for _ in range(key_count)])
    return Span(
        query_start=row,
        query_end=row + query_count,
        key_start=start,
        key_count=key_count,
        reach=one_segment(),
        queries=keys[:, key_count - query_count :],
        keys=keys,
        prefix_length=prefix,
    )


def program(
    rng: random.Random,
    row: int,
    start: int,
    prefix: int,
    query_count: int,
    key_count: int,
    segments: int,
) -> Span:
    """Return tokens of many segments in any order, with holes, that were fed in different steps."""
    kinds = [Reach.HIDDEN, Reach.ALL, Reach.CAUSAL]
    reach = np.zeros((segments, segments), dtype=np.int8)
    for query_segment in range(segments):
        for key_segment in range(segments):
            reach[query_segment, key_segment] = rng.choice(kinds)
    for segment in range(segments):
        reach[segment, segment] = rng.choice(kinds[1:])
    keys = np.zeros((3, key_count), dtype=np.int64)
    for key in range(key_count):
        keys[POSITION, key] = prefix + rng.randrange(2 * key_count)
        keys[SEGMENT, key] = rng.randrange(segments)
        keys[STEP, key] = rng.randrange(4)
    chosen = sorted(rng.sample(range(key_count), query_count))
    queries = keys[:, chosen]
    for key in range(key_count):
        if key not in chosen and rng.random() < 0.2:
            keys[SEGMENT, key] = NO_TOKEN
    return Span(
        query_start=row,
        query_end=row + query_count,
        key_start=start,
        key_count=key_count,
        reach=reach,
        queries=queries,
        keys=keys,
        prefix_length=prefix,
    )


def random_pass(rng: random.Random, device: torch.device, max_keys: int) -> Step:
    """Return spans of up to `max_keys` keys, with and without shared prefixes.

    Their regions lie all over the cache.
    """
    groups: list[PrefixGroup] = []
    slots: list[int] = []  # The slot of each query's own key.
    next_slot = 0
    for _ in range(rng.randint(1, 3)):
        prefix = rng.choice(
            [
                0,
                1,
                rng.randint(2, max_keys),
            ]
        )
        prefix_start = next_slot + rng.randint(0, 3)
        next_slot += 3 + prefix
        spans: list[Span] = []
        for _ in range(rng.randint(1, 3)):
            key_count = rng.randint(1, max_keys)
            query_count = rng.choice([1, min(3, key_count), key_count])
            start = next_slot + rng.randint(0, 5)
            row = len(slots)
            if rng.random() < 0.5:
                span = text(rng, row, start, prefix, query_count, key_count)
            else:
                segments = rng.choice([1, 2, 5, 31, 40, 75])
                span = program(rng, row, start, prefix, query_count, key_count, segments)
            spans.append(span)
            # Any own slots will do, because the keys that are stored there are random too.
            next_slot = start + key_count
            slots += range(next_slot - query_count, next_slot)
        groups.append(PrefixGroup(spans, prefix_start, prefix))
    cache = KVCache(next_slot + 4, None, device)
    slot_tensor = torch.tensor(slots, device=device)
    return Step(cache, groups, slot_tensor, slot_tensor[:0], sdpa.attend)


def compare(
    attend: Attend,
    reference: Attend,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    atol: float,
    **sizes: Any,
) -> None:
    """Compare an attention function with another one in float64, on a random pass.

    Args:
        attend: The function.
        reference: The other function.
        seed: Seed of the pass and its numbers.
        device: Where both run.
        dtype: The dtype of the function's inputs.
        atol: The largest difference.
        sizes: `kv_heads`, `repeat`, `dim` and `value_dim` in place of random ones, `most`, the most
            keys of a span, `latent`, whether values are the first numbers of keys, and
            `cache_dtype`, the dtype of the cache. The other function gets values apart, and keys
            and values as the cache holds them.
    """
    rng = random.Random(seed)
    max_keys = sizes.get("most", 40)
    exact_step = random_pass(random.Random(seed), device, max_keys)
    step = random_pass(rng, device, max_keys)
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(device, dtype)

    kv_heads = sizes.get("kv_heads", rng.choice([1, 2]))
    repeat = sizes.get("repeat", rng.choice([1, 2, 3, 7]))
    dim = sizes.get("dim", rng.choice([16, 24]))
    value_dim = sizes.get("value_dim", rng.choice([dim, 8]))
    tokens = len(step.slots)
    slots = step.cache.allocator.slots
    cache_dtype = sizes.get("cache_dtype", dtype)
    if cache_dtype != dtype:
        step.cache.dtype = cache_dtype
    step.cache.keys[0] = numbers(slots, kv_heads, dim).to(cache_dtype)
    values = numbers(slots, kv_heads, value_dim).to(cache_dtype)
    latent_dim = value_dim if sizes.get("latent") else None
    if latent_dim is None:
        step.cache.values[0] = values
    else:
        values = step.cache.keys[0][..., :latent_dim]
    exact_step.cache.keys[0] = step.cache.keys[0].double()
    exact_step.cache.values[0] = values.double()
    query = numbers(tokens, kv_heads * repeat, dim)
    key = numbers(kv_heads, tokens, dim).transpose(0, 1)
    value = numbers(kv_heads, tokens, value_dim).transpose(0, 1)
    if latent_dim is not None:
        value = key[..., :latent_dim]
    given_value = value if latent_dim is None else None
    exact_key = key.to(cache_dtype).double()
    exact_value = value.to(cache_dtype).double()
    for window in (None, rng.randint(1, 12), 10_000):
        scale = rng.choice([dim**-0.5, 0.5])
        softcap = rng.choice([None, 2.0])
        sinks = rng.choice([None, numbers(kv_heads * repeat)])
        exact_sinks = None if sinks is None else sinks.double()
        layer = AttentionLayer(0, scale, window, softcap, sinks, latent_dim)
        exact_layer = AttentionLayer(0, scale, window, softcap, exact_sinks)
        answer = attend(step, layer, query, key, given_value)
        expected = reference(exact_step, exact_layer, query.double(), exact_key, exact_value)
        torch.testing.assert_close(
            answer.double(),
            expected,
            atol=atol,
            rtol=atol,
            msg=lambda message: f"{layer}: {message}",  # noqa: B023
        )
