"""Ridge regression. The strength may be chosen on other text, and that needs no second fit there.

Choosing and fitting are apart: one eigendecomposition of the source gives the error of every
strength for every target, cheaply; the map itself then comes from the same factorisation as least
squares, because eigenvectors of raw sums lose digits beside a coordinate of huge norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from layerjump.errors import BadEstimator, BadMoments
from layerjump.fit.affine import Affine
from layerjump.fit.factor import centred, cut_off
from layerjump.fit.sums import Source, Target, check

# Half-decades. The low end is least squares for all practical purposes; it lies so low because a
# few coordinates of huge variance raise the mean variance in which strengths are measured.
STRENGTHS: tuple[float, ...] = tuple(10.0 ** (k / 2) for k in range(-20, 5))


def ridge(
    source: Source,
    targets: Sequence[Target],
    *,
    strength: float | None = None,
    select: tuple[Source, Sequence[Target]] | None = None,
) -> list[Affine]:
    """The maps that minimise Σ‖Wx + b − y‖² + λ‖W‖², with λ = strength · mean variance of x · n.

    Give a strength; or give the sums of other text, and each pair takes the strength of the grid
    `STRENGTHS` whose map has the least squared error there. The map remembers its strength.
    """
    if strength is not None and select is None:
        strengths = [_checked(strength)] * len(targets)
    elif select is not None and strength is None:
        _check_select(select, source, targets)
        strengths = choose(source, targets, *select)
    else:
        raise BadEstimator("ridge wants either a strength or the sums of a select split.")
    factors = {chosen: centred(source, penalty=chosen * unit(source)) for chosen in set(strengths)}
    maps = []
    for target, chosen in zip(targets, strengths, strict=True):
        weight = factors[chosen].solve(target.cross).mT
        bias = target.mean - weight @ source.mean
        maps.append(Affine.of(weight, bias=bias, strength=chosen))
    return maps


def unit(source: Source) -> float:
    """What λ is at strength 1: n × the mean variance of x, so that strength itself has no unit."""
    return float(source.scatter.diagonal().mean())


def choose(
    source: Source, targets: Sequence[Target], other: Source, others: Sequence[Target]
) -> list[float]:
    """For each target, the strength of the grid with the least squared error on other text.

    The maps pass through the fit split's means, so the other text's sums are taken about those.
    """
    values, vectors = torch.linalg.eigh(source.scatter)
    keep = values > cut_off(values)
    V = vectors[:, keep]
    inverse = 1 / (values[keep] + unit(source) * values.new_tensor(STRENGTHS).unsqueeze(1))
    shift = other.mean - source.mean
    scatter = V.mT @ (other.scatter + other.n * torch.outer(shift, shift)) @ V
    chosen = []
    for target, held in zip(targets, others, strict=True):
        cross = held.cross + other.n * torch.outer(shift, held.mean - target.mean)
        errors = _errors(inverse, V.mT @ target.cross, scatter, V.mT @ cross)
        chosen.append(STRENGTHS[int(errors.argmin())])
    return chosen


def _errors(inverse: Tensor, fitted: Tensor, scatter: Tensor, cross: Tensor) -> Tensor:
    """Squared error on other text at every strength, up to a constant, all in the eigenbasis.

    At one strength the map is diag(f) fitted, f a row of `inverse`: the error is quadratic in f,
    and one product of d³ serves the whole grid.
    """
    quadratic = scatter * (fitted @ fitted.mT)
    linear = (fitted * cross).sum(1)
    return ((inverse @ quadratic) * inverse).sum(1) - 2 * (inverse @ linear)


def _checked(strength: float) -> float:
    if not (math.isfinite(strength) and strength >= 0):
        raise BadEstimator(f"strength is {strength}, but a finite number of at least 0 was wanted.")
    return float(strength)


def _check_select(
    select: tuple[Source, Sequence[Target]], source: Source, targets: Sequence[Target]
) -> None:
    other, others = select
    check(other, others)
    if len(others) != len(targets):
        raise BadEstimator(
            f"select holds {len(others)} targets, but there are {len(targets)} to fit. "
            "Give the same targets, in the same order, of both splits."
        )
    if [t.cross.shape for t in others] != [t.cross.shape for t in targets]:
        raise BadMoments(
            f"the widths of the two splits differ: select's source has {len(other.mean)} "
            f"coordinates, and the one to fit {len(source.mean)}; or their targets differ."
        )
