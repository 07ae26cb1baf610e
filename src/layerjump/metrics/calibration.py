"""Calibration of predicted probabilities."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from layerjump.metrics.bootstrap import Floats

BINS = 10


def calibration_error(
    probability: ArrayLike, hit: ArrayLike, weight: ArrayLike | None = None, *, bins: int = BINS
) -> Floats:
    """Expected calibration error over the last axis: the distance of probabilities from hit rates.

    Σ_b |Σ_{i in b} w_i (hit_i − p_i)| / Σ w_i, with bins b of equal width. The weights, one for each
    example, are those of a bootstrap draw.
    """
    probability = np.asarray(probability, dtype=np.float64)
    n = probability.shape[-1]
    weight = np.ones(n) if weight is None else np.asarray(weight, dtype=np.float64)
    short = weight * (np.asarray(hit, dtype=np.float64) - probability)
    rows = short.reshape(-1, n)
    # A probability of 1 belongs to the last bin.
    of = np.minimum((probability.reshape(-1, n) * bins).astype(np.int64), bins - 1)
    cells = of + bins * np.arange(len(rows))[:, None]
    sums = np.bincount(cells.ravel(), rows.ravel(), minlength=bins * len(rows))
    total = np.abs(sums.reshape(len(rows), bins)).sum(1) / weight.sum()
    return total.reshape(probability.shape[:-1])


def marginal_kl(true: Tensor, other: Tensor) -> Tensor:
    """KL between the mean distributions of two predictors, in nats: the bias of the tuned-lens paper.

    `true` and `other` are (…, vocabulary): sums or means of probabilities over the same positions, the reference first.
    An unbiased lens may still be wrong everywhere.
    """
    p, q = (each.double() / each.double().sum(-1, keepdim=True) for each in (true, other))
    return (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum(-1).clamp_min(0)
