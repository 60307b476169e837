"""The bootstrap: how precisely the figures of a sample describe the corpus.

A quantity is an array `[1 + DRAWS]`: the value of the sample, then the values of resampled samples,
so that bills are computed in plain numpy. A quantity that was counted or given is an array of one
element. From a group of `n` members, `n - 1` are drawn, which makes the variance of the draws
unbiased. If much of the population was drawn, weights are scaled by the square root of the share
that was not drawn (Rao and Wu, 1988). A few members say little about their own variance, so the
draws are spread by a chi-square distribution, like Student's t.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raypd.estimation.records import Figure

DRAWS = 2000
# More clusters than this are resampled in blocks.
_BLOCKS = 1000
# Documents next to each other in the order of the corpus are resampled in groups of this size.
_GROUP = 3
# Two members agree or differ by chance, so they say nothing about the variance.
_FEWEST_DEGREES = 2
# An interval whose ends are further apart than this says nothing about the figure.
_WIDEST_RATIO = 10.0
# Degrees of freedom that are needed to fit a slope.
_MIN_DEGREES = 4
Array = NDArray[np.float64]


def exact(value: float) -> Array:
    """Return a quantity that was counted or given, without an interval."""
    return np.array([float(value)])


def figure(quantity: Array, widest_ratio: float = _WIDEST_RATIO) -> Figure:
    """Return the value and the 95% interval, without ends if the sample does not determine them.

    Args:
        quantity: The value, then those of resampled samples.
        widest_ratio: The interval is omitted if its high end is more than this many times its low
            end.
    """
    value = float(quantity[0])
    if len(quantity) == 1:
        low = high = value
    else:
        low, high = map(float, np.quantile(quantity[1:], (0.025, 0.975)))
    if math.isnan(low) or high > widest_ratio * low >= 0:
        return Figure(value)
    return Figure(value, low, high)


def weights(
    count: int, rng: np.random.Generator, groups: int = 1, population: float = math.inf
) -> Array:
    """Draw weights of the sample's members.

    Args:
        count: Members of the sample.
        rng: Draws the weights.
        groups: Number of groups of neighbours; members are resampled within their group.
        population: Members of the population that the sample is from.

    Returns:
        `[1 + DRAWS, count]`: ones, then the weights of resampled samples.
    """
    result = np.ones((1 + DRAWS, count))
    scale = math.sqrt(max(0.0, 1 - count / population))
    for members in np.array_split(np.arange(count), groups):
        size = len(members)
        if size > 1:
            draws = rng.multinomial(size - 1, np.full(size, 1 / size), DRAWS)
            result[1:, members] += scale * (draws * (size / (size - 1)) - 1)
    return result


def ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    rng: np.random.Generator,
    population: float = math.inf,
) -> Array:
    """Estimate the ratio of two sums over drawn clusters.

    Args:
        numerators: One per cluster (a unit of a run, or a round of a measurement).
        denominators: One per cluster.
        rng: Draws the resampled samples.
        population: Number of clusters that the drawn ones are from.
    """
    upper = _blocks(numerators)
    lower = _blocks(denominators)
    if lower.sum() <= 0:
        return np.r_[0.0, np.full(DRAWS, np.nan)]
    if len(numerators) >= population:
        return exact(upper.sum() / lower.sum())
    drawn = weights(len(upper), rng, population=population * len(upper) / len(numerators))
    return _spread((drawn @ upper) / np.maximum(drawn @ lower, 1e-12), len(upper) - 1, rng)


def _blocks(values: Sequence[float]) -> Array:
    """Sum neighbouring clusters, so that at most `_BLOCKS` are resampled."""
    blocks = np.array_split(np.asarray(values, float), min(len(values), _BLOCKS))
    return np.array([block.sum() for block in blocks])


def mean(
    values: Array, lengths: Array, mean_length: float, population: float, rng: np.random.Generator
) -> Array:
    """Estimate the mean of a corpus from documents at equal distances in its order.

    Because the mean length of the corpus is known, the mean of the sample is corrected along a
    slope of value over length, which is fitted again in each draw.

    Args:
        values: `[n]`, in the order of the corpus.
        lengths: `[n]`, in the same order.
        mean_length: The mean length of all documents of the corpus.
        population: Documents of the corpus.
        rng: Draws the resampled samples.
    """
    groups = max(1, len(values) // _GROUP)
    drawn = weights(len(values), rng, groups, population)
    means = drawn @ values / len(values)
    mean_lengths = drawn @ lengths / len(values)
    degrees = len(values) - groups
    if degrees >= _MIN_DEGREES and np.ptp(lengths) > 0:
        deviations = lengths - mean_lengths[:, None]
        variances = (drawn * deviations**2).sum(1)
        slopes = (drawn * deviations * values).sum(1) / np.maximum(variances, 1e-12)
        # If a sample is small, all documents of a resampled sample may have the same length.
        slopes = slopes.clip(-2 * abs(slopes[0]), 2 * abs(slopes[0]))
        means += slopes * (mean_length - mean_lengths)
    if len(values) >= population:
        return means[:1]
    return _spread(means, degrees, rng)


def _spread(draws: Array, degrees: int, rng: np.random.Generator) -> Array:
    """Give draws the tails of Student's t.

    The logarithm is spread, because figures are positive and compared by their ratio.
    """
    value = draws[0]
    if value <= 0:
        return draws[:1]
    if degrees < _FEWEST_DEGREES:
        return np.r_[value, np.full(DRAWS, np.nan)]
    power = np.sqrt(degrees / rng.chisquare(degrees, DRAWS))
    logarithms = np.log(np.maximum(draws[1:] / value, 0.05))
    return np.r_[value, value * np.exp(np.clip(logarithms * power, -100, 100))]
