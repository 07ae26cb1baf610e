"""Low-rank estimators: reduced-rank regression, N-NJTC and OJFA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from layerjump.errors import BadEstimator, argument
from layerjump.jumps.estimators.least_squares import Factor, eigenvalue_cutoff, factorise_centred
from layerjump.jumps.estimators.registry import Pooling, Settings
from layerjump.jumps.maps import Affine, SolvedMap
from layerjump.jumps.scoring import r2
from layerjump.jumps.statistics import Source, Target, check_moments, pool

if TYPE_CHECKING:
    from layerjump.jumps.collect import SplitMoments
    from layerjump.models.model import Model


def low_rank(source: Source, targets: Sequence[Target], *, rank: int, metric: Tensor | None = None) -> list[Affine]:
    """The maps of rank at most r, with an intercept, that minimise Σ‖G^½ (Wx + b − y)‖².

    W = G^-½ V Vᵀ G^½ W_ols, where V holds the r leading eigenvectors of G^½ (W_ols Σ W_olsᵀ) G^½.
    The metric G, (dy, dy) and positive semi-definite, weighs the errors of y: for a lens, by their
    effect on the logits. Default: the identity. Where G is singular its null space keeps y's mean.
    """
    for target in targets:
        _check_settings(rank, metric, target)
    factor = factorise_centred(source)
    roots = None if metric is None else _square_roots(metric)
    return [_reduce_rank(factor, source, target, rank, roots) for target in targets]


def truncate_rank(jump: Affine, rank: int, source: Source, target: Target) -> Affine:
    """Return the fit of a lower rank out of one by `low_rank` on the same moments: leading directions are nested."""
    up, down = jump.factors
    up, down = up[:, -rank:], down[-rank:]
    return Affine.of(up, down, bias=target.mean - up @ (down @ source.mean))


def n_njtc(source: Source, targets: Sequence[Target]) -> list[Affine]:
    """Maps of rank d // 100 with an intercept: the closed form of "N-NJTC" (arXiv 2409.14091).

    The paper normalises the input by batch statistics and trains by gradient descent. A
    least-squares fit with an intercept is the same map whether its input is shifted and rescaled
    or not, so no normalisation is needed here.
    """
    return low_rank(source, targets, rank=njtc_rank(len(source.mean)))


def njtc_rank(d: int) -> int:
    """Return the rank of the N-NJTC paper: d / 100 rounded down, and at least 1."""
    return max(1, d // 100)


def solve_ojfa(moments: SplitMoments, settings: Settings, model: Model | None = None) -> Iterator[SolvedMap]:
    """Yield one low-rank map, shared by all pairs of a run, for each of its pairs."""
    (target,) = {target for _, target in moments.fit.pairs}
    fit, validation = (
        [(split.source(site), split.target(site, target)) for site in moments.fit.sources]
        for split in (moments.fit, moments.validation)
    )
    jump, _ = ojfa(
        [source for source, _ in fit],
        [target for _, target in fit],
        rank=njtc_rank(moments.info.width) if settings.rank is None else settings.rank,
        validation=validation,
        pooling=settings.pooling or "pooled",
    )
    for pair in moments.fit.pairs:
        yield SolvedMap(pair, jump, moments.fit.features)


def ojfa(
    sources: Sequence[Source],
    targets: Sequence[Target],
    *,
    rank: int,
    validation: Sequence[tuple[Source, Target]] | None = None,
    pooling: Pooling = "best-level",
) -> tuple[Affine, int | None]:
    """Return one low-rank map for all levels, as in "OJFA" (arXiv 2504.13984), and the level it was fitted at.

    Level k's rows are in `sources[k]`, paired with the common target in `targets[k]`. The paper
    keeps the map of one level, picked by a criterion whose formula is not public, so both ways
    here are ours: "best-level" keeps the level's map with the best mean R² (uniform) over all
    levels of the validation split; "pooled" fits one map to the rows of all levels together (its
    level is None). Either way the intercept is shared.
    """
    if not sources or len(sources) != len(targets):
        raise BadEstimator(
            f"expected one source and one target for every level, got {len(sources)} sources and {len(targets)} targets"
        )
    if pooling == "pooled":
        source, target = pool(list(zip(sources, targets, strict=True)))
        return low_rank(source, [target], rank=rank)[0], None
    if pooling != "best-level":
        raise BadEstimator(f"expected {argument('pooling')} 'best-level' or 'pooled', got {pooling!r}")
    if not validation:
        raise BadEstimator("best-level needs the moments of a validation split to choose the level")
    jumps = []
    for source, target in zip(sources, targets, strict=True):
        check_moments(source, [target])
        jumps += low_rank(source, [target], rank=rank)
    scores = [sum(r2(jump, *pair).uniform for pair in validation) / len(validation) for jump in jumps]
    best = max(range(len(jumps)), key=scores.__getitem__)
    return jumps[best], best


def _reduce_rank(
    factor: Factor, source: Source, target: Target, rank: int, roots: tuple[Tensor, Tensor] | None
) -> Affine:
    weight = factor.solve(target.cross).mT
    explained = weight @ target.cross  # W Σ Wᵀ, because W Σ = crossᵀ at the optimum
    if roots is None:
        up = _leading_eigenvectors(explained, rank)
        down = up.mT @ weight
    else:
        root, inverse = roots
        basis = _leading_eigenvectors(root @ explained @ root, rank)
        up, down = inverse @ basis, (basis.mT @ root) @ weight
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


def _check_settings(rank: int, metric: Tensor | None, target: Target) -> None:
    dx, dy = target.cross.shape
    if not 1 <= rank <= min(dx, dy):
        raise BadEstimator(f"expected a {argument('rank')} from 1 to {min(dx, dy)} for a map {dx} → {dy}, got {rank}")
    if metric is None:
        return
    if tuple(metric.shape) != (dy, dy):
        raise BadEstimator(f"expected a metric of shape {(dy, dy)}, got {tuple(metric.shape)}")
    if not torch.isfinite(metric).all():
        raise BadEstimator("expected a finite metric, got one with NaN or infinite values")
