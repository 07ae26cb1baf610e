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
    """Mean over the last axis, and the ends of its 95 % interval (documents drawn with replacement)."""
    values = np.asarray(values, dtype=np.float64)
    _, inverse, counts = np.unique(np.asarray(documents), return_inverse=True, return_counts=True)
    starts = np.cumsum(counts) - counts
    sums = np.add.reduceat(values[..., np.argsort(inverse, kind="stable")], starts, axis=-1)
    weights = document_weights(len(counts), draws, seed)
    means = (sums @ weights.T) / (counts @ weights.T)
    low, high = np.quantile(means, [0.025, 0.975], axis=-1)
    return values.mean(-1), low, high


def statistic_interval(
    statistic: Callable[[Floats], float],
    documents: ArrayLike,
    *,
    draws: int = 200,
    seed: int = 0,
) -> tuple[float, float]:
    """The 95 % interval of any statistic of weighted examples: it is given each example's weight in a draw."""
    of, inverse = np.unique(np.asarray(documents), return_inverse=True)
    weights = document_weights(len(of), draws, seed)
    found = [statistic(draw[inverse]) for draw in weights]
    low, high = np.nanquantile(found, [0.025, 0.975]) if np.isfinite(found).any() else (np.nan,) * 2
    return float(low), float(high)


@lru_cache(maxsize=4)
def document_weights(n_documents: int, draws: int, seed: int) -> Floats:
    """How often each document comes up in each draw, (draws, documents); not to be changed, for it is kept."""
    generator = np.random.default_rng(seed)
    shares = np.full(n_documents, 1 / n_documents)
    weights = generator.multinomial(n_documents, shares, size=draws).astype(np.float64)
    weights.flags.writeable = False
    return weights
