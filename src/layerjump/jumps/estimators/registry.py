"""The registry of estimators.

Every estimator takes one source and many targets, so that all jumps that leave a site share one
factorisation of its second moments. `solve` checks the sums; the functions behind the rows trust
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerjump.errors import BadEstimator, BadMoments
from layerjump.jumps.estimators.least_squares import centred, ridge, uncentred
from layerjump.jumps.estimators.low_rank import low_rank, n_njtc
from layerjump.jumps.maps import Affine
from layerjump.jumps.statistics import Source, Target, check


def identity(source: Source, targets: Sequence[Target]) -> list[Affine]:
    """x itself: the logit lens."""
    return [Affine(_square(source, target)) for target in targets]


def mean_shift(source: Source, targets: Sequence[Target]) -> list[Affine]:
    """x moved by the difference of the means."""
    return [Affine(_square(source, target), bias=target.mean - source.mean) for target in targets]


def mat(source: Source, targets: Sequence[Target]) -> list[Affine]:
    """Least squares without an intercept: the map of "Jump to Conclusions" (arXiv 2303.09435).

    W = (Σ y xᵀ)(Σ x xᵀ)⁻¹, from sums that are not centred.
    """
    factor = uncentred(source)
    return [
        Affine.of(factor.solve(target.cross + source.n * torch.outer(source.mean, target.mean)).mT)
        for target in targets
    ]


def affine(source: Source, targets: Sequence[Target]) -> list[Affine]:
    """Least squares with an intercept, from centred sums."""
    factor = centred(source)
    return [_through_means(factor.solve(target.cross).mT, source, target) for target in targets]


def orthogonal(source: Source, targets: Sequence[Target]) -> list[Affine]:
    """The rotation or reflection, and shift, of least squared error (orthogonal Procrustes).

    W = U Vᵀ, where U and V are the singular vectors of Σ (y − ȳ)(x − x̄)ᵀ.
    """
    maps = []
    for target in targets:
        _square(source, target)
        U, _, Vh = torch.linalg.svd(target.cross.mT)
        maps.append(_through_means(U @ Vh, source, target))
    return maps


def _through_means(weight: Tensor, source: Source, target: Target) -> Affine:
    return Affine.of(weight, bias=target.mean - weight @ source.mean)


def _square(source: Source, target: Target) -> tuple[int, int]:
    dx, dy = len(source.mean), len(target.mean)
    if dx != dy:
        raise BadMoments(
            f"this estimator only maps a site to one of the same width, but the source has {dx} "
            f"coordinates and the target {dy}. Use `affine`, `mat`, `ridge` or `low-rank`."
        )
    return dy, dx


@dataclass(frozen=True)
class Estimator:
    """One way to turn sums into maps."""

    name: str
    fit: Callable[..., list[Affine]]
    meaning: str
    settings: tuple[str, ...] = ()
    square: bool = False  # only between sites of the same width
    selects: bool = False  # chooses a setting on the sums of a select split


_ROWS = (
    Estimator("identity", identity, "the state itself, unchanged (the logit lens)", square=True),
    Estimator("mean-shift", mean_shift, "the state, moved by the difference of means", square=True),
    Estimator("mat", mat, "least squares without an intercept, as in Jump to Conclusions"),
    Estimator("affine", affine, "least squares with an intercept"),
    Estimator(
        "ridge",
        ridge,
        "least squares with an intercept and a penalty on large weights",
        ("strength", "select"),
        selects=True,
    ),
    Estimator(
        "orthogonal", orthogonal, "the best rotation or reflection, and a shift", square=True
    ),
    Estimator(
        "low-rank",
        low_rank,
        "the best map through a bottleneck of the given rank, with an intercept",
        ("rank", "metric"),
    ),
    Estimator("n-njtc", n_njtc, "the best map of rank d // 100: a narrow jump, in closed form"),
)
ESTIMATORS: dict[str, Estimator] = {row.name: row for row in _ROWS}


def solve(
    name: str,
    source: Source,
    targets: Sequence[Target],
    *,
    select: tuple[Source, Sequence[Target]] | None = None,
    strength: float | None = None,
    rank: int | None = None,
    metric: Tensor | None = None,
) -> list[Affine]:
    """Fit the maps from one source to each of its targets with the estimator of that name.

    Settings that the estimator does not have are refused, not ignored.
    """
    if name not in ESTIMATORS:
        raise BadEstimator(f"there is no estimator {name!r}. Known: {', '.join(ESTIMATORS)}.")
    row = ESTIMATORS[name]
    given = {"select": select, "strength": strength, "rank": rank, "metric": metric}
    given = {setting: value for setting, value in given.items() if value is not None}
    for setting in given.keys() - set(row.settings):
        raise BadEstimator(f"{name} has no setting {setting!r}. Leave it out.")
    check(source, targets)
    return row.fit(source, targets, **given)
