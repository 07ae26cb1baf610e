"""How linear, how alike, how wide: functions of sums and of sampled states; they know no model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_KEPT = 0.9  # TwoNN fits the nearest nine tenths: the largest ratios are outliers


def chance_floor(width: int, n: int) -> float:
    """What in-sample least squares with an intercept scores on pure noise: d / (n − 1)."""
    return min(1.0, width / (n - 1)) if n > 1 else 1.0


def angles(states: Sequence[Tensor]) -> Tensor:
    """Mean angular distance arccos(cos)/π between the same rows at every two levels, (levels, levels)."""
    unit = torch.stack([torch.nn.functional.normalize(state.double(), dim=-1) for state in states])
    cosine = torch.einsum("and,bnd->abn", unit, unit).clamp(-1, 1)
    return cosine.arccos().mean(-1) / torch.pi


def jump_strength(steps: Sequence[float]) -> float:
    """The last step's angle over the mean of those before: ours, for the papers' formula is not public."""
    before = steps[:-1]
    return steps[-1] / (sum(before) / len(before)) if before and sum(before) else float("nan")


def anisotropy(scatter: Tensor) -> float:
    """The share of the variance that lies along one direction, from centred sums Σ (x − x̄)(x − x̄)ᵀ."""
    total = float(scatter.diagonal().sum())
    return float(torch.linalg.eigvalsh(scatter)[-1]) / total if total > 0 else float("nan")


def intrinsic_dimension(states: Tensor) -> float:
    """TwoNN: from the ratio of the distances to the second and the first nearest neighbour of every row.

    F(μ) = 1 − μ^(−dimension), fitted through the origin in logarithms. Rows that coincide are counted once.
    """
    rows = torch.unique(states.double(), dim=0)
    if len(rows) < 10:
        return float("nan")
    two = torch.cdist(rows, rows).topk(3, largest=False).values[:, 1:]
    ratio = (two[:, 1] / two[:, 0]).sort().values
    kept = max(2, int(_KEPT * len(ratio)))
    share = torch.arange(1, len(ratio) + 1, dtype=torch.float64)[:kept] / len(ratio)
    x, y = ratio[:kept].log(), -torch.log1p(-share)
    return float((x @ y) / (x @ x)) if bool((x > 0).any()) else float("nan")
