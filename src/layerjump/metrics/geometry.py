"""Linearity, similarity and dimension of hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_FITTED = 0.9  # TwoNN fits nine tenths of the ratios: the largest ones are outliers
_ROWS_AT_ONCE = 64  # of every level, in float64
_SAME = 1e-5  # of the typical norm: closer than this, rows differ by rounding alone


def chance_floor(width: int, n: int) -> float:
    """The R² of in-sample least squares with an intercept on pure noise: d / (n − 1)."""
    return min(1.0, width / (n - 1)) if n > 1 else 1.0


def angles(states: Sequence[Tensor]) -> Tensor:
    """Mean angular distance arccos(cos)/π between the same rows at every two levels, (levels, levels)."""
    total = torch.zeros(len(states), len(states), dtype=torch.float64)
    for rows in zip(*(state.split(_ROWS_AT_ONCE) for state in states), strict=True):
        unit = torch.stack([torch.nn.functional.normalize(row.double(), dim=-1) for row in rows])
        cosine = torch.einsum("and,bnd->abn", unit, unit).clamp(-1, 1)
        total += cosine.arccos().sum(-1)
    return total / (torch.pi * len(states[0]))


def jump_strength(steps: Sequence[float]) -> float:
    """The last step's angle divided by the mean of the others: our definition, because the papers' is not public."""
    before = steps[:-1]
    return steps[-1] / (sum(before) / len(before)) if before and sum(before) else float("nan")


def anisotropy(scatter: Tensor) -> float:
    """The share of the variance that lies along one direction, from centred sums Σ (x − x̄)(x − x̄)ᵀ."""
    total = float(scatter.diagonal().sum())
    return float(torch.linalg.eigvalsh(scatter)[-1]) / total if total > 0 else float("nan")


def intrinsic_dimension(states: Tensor) -> float:
    """TwoNN: from the ratio of the distances to the second and the first nearest neighbour of every row.

    F(μ) = 1 − μ^(−dimension), fitted through the origin in logarithms. Rows that coincide are counted once: two texts
    that begin alike have the same states there, up to rounding that depends on the batch.
    """
    rows = states.double()
    distance = torch.cdist(rows, rows)
    same = distance <= _SAME * rows.norm(dim=-1).median()
    once = ~same.tril(-1).any(1)
    distance = distance[once][:, once]
    if len(distance) < 10:
        return float("nan")
    two = distance.topk(3, largest=False).values[:, 1:]
    ratio = (two[:, 1] / two[:, 0]).sort().values
    n_fitted = max(2, int(_FITTED * len(ratio)))
    share = torch.arange(1, len(ratio) + 1, dtype=torch.float64)[:n_fitted] / len(ratio)
    x, y = ratio[:n_fitted].log(), -torch.log1p(-share)
    return float((x @ y) / (x @ x)) if bool((x > 0).any()) else float("nan")
