"""Reduced-rank regression: the best map of a given rank, in closed form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from layerjump.errors import BadEstimator, argument
from layerjump.jumps.estimators.least_squares import eigenvalue_cutoff, factorise_centred
from layerjump.jumps.maps import Affine
from layerjump.jumps.moments import Source, Target


def low_rank(source: Source, targets: Sequence[Target], *, rank: int, metric: Tensor | None = None) -> Iterator[Affine]:
    """The maps of rank at most r, with an intercept, that minimise Σ‖G^½ (Wx + b − y)‖².

    W = G^-½ V Vᵀ G^½ W_ols, where V holds the r leading eigenvectors of G^½ (W_ols Σ W_olsᵀ) G^½.
    The metric G, (dy, dy) and positive semi-definite, weighs the errors of y: for a lens, by their
    effect on the logits. Default: the identity. Where G is singular its null space keeps y's mean.
    """
    for target in targets:
        dx, dy = target.cross.shape
        if not 1 <= rank <= min(dx, dy):
            largest = min(dx, dy)
            raise BadEstimator(f"expected a {argument('rank')} from 1 to {largest} for a map {dx} → {dy}, got {rank}")
        if metric is not None and tuple(metric.shape) != (dy, dy):
            raise BadEstimator(f"expected a metric of shape {(dy, dy)}, got {tuple(metric.shape)}")
    if metric is not None and not torch.isfinite(metric).all():
        raise BadEstimator("expected a finite metric, got one with NaN or infinite values")
    factor = factorise_centred(source)
    roots = None if metric is None else _square_roots(metric)
    for target in targets:
        weight = factor.solve(target.cross).mT
        explained = weight @ target.cross  # W Σ Wᵀ, because W Σ = crossᵀ at the optimum
        if roots is None:
            up = _leading_eigenvectors(explained, rank)
            down = up.mT @ weight
        else:
            root, inverse = roots
            basis = _leading_eigenvectors(root @ explained @ root, rank)
            up, down = inverse @ basis, (basis.mT @ root) @ weight
        yield Affine.of(up, down, bias=target.mean - up @ (down @ source.mean))


def truncate_rank(jump: Affine, rank: int, source: Source, target: Target) -> Affine:
    """Return the fit of a lower rank out of one by `low_rank` on the same moments: leading directions are nested."""
    up, down = jump.factors
    up, down = up[:, -rank:], down[-rank:]
    return Affine.of(up, down, bias=target.mean - up @ (down @ source.mean))


def _leading_eigenvectors(matrix: Tensor, rank: int) -> Tensor:
    """The eigenvectors of the `rank` largest eigenvalues, as columns."""
    _, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    return vectors[:, -rank:].clone()


def _square_roots(metric: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric square root of a PSD matrix, and its pseudo-inverse."""
    values, vectors = torch.linalg.eigh((metric + metric.mT).double() / 2)
    if values[0] < -1e-6 * values[-1].abs():
        raise BadEstimator(
            f"expected a positive semi-definite metric, such as EᵀE of an unembedding E, got one with the eigenvalue "
            f"{float(values[0]):g}"
        )
    keep = values > eigenvalue_cutoff(values)
    values, vectors = values[keep].sqrt(), vectors[:, keep]
    return (vectors * values) @ vectors.mT, (vectors / values) @ vectors.mT
