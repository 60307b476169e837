"""Random passes for an attention function, without a model: what tests in triton's interpreter and
on a GPU share.
"""

import random
from typing import Any

import numpy as np
import pytest
import torch

from raypd.decoding.attention import sdpa
from raypd.decoding.attention.step import Attend, AttentionLayer, PrefixGroup, Span, Step
from raypd.decoding.kv_cache import KVCache
from raypd.decoding.visibility import NO_TOKEN, Reach, one_segment


def slow(*cases: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def text(rng: random.Random, a: int, start: int, prefix: int, size: int, length: int) -> Span:
    """The last `size` tokens of a text, read in order, with gaps in its positions."""
    keys = np.zeros((3, length), dtype=np.int64)
    keys[0] = prefix + np.cumsum([rng.choice([1, 1, 1, 9]) for _ in range(length)])
    return Span(a, a + size, start, length, one_segment(), keys[:, length - size :], keys, prefix)


def program(
    rng: random.Random, a: int, start: int, prefix: int, size: int, length: int, segments: int
) -> Span:
    """Tokens of many segments in any order, holes among them, that were fed in different steps."""
    kinds = [Reach.HIDDEN, Reach.ALL, Reach.CAUSAL]
    reach = np.array(
        [[rng.choice(kinds) for _ in range(segments)] for _ in range(segments)], dtype=np.int8
    )
    for segment in range(segments):
        reach[segment, segment] = rng.choice(kinds[1:])
    lines = [
        (prefix + rng.randrange(2 * length), rng.randrange(segments), rng.randrange(4))
        for _ in range(length)
    ]
    keys = np.array(lines, dtype=np.int64).T.copy()
    asked = np.array(sorted(rng.sample(range(length), size)))
    holes = [i for i in range(length) if i not in asked and rng.random() < 0.2]
    queries = keys[:, asked]
    keys[1, holes] = NO_TOKEN
    return Span(a, a + size, start, length, reach, queries, keys, prefix)


def random_pass(rng: random.Random, device: torch.device, most: int) -> Step:
    """Spans of up to `most` keys with and without shared prefixes, in regions all over the
    cache.
    """
    groups: list[PrefixGroup] = []
    slots: list[int] = []
    at = 0  # of the cache
    for _ in range(rng.randint(1, 3)):
        prefix = rng.choice([0, 1, rng.randint(2, most)])
        begin, at = at + rng.randint(0, 3), at + 3 + prefix
        spans: list[Span] = []
        for _ in range(rng.randint(1, 3)):
            length = rng.randint(1, most)
            size, start, a = (
                rng.choice([1, min(3, length), length]),
                at + rng.randint(0, 5),
                len(slots),
            )
            if rng.random() < 0.5:
                span = text(rng, a, start, prefix, size, length)
            else:
                span = program(
                    rng, a, start, prefix, size, length, rng.choice([1, 2, 5, 31, 40, 75])
                )
            # Any of its own slots: the keys that are there are random, too.
            places = np.arange(length)[-size:]
            slots += (start + places).tolist()
            spans.append(span)
            at = start + length
        groups.append(PrefixGroup(spans, begin, prefix))
    cache = KVCache(at + 4, None, device)
    places = torch.tensor(slots, device=device)
    return Step(cache, groups, places, places[:0], sdpa.attend)


def compare(
    attend: Attend,
    reference: Attend,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    atol: float,
    **sizes: Any,
) -> None:
    """An attention function on a random pass, against another one in float64 on the same numbers.
    sizes: `kv_heads`, `repeat`, `dim`, `value_dim` in place of random ones, and `most` keys of a
    span.
    """
    rng = random.Random(seed)
    exact = random_pass(random.Random(seed), device, sizes.get("most", 40))
    step = random_pass(rng, device, sizes.get("most", 40))
    draw = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(device, dtype)

    kv_heads, repeat = (
        sizes.get("kv_heads", rng.choice([1, 2])),
        sizes.get("repeat", rng.choice([1, 2, 3, 7])),
    )
    dim = sizes.get("dim", rng.choice([16, 24]))
    value_dim, tokens, slots = (
        sizes.get("value_dim", rng.choice([dim, 8])),
        len(step.slots),
        step.cache.allocator.slots,
    )
    step.cache.keys[0], step.cache.values[0] = (
        numbers(slots, kv_heads, size) for size in (dim, value_dim)
    )
    exact.cache.keys[0], exact.cache.values[0] = (
        step.cache.keys[0].double(),
        step.cache.values[0].double(),
    )
    new = [numbers(tokens, kv_heads * repeat, dim)]
    new += [numbers(kv_heads, tokens, size).transpose(0, 1) for size in (dim, value_dim)]
    for window in (None, rng.randint(1, 12), 10_000):
        layer = AttentionLayer(0, rng.choice([dim**-0.5, 0.5]), window, rng.choice([None, 2.0]))
        answer, expected = (
            attend(step, layer, *new),
            reference(exact, layer, *(x.double() for x in new)),
        )
        torch.testing.assert_close(
            answer.double(),
            expected,
            atol=atol,
            rtol=atol,
            msg=lambda text: f"{layer}: {text}",  # noqa: B023
        )
