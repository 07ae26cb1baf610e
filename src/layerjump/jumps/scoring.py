"""R² of maps and linearity of blocks, from held-out second moments.

How well a map does on other text, read off that text's sums: no states, no second pass.

How linear a block is, from the sums of its two levels: the scores of "Your Transformer is Secretly Linear".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from layerjump.errors import BadMoments
from layerjump.jumps.maps import Affine
from layerjump.jumps.statistics import Source, Target, check, constant


class R2(NamedTuple):
    """The coefficient of determination, averaged over coordinates in two ways."""

    uniform: float  # mean over coordinates of 1 − SS_res / SS_tot
    weighted: float  # 1 − Σ SS_res / Σ SS_tot


def residual(affine: Affine, source: Source, target: Target) -> Tensor:
    """Σ (Wx + b − y)² for every coordinate of y, shape (dy,).

    = diag(W Σ Wᵀ) − 2 diag(W cross) + spread + n (W x̄ + b − ȳ)²: one product of d³, less at low
    rank.
    """
    check(source, [target])
    if affine.shape != target.cross.mT.shape:
        raise BadMoments(
            f"the map goes {affine.shape[1]} → {affine.shape[0]}, but these sums pair "
            f"{target.cross.shape[0]} with {target.cross.shape[1]} coordinates."
        )
    both = affine.linear(source.scatter) - 2 * target.cross.mT
    varying = (both * affine.weight).sum(1) + target.spread
    return _with_shift(varying, affine(source.mean) - target.mean, source.n)


def r2(affine: Affine, source: Source, target: Target) -> R2:
    """R² of a map on the text of these sums.

    `uniform` is scikit-learn's `r2_score` with its default average. There a coordinate without
    variation scores 1 if it is hit exactly and 0 if not; sums know both only up to rounding, so
    here "without" and "exactly" mean within 1e-8 of its mean, root mean square. In `weighted` the
    error on such coordinates counts like any other; where nothing varies at all it is `uniform`.
    """
    return _average(residual(affine, source, target), source, target)


def r2_identity(source: Source, targets: Sequence[Target]) -> list[R2]:
    """R² of x itself as a prediction of each target: diagonals only, no product of matrices."""
    check(source, targets)
    own = source.scatter.diagonal()
    scores = []
    for target in targets:
        if target.cross.shape[0] != target.cross.shape[1]:
            raise BadMoments(
                "the identity maps a site to one of the same width, but the source has "
                f"{target.cross.shape[0]} coordinates and the target {target.cross.shape[1]}."
            )
        varying = own - 2 * target.cross.diagonal() + target.spread
        error = _with_shift(varying, source.mean - target.mean, source.n)
        scores.append(_average(error, source, target))
    return scores


def _with_shift(varying: Tensor, shift: Tensor, n: int) -> Tensor:
    # The first part is a difference of large sums: rounding may take it below the 0 it cannot pass.
    return varying.clamp_min(0) + n * shift.square()


def _average(error: Tensor, source: Source, target: Target) -> R2:
    still = constant(source.n, target.mean, target.spread)
    hit = constant(source.n, target.mean, error)
    ratio = error / torch.where(still, 1.0, target.spread)
    uniform = float(torch.where(still, hit.to(error.dtype), 1 - ratio).mean())
    total = float(target.spread.sum())
    return R2(uniform, uniform if bool(still.all()) else 1 - float(error.sum()) / total)
