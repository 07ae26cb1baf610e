"""R² of maps and linearity of blocks, computed from held-out second moments: no states, no second pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from layerjump.errors import BadMoments
from layerjump.jumps.estimators.registry import solve
from layerjump.jumps.maps import Affine
from layerjump.jumps.moments import Moments, Source, Target, check_moments, is_constant
from layerjump.metrics.geometry import chance_floor
from layerjump.models.sites import Pair, Site

NEGLIGIBLE = 1e-12
"""Share of a block's output variance below which the variance of its update is rounding."""


class R2(NamedTuple):
    """The coefficient of determination, averaged over coordinates in two ways."""

    uniform: float  # mean over coordinates of 1 − SS_res / SS_tot
    weighted: float  # 1 − Σ SS_res / Σ SS_tot


def residual(affine: Affine, source: Source, target: Target) -> Tensor:
    """Return Σ (Wx + b − y)² for every coordinate of y, shape (dy,).

    = diag(W Σ Wᵀ) − 2 diag(W cross) + Σ (y − ȳ)² + n (W x̄ + b − ȳ)²: one product of d³, less at low rank.
    """
    check_moments(source, [target])
    if affine.shape != target.cross.mT.shape:
        raise BadMoments(
            f"the map goes {affine.shape[1]} → {affine.shape[0]}, but these moments pair {target.cross.shape[0]} with "
            f"{target.cross.shape[1]} coordinates"
        )
    affine = affine.on(source.mean.device)  # one map for all levels (OJFA) may be on another
    both = affine.linear(source.scatter) - 2 * target.cross.mT
    varying = (both * affine.weight.to(both.device)).sum(1) + target.sum_squares
    shift = affine(source.mean) - target.mean
    # `varying` is a difference of large sums: rounding may take it below 0.
    return varying.clamp_min(0) + source.n * shift.square()


def r2(affine: Affine, source: Source, target: Target) -> R2:
    """Return R² of a map on the text of these moments.

    `uniform` is scikit-learn's `r2_score` with its default average. There a coordinate without
    variation scores 1 if it is predicted exactly and 0 if not; moments know both only up to
    rounding, so here "without" and "exactly" mean within 1e-8 of its mean, root mean square. In
    `weighted` the error on such coordinates counts like any other; where nothing varies it is `uniform`.
    """
    return _average(residual(affine, source, target), source, target)


def r2_identity(source: Source, target: Target) -> R2:
    """Return R² of x itself as a prediction of y: diagonals only, no matrix product."""
    check_moments(source, [target])
    dx, dy = target.cross.shape
    if dx != dy:
        raise BadMoments(
            f"the identity needs sites of the same width, but the source has {dx} coordinates and the target {dy}"
        )
    varying = _update_sum_squares(source, target).clamp_min(0)
    return _average(varying + source.n * (source.mean - target.mean).square(), source, target)


def block_pair(level: int) -> Pair:
    """Return the levels before and after a block."""
    return Site(level), Site(level + 1)


def block_map(fit: Moments, level: int) -> Affine:
    """Return the regression with intercept over a block. Without the residual its error is the same: W − I."""
    pair = block_pair(level)
    return solve("affine", fit.source(pair[0]), [fit.target(*pair)])[0]


def block_scores(jump: Affine, fit: Moments, test: Moments, level: int) -> dict[str, float]:
    """Return the two linearity scores of "Your Transformer is Secretly Linear" in sample and held out.

    With them the identity's score and the chance floor. A block that adds only a constant scores 1.
    """
    pair = block_pair(level)
    scores: dict[str, float] = {}
    for name, moments in (("", fit), (" held out", test)):
        source, target = moments.source(pair[0]), moments.target(*pair)
        error, total = float(residual(jump, source, target).sum()), float(target.sum_squares.sum())
        update = float(_update_sum_squares(source, target).sum())
        is_constant_update = update <= NEGLIGIBLE * total
        scores[f"with residual{name}"] = explained_share(error, total)
        scores[f"without residual{name}"] = 1.0 if is_constant_update else explained_share(error, update)
        if moments is fit:
            scores["identity"] = explained_share(update, total)
            scores["chance floor"] = chance_floor(len(target.mean), fit.n)
    return scores


def explained_share(error: float, variation: float) -> float:
    """Return 1 − error / variation; 1 where nothing varies."""
    return 1 - error / variation if variation > 0 else 1.0


def _update_sum_squares(source: Source, target: Target) -> Tensor:
    """Σ ((y − x) − mean)² for every coordinate: the centred variation of what a block adds."""
    return source.scatter.diagonal() - 2 * target.cross.diagonal() + target.sum_squares


def _average(error: Tensor, source: Source, target: Target) -> R2:
    still = is_constant(source.n, target.mean, target.sum_squares)
    exact = is_constant(source.n, target.mean, error)
    ratio = error / torch.where(still, 1.0, target.sum_squares)
    uniform = float(torch.where(still, exact.to(error.dtype), 1 - ratio).mean())
    total = float(target.sum_squares.sum())
    return R2(uniform, uniform if bool(still.all()) else 1 - float(error.sum()) / total)
