"""The bootstrap: how far the figures of a sample hold for the corpus, by drawing the sample again
and again.

A quantity is an array `[1 + DRAWS]`: what the sample gives, then what resampled samples give, so
that bills are plain numpy. A counted or given one is an array of one. Of a group's `n` members `n -
1` are drawn, which makes the variance of the draws unbiased; where much of the population was
drawn, weights move by the root of the share that was not (Rao and Wu, 1988). Few members tell
little of their own scatter: draws are spread by a chi-square, as Student's t is.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raypd.estimation.records import Figure

DRAWS = 2000
_BLOCKS = 1000  # more clusters than this are resampled in blocks
# Documents next to each other in the order of the corpus, which are drawn again among themselves.
_GROUP = 3
_LEAST = 4  # degrees of freedom, for a slope to be told
Array = NDArray[np.float64]


def exact(value: float) -> Array:
    """A quantity that was counted or given."""
    return np.array([float(value)])


def figure(quantity: Array) -> Figure:
    """Value and 95% interval; no ends where the sample cannot tell them."""
    low, high = (
        np.quantile(quantity[1:], (0.025, 0.975))
        if len(quantity) > 1
        else (quantity[0], quantity[0])
    )
    return Figure(float(quantity[0]), *(() if np.isnan(low) else (float(low), float(high))))


def weights(
    count: int, rng: np.random.Generator, groups: int = 1, population: float = math.inf
) -> Array:
    """Weights of the sample's members, `[1 + DRAWS, count]`: ones, then those of resampled
    samples.
    """
    result = np.ones((1 + DRAWS, count))
    for members in np.array_split(np.arange(count), groups):
        n = len(members)
        if n > 1:
            draws = rng.multinomial(n - 1, np.full(n, 1 / n), DRAWS) * (n / (n - 1))
            result[1:, members] += math.sqrt(max(0.0, 1 - count / population)) * (draws - 1)
    return result


def ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    rng: np.random.Generator,
    population: float = math.inf,
) -> Array:
    """sum / sum over drawn clusters (units of a run, rounds of a measurement), of `population` in
    all.
    """
    a, b = (
        np.array(
            [part.sum() for part in np.array_split(np.asarray(x, float), min(len(x), _BLOCKS))]
        )
        for x in (numerators, denominators)
    )
    if b.sum() <= 0:
        return np.r_[0.0, np.full(DRAWS, np.nan)]
    if len(numerators) >= population:
        return exact(a.sum() / b.sum())
    drawn = weights(len(a), rng, population=population * len(a) / len(numerators))
    return _spread((drawn @ a) / np.maximum(drawn @ b, 1e-12), len(a) - 1, rng)


def mean(
    values: Array, lengths: Array, mean_length: float, population: float, rng: np.random.Generator
) -> Array:
    """The mean of a corpus from documents at equal distances in its order. values, lengths: `[n]`,
    in that order. The corpus's mean length is known: the sample's mean is moved to it along a
    slope, found anew in every draw.
    """
    groups = max(1, len(values) // _GROUP)
    drawn = weights(len(values), rng, groups, population)
    y = drawn @ values / len(values)
    x = drawn @ lengths / len(values)
    if len(values) - groups >= _LEAST and np.ptp(lengths) > 0:
        off = lengths - x[:, None]
        slope = (drawn * off * values).sum(1) / np.maximum((drawn * off**2).sum(1), 1e-12)
        # Few documents, drawn again, may be of one length.
        slope = slope.clip(-2 * abs(slope[0]), 2 * abs(slope[0]))
        y += slope * (mean_length - x)
    return y[:1] if len(values) >= population else _spread(y, len(values) - groups, rng)


def _spread(draws: Array, degrees: int, rng: np.random.Generator) -> Array:
    """Draws with the tails of Student's t, on the logarithm: figures are positive and compared by
    their ratio.
    """
    value = draws[0]
    if value <= 0:
        return draws[:1]
    if degrees < 1:
        return np.r_[value, np.full(DRAWS, np.nan)]
    power = np.sqrt(degrees / rng.chisquare(degrees, DRAWS))
    return np.r_[
        value,
        value * np.exp(np.clip(np.log(np.maximum(draws[1:] / value, 0.05)) * power, -100, 100)),
    ]
