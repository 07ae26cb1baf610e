"""Low-rank maps: reduced-rank regression, N-NJTC, OJFA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from layerjump.errors import BadEstimator
from layerjump.jumps.estimators.least_squares import Factor, centred, cut_off
from layerjump.jumps.maps import Affine
from layerjump.jumps.scoring import r2
from layerjump.jumps.statistics import Source, Target, check, pool


def low_rank(
    source: Source,
    targets: Sequence[Target],
    *,
    rank: int | None = None,
    metric: Tensor | None = None,
) -> list[Affine]:
    """The maps of rank at most r, with an intercept, that minimise Σ‖G^½ (Wx + b − y)‖².

    W = G^-½ V Vᵀ G^½ W_ols, where V holds the r leading eigenvectors of G^½ (W_ols Σ W_olsᵀ) G^½.
    The metric G, (dy, dy) and positive semi-definite, says which errors of y matter: for a lens,
    what the unembedding makes of them. Default: all alike. Where G is singular its null space
    keeps y's mean.
    """
    if rank is None:
        raise BadEstimator("low-rank wants a rank: how many directions may pass.")
    for target in targets:
        _check_settings(rank, metric, target)
    factor = centred(source)
    roots = None if metric is None else _roots(metric)
    return [_reduced(factor, source, target, rank, roots) for target in targets]


def truncate_rank(jump: Affine, rank: int, source: Source, target: Target) -> Affine:
    """The fit of a lower rank, out of one of `low_rank` on the same sums: leading directions are nested."""
    up, down = jump.factors
    up, down = up[:, -rank:], down[-rank:]
    return Affine.of(up, down, bias=target.mean - up @ (down @ source.mean))


def n_njtc(source: Source, targets: Sequence[Target]) -> list[Affine]:
    """Maps of rank d // 100 with an intercept: the closed form of "N-NJTC" (arXiv 2409.14091).

    The paper normalises the input by batch statistics and trains by gradient descent. A
    least-squares fit with an intercept is the same map whether its input is shifted and rescaled
    or not, so here the normalisation has nothing to do.
    """
    return low_rank(source, targets, rank=njtc_rank(len(source.mean)))


def _reduced(
    factor: Factor,
    source: Source,
    target: Target,
    rank: int,
    roots: tuple[Tensor, Tensor] | None,
) -> Affine:
    weight = factor.solve(target.cross).mT
    explained = weight @ target.cross  # W Σ Wᵀ, because W Σ = crossᵀ at the optimum
    if roots is None:
        up = _leading(explained, rank)
        down = up.mT @ weight
    else:
        root, inverse = roots
        basis = _leading(root @ explained @ root, rank)
        up, down = inverse @ basis, (basis.mT @ root) @ weight
    return Affine.of(up, down, bias=target.mean - up @ (down @ source.mean))


def _leading(matrix: Tensor, rank: int) -> Tensor:
    """The eigenvectors of the `rank` largest eigenvalues, as columns."""
    _, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    return vectors[:, -rank:].clone()


def _roots(metric: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric square root of a PSD matrix, and its pseudo-inverse."""
    values, vectors = torch.linalg.eigh((metric + metric.mT).double() / 2)
    if values[0] < -1e-6 * values[-1].abs():
        raise BadEstimator(
            f"the metric has the eigenvalue {float(values[0]):g}, but it must be positive "
            "semi-definite: EᵀE of an unembedding E, for example."
        )
    keep = values > cut_off(values)
    values, vectors = values[keep].sqrt(), vectors[:, keep]
    return (vectors * values) @ vectors.mT, (vectors / values) @ vectors.mT


def _check_settings(rank: int, metric: Tensor | None, target: Target) -> None:
    dx, dy = target.cross.shape
    if not 1 <= rank <= min(dx, dy):
        raise BadEstimator(
            f"rank is {rank}, but this map goes {dx} → {dy}: give a rank from 1 to {min(dx, dy)}."
        )
    if metric is None:
        return
    if tuple(metric.shape) != (dy, dy):
        raise BadEstimator(
            f"the metric has shape {tuple(metric.shape)}, but {(dy, dy)} was wanted."
        )
    if not torch.isfinite(metric).all():
        raise BadEstimator("the metric holds NaN or infinite values, but finite ones were wanted.")


def ojfa(
    sources: Sequence[Source],
    targets: Sequence[Target],
    *,
    rank: int,
    select: Sequence[tuple[Source, Target]] | None = None,
    how: Literal["best-level", "pooled"] = "best-level",
) -> tuple[Affine, int | None]:
    """One narrow jump for all levels, as "OJFA" (arXiv 2504.13984) has; and the level it is of.

    Level k's rows are in `sources[k]`, paired with the common target in `targets[k]`. The paper
    keeps the jump of one level, picked by a criterion whose formula is not public, so both ways
    here are ours: "best-level" keeps the level's own jump with the best mean R² (uniform) over all
    levels of the select split; "pooled" fits one jump to the rows of all levels together. Either
    way the intercept is shared.
    """
    if not sources or len(sources) != len(targets):
        raise BadEstimator(
            f"there are {len(sources)} sources and {len(targets)} targets, but one of each was "
            "wanted for every level."
        )
    if how == "pooled":
        source, target = pool(list(zip(sources, targets, strict=True)))
        return low_rank(source, [target], rank=rank)[0], None
    if how != "best-level":
        raise BadEstimator(f"how is {how!r}, but 'best-level' or 'pooled' was wanted.")
    if not select:
        raise BadEstimator("best-level wants the sums of a select split to choose the level by.")
    jumps = []
    for source, target in zip(sources, targets, strict=True):
        check(source, [target])
        jumps += low_rank(source, [target], rank=rank)
    best = max(range(len(jumps)), key=lambda k: _mean_r2(jumps[k], select))
    return jumps[best], best


def _mean_r2(jump: Affine, select: Sequence[tuple[Source, Target]]) -> float:
    return sum(r2(jump, source, target).uniform for source, target in select) / len(select)


class Parameters(NamedTuple):
    """What one jump of width d stores, in the forms of arXiv 2409.14091."""

    rank: int
    full: int  # d × d
    narrow: int  # two factors of rank d // 100
    normalised: int  # the factors, and scale and shift of a batch normalisation

    @property
    def reduction(self) -> float:
        """The share of the full map that the normalised narrow one saves."""
        return 1 - self.normalised / self.full


def njtc_rank(d: int) -> int:
    """The paper's rank, d / 100 rounded down, and at least 1."""
    return max(1, d // 100)


def njtc_parameters(d: int) -> Parameters:
    """Count the parameters of a full, a narrow and a normalised narrow jump of width d."""
    rank = njtc_rank(d)
    return Parameters(rank, d * d, 2 * d * rank, 2 * d * rank + 2 * d)
