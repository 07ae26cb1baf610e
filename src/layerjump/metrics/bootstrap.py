"""Confidence intervals by resampling documents."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

DRAWS = 1000

Floats = NDArray[np.float64]


def mean_interval(
    values: ArrayLike, documents: ArrayLike, *, draws: int = DRAWS, seed: int = 0
) -> tuple[Floats, Floats, Floats]:
    """The mean over the last axis and the ends of its 95 % bootstrap interval over documents."""
    values = np.asarray(values, dtype=np.float64)
    _, inverse, counts = np.unique(np.asarray(documents), return_inverse=True, return_counts=True)
    starts = np.cumsum(counts) - counts
    sums = np.add.reduceat(values[..., np.argsort(inverse, kind="stable")], starts, axis=-1)
    weights = document_weights(len(counts), draws, seed)
    means = (sums @ weights.T) / (counts @ weights.T)
    low, high = np.quantile(means, [0.025, 0.975], axis=-1)
    return values.mean(-1), low, high


def statistic_interval(
    statistic: Callable[[Floats], float], documents: ArrayLike, *, draws: int = 200, seed: int = 0
) -> tuple[float, float]:
    """The 95 % bootstrap interval of a statistic, a function of the weight of each example in a draw."""
    of, inverse = np.unique(np.asarray(documents), return_inverse=True)
    weights = document_weights(len(of), draws, seed)
    values = [statistic(draw[inverse]) for draw in weights]
    has_values = np.isfinite(values).any()
    low, high = np.nanquantile(values, [0.025, 0.975]) if has_values else (np.nan,) * 2
    return float(low), float(high)


@lru_cache(maxsize=4)
def document_weights(n_documents: int, draws: int, seed: int) -> Floats:
    """How often each document is in each draw, (draws, documents); cached, therefore read-only."""
    generator = np.random.default_rng(seed)
    shares = np.full(n_documents, 1 / n_documents)
    weights = generator.multinomial(n_documents, shares, size=draws).astype(np.float64)
    weights.flags.writeable = False
    return weights
