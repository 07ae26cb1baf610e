"""Least squares and ridge regression from second moments.

One factorisation of a source's second moments, from which every jump of that source is solved.

Coordinates are first divided by their root mean square, so that one of huge norm does not decide
what counts as small in the others. Then Cholesky; and where the matrix is singular to working
precision, an eigendecomposition with a cut-off, whose solution is the one of least norm in the
divided coordinates.

Ridge regression. The strength may be chosen on other text, and that needs no second fit there.

Choosing and fitting are apart: one eigendecomposition of the source gives the error of every
strength for every target, cheaply; the map itself then comes from the same factorisation as least
squares, because eigenvectors of raw sums lose digits beside a coordinate of huge norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerjump.errors import BadEstimator, BadMoments
from layerjump.jumps.maps import Affine
from layerjump.jumps.statistics import Source, Target, check, constant


@dataclass(frozen=True, eq=False)
class Exact:
    """S = D L Lᵀ D with a well-conditioned Cholesky factor L."""

    inverse_scale: Tensor  # (d,), the diagonal of D⁻¹
    lower: Tensor  # (d, d), L

    def solve(self, columns: Tensor) -> Tensor:
        """S⁻¹ @ columns."""
        scale = self.inverse_scale.unsqueeze(1)
        return torch.cholesky_solve(columns * scale, self.lower) * scale


@dataclass(frozen=True, eq=False)
class Truncated:
    """S⁺ = D⁻¹ B Bᵀ D⁻¹: B holds the directions that vary, each over the root of its eigenvalue."""

    inverse_scale: Tensor  # (d,), the diagonal of D⁻¹
    basis: Tensor  # (d, k), B

    def solve(self, columns: Tensor) -> Tensor:
        """The least-norm answer to S @ answer = columns, in the divided coordinates."""
        scale = self.inverse_scale.unsqueeze(1)
        return (self.basis @ (self.basis.mT @ (columns * scale))) * scale


Factor = Exact | Truncated


def centred(source: Source, *, penalty: float = 0.0) -> Factor:
    """Factorise Σ (x − x̄)(x − x̄)ᵀ + penalty · I, for maps with an intercept."""
    dead = constant(source.n, source.mean, source.scatter.diagonal())
    if penalty == 0:
        return factorise(source.scatter, dead, independent=source.n - 1)
    penalised = source.scatter.clone()
    penalised.diagonal().add_(penalty)
    return factorise(penalised, dead, independent=len(dead))


def uncentred(source: Source) -> Factor:
    """Factorise Σ x xᵀ, for maps without an intercept."""
    moments = source.scatter + source.n * torch.outer(source.mean, source.mean)
    return factorise(moments, moments.diagonal() <= 0, independent=source.n)


def factorise(matrix: Tensor, dead: Tensor, *, independent: int) -> Factor:
    """Factorise a second-moment matrix of `independent` rows; `dead` coordinates get weight 0."""
    tiny = torch.finfo(matrix.dtype).tiny
    inverse_scale = matrix.diagonal().clamp_min(tiny).rsqrt().masked_fill(dead, 0.0)
    unit = matrix * inverse_scale.unsqueeze(1) * inverse_scale
    # True already of the others, up to rounding; it cuts a dead coordinate loose from the rest.
    unit.fill_diagonal_(1.0)
    rank = independent + int(dead.sum())
    lower = _cholesky(unit) if rank >= len(unit) else None
    if lower is not None:
        return Exact(inverse_scale, lower)
    return Truncated(inverse_scale, _basis(unit, rank))


def cut_off(values: Tensor) -> Tensor:
    """The size up to which an eigenvalue of a PSD matrix is rounding; `values` are ascending.

    Such a matrix has no negative eigenvalue, so the most negative one found shows how large the
    error of the sums is (it matters when their products were formed in float32).
    """
    rounding = len(values) * torch.finfo(values.dtype).eps * values[-1]
    return torch.maximum(rounding, -2 * values[0])


def _cholesky(unit: Tensor) -> Tensor | None:
    """The Cholesky factor, or None where it fails or leans on directions that are rounding."""
    lower, info = torch.linalg.cholesky_ex(unit)
    limit = len(unit) * torch.finfo(unit.dtype).eps * torch.linalg.matrix_norm(unit)
    # Written so that a NaN from an overflowing solve counts as singular.
    regular = int(info) == 0 and bool(_least_eigenvalue(lower) > limit)
    return lower if regular else None


def _least_eigenvalue(lower: Tensor) -> Tensor:
    """Estimate, from above, the least eigenvalue of L Lᵀ: inverse power steps on a few vectors."""
    generator = torch.Generator(lower.device).manual_seed(0)
    probe = torch.randn(len(lower), 4, generator=generator, dtype=lower.dtype, device=lower.device)
    for _ in range(4):
        probe = torch.cholesky_solve(probe / torch.linalg.vector_norm(probe, dim=0), lower)
    return 1 / torch.linalg.vector_norm(probe, dim=0).max()


def _basis(unit: Tensor, rank: int) -> Tensor:
    """Eigenvectors over the root of their eigenvalues, of at most `rank` directions."""
    values, vectors = torch.linalg.eigh(unit)
    keep = values > cut_off(values)
    # n rows span n directions: whatever else looks like variation is rounding.
    keep[: max(0, len(unit) - rank)] = False
    return vectors[:, keep] * values[keep].rsqrt()


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
