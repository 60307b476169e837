"""The bootstrap: how far the figures of a sample hold for the corpus, found by drawing the sample again and again.

A quantity is an array `[1 + _DRAWS]`: what the sample gives, then what resampled samples give, so that sums, products
and bills are plain numpy. A quantity that was counted or given is an array of one.

Samples are drawn again within each stratum, `n - 1` of its `n` documents, which makes the variance of the draws an
unbiased one; where much of a stratum was drawn, weights move by the root of the share that was not (Rao and Wu, 1988).
Few documents tell little of their own scatter: draws are spread by a chi-square, as Student's t is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raypd.run.records import Figure

_DRAWS = 2000
_BLOCKS = 1000  # more clusters than this are resampled in blocks
_LEAST = 4  # degrees of freedom, for a slope to be told
Array = NDArray[np.float64]


def exact(value: float) -> Array:
    """A quantity that was counted or given."""
    return np.array([float(value)])


def figure(quantity: Array) -> Figure:
    """Value and 95% interval; no ends where the sample cannot tell them."""
    low, high = np.quantile(quantity[1:], (0.025, 0.975)) if len(quantity) > 1 else (quantity[0], quantity[0])
    if np.isnan(low):
        return Figure(float(quantity[0]))
    return Figure(float(quantity[0]), float(low), float(high))


def ratio(
    numerators: Sequence[float], denominators: Sequence[float], rng: np.random.Generator, population: float = math.inf
) -> Array:
    """sum / sum over drawn clusters (units of a run, rounds of a measurement), of `population` in all."""
    a, b = (np.array([part.sum() for part in np.array_split(np.asarray(x, float), min(len(x), _BLOCKS))])
            for x in (numerators, denominators))  # fmt: skip
    if b.sum() <= 0:
        return np.r_[0.0, np.full(_DRAWS, np.nan)]
    if len(numerators) >= population:
        return exact(a.sum() / b.sum())
    strata = np.zeros(len(a), int)
    weights = _weights(strata, np.array([population * len(a) / len(numerators)]), rng)
    return _spread((weights @ a) / np.maximum(weights @ b, 1e-12), len(a) - 1, rng)


def stratified(
    values: Array, lengths: Array, strata: NDArray[np.int64], populations: Array, mean_lengths: Array,
    rng: np.random.Generator,
) -> Array:  # fmt: skip
    """The mean over a corpus of which every stratum was sampled.

    What a document takes grows with its length, and the mean length of a stratum is known: values are moved to it along
    a common slope, which is found anew in every draw.

    Args:
        values, lengths: `[n]`, of the documents drawn.
        strata: `[n]`, the stratum of each, from 0.
        populations, mean_lengths: `[strata]`, of all documents there.
        rng: draws the samples.
    """
    member = np.eye(len(populations))[strata]  # [n, strata]
    drawn = member.sum(0)
    weights = _weights(strata, populations, rng)
    count = np.maximum(weights @ member, 1e-12)  # [1 + _DRAWS, strata]
    y, x = (weights * values) @ member / count, (weights * lengths) @ member / count
    if (drawn - 1).sum() >= _LEAST and np.ptp(lengths) > 0:
        off = lengths - x[:, strata]
        squares = (weights * off**2).sum(1)
        slope = (weights * off * (values - y[:, strata])).sum(1) / np.where(squares > 0, squares, np.inf)
        slope = slope.clip(-2 * abs(slope[0]), 2 * abs(slope[0]))  # few documents, drawn again, may be of one length
        y += slope[:, None] * (mean_lengths - x)
    means = y @ (populations / populations.sum())
    if (drawn >= populations).all():
        return means[:1]
    return _spread(means, int((drawn - 1)[drawn < populations].sum()), rng)


def _weights(strata: NDArray[np.int64], populations: Array, rng: np.random.Generator) -> Array:
    """Weights of the sample's members, `[1 + _DRAWS, n]`: ones, then those of resampled samples."""
    weights = np.ones((1 + _DRAWS, len(strata)))
    for stratum, population in enumerate(populations):
        members = np.flatnonzero(strata == stratum)
        n = len(members)
        if n > 1:
            drawn = rng.multinomial(n - 1, np.full(n, 1 / n), _DRAWS) * (n / (n - 1))
            weights[1:, members] += math.sqrt(max(0.0, 1 - n / population)) * (drawn - 1)
    return weights


def _spread(draws: Array, degrees: int, rng: np.random.Generator) -> Array:
    """Draws with the tails of Student's t, on the logarithm: figures are positive and compared by their ratio."""
    value = draws[0]
    if value <= 0:
        return draws[:1]
    if degrees < 1:
        return np.r_[value, np.full(_DRAWS, np.nan)]
    power = np.sqrt(degrees / rng.chisquare(degrees, _DRAWS))
    return np.r_[value, value * np.exp(np.clip(np.log(np.maximum(draws[1:] / value, 0.05)) * power, -100, 100))]
