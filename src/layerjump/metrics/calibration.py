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
    """Expected calibration error over the last axis: how far stated probabilities are from how often they come true.

    Σ_b |Σ_{i in b} w_i (hit_i − p_i)| / Σ w_i, where b are bins of equal width. Axes before the last are kept; the
    weight, one for each example, is that of a bootstrap draw.
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
    """KL between what two predictors say on average over positions, in nats: the bias of the tuned lens' paper.

    `true` and `other` are (…, vocabulary): sums or means of probabilities over the same positions, the reference first.
    A lens may be wrong everywhere and unbiased, but not biased and right.
    """
    p, q = (each.double() / each.double().sum(-1, keepdim=True) for each in (true, other))
    return (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum(-1).clamp_min(0)
