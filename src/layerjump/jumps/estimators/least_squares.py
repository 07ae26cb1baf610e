"""Estimators by least squares, from second moments: identity, mean shift, mat, affine, ridge, orthogonal.

All jumps from one source are solved from one factorisation of its second moments. Coordinates are first divided by
their root mean square, so that one of huge norm does not decide what counts as small in the others. Then Cholesky; and
where the matrix is singular to working precision, an eigendecomposition with a cut-off, whose solution is the one of
least norm in the divided coordinates.

Estimators take centred moments of one source and many targets, and trust them: `registry.solve` checks them first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerjump.errors import BadEstimator, BadMoments, argument
from layerjump.jumps.maps import Affine
from layerjump.jumps.moments import Source, Target, check_moments, is_constant

# Half-decades. The low end is least squares for all practical purposes; it lies so low because a
# few coordinates of huge variance raise the mean variance in which strengths are measured.
STRENGTHS: tuple[float, ...] = tuple(10.0 ** (k / 2) for k in range(-20, 5))


MIN_GAIN = 3e-5
"""Share of the error that a step to a weaker penalty must save in `descend_strengths`."""


def identity(source: Source, targets: Sequence[Target]) -> Iterator[Affine]:
    """x itself: the logit lens."""
    for target in targets:
        yield Affine(_square_shape(source, target))


def mean_shift(source: Source, targets: Sequence[Target]) -> Iterator[Affine]:
    """x, shifted by the difference of the means."""
    for target in targets:
        yield Affine(_square_shape(source, target), bias=target.mean - source.mean)


def mat(source: Source, targets: Sequence[Target]) -> Iterator[Affine]:
    """Least squares without an intercept: the map of "Jump to Conclusions" (arXiv 2303.09435).

    W = (Σ y xᵀ)(Σ x xᵀ)⁻¹, from moments about zero.
    """
    factor = factorise_uncentred(source)
    for target in targets:
        yield Affine.of(factor.solve(target.cross + source.n * torch.outer(source.mean, target.mean)).mT)


def affine(source: Source, targets: Sequence[Target]) -> Iterator[Affine]:
    """Least squares with an intercept, from centred moments."""
    factor = factorise_centred(source)
    for target in targets:
        yield _through_means(factor.solve(target.cross).mT, source, target)


def orthogonal(source: Source, targets: Sequence[Target]) -> Iterator[Affine]:
    """The rotation or reflection, and shift, of least squared error (orthogonal Procrustes).

    W = U Vᵀ, where U and V are the singular vectors of Σ (y − ȳ)(x − x̄)ᵀ.
    """
    for target in targets:
        _square_shape(source, target)
        U, _, Vh = torch.linalg.svd(target.cross.mT)
        yield _through_means(U @ Vh, source, target)


def ridge(
    source: Source,
    targets: Sequence[Target],
    *,
    strength: float | None = None,
    validation: tuple[Source, Sequence[Target]] | None = None,
) -> Iterator[Affine]:
    """The maps that minimise Σ‖Wx + b − y‖² + λ‖W‖², with λ = strength · n · mean variance of x.

    Pass a strength; or pass the moments of a validation split, and each pair takes the strength of the grid
    `STRENGTHS` whose map has the least squared error there. The map records its strength.

    Choosing and fitting are separate: one eigendecomposition of the source gives the error of every strength for every
    target; the map itself then comes from the same factorisation as least squares, because eigenvectors of unscaled
    moments lose digits next to a coordinate of huge norm.
    """
    if strength is not None and validation is None:
        if not (math.isfinite(strength) and strength >= 0):
            raise BadEstimator(f"expected a finite {argument('strength')} of at least 0, got {strength}")
        strengths = [float(strength)] * len(targets)
    elif validation is not None and strength is None:
        held_source, held_targets = validation
        check_moments(held_source, held_targets)
        if len(held_targets) != len(targets):
            raise BadEstimator(
                f"expected {len(targets)} targets in the validation split, got {len(held_targets)}; "
                "pass the same targets, in the same order, of both splits"
            )
        if [t.cross.shape for t in held_targets] != [t.cross.shape for t in targets]:
            raise BadMoments(
                f"the widths of the two splits differ: the validation source has {len(held_source.mean)} "
                f"coordinates, and the one to fit {len(source.mean)}; or their targets differ"
            )
        strengths = choose_strengths(source, targets, held_source, held_targets)
    else:
        raise BadEstimator("ridge needs a strength or the moments of a validation split, and not both")
    factors: dict[float, Factor] = {}
    for index, value in enumerate(strengths):
        if value not in factors:
            factors[value] = factorise_centred(source, penalty=value * strength_unit(source))
        # A factor is released with the last target that takes its strength.
        factor = factors[value] if value in strengths[index + 1 :] else factors.pop(value)
        target = targets[index]
        yield _through_means(factor.solve(target.cross).mT, source, target, strength=value)


def strength_unit(source: Source) -> float:
    """λ at strength 1: n × the mean variance of x, so that strengths have no unit."""
    return float(source.scatter.diagonal().mean())


def choose_strengths(
    source: Source, targets: Sequence[Target], held_source: Source, held_targets: Sequence[Target]
) -> list[float]:
    """For each target, return the strength of the grid with the least squared error on held-out text.

    The maps pass through the fit split's means, so the held-out moments are taken about those.
    """
    values, vectors = torch.linalg.eigh(source.scatter)
    keep = values > eigenvalue_cutoff(values)
    V = vectors[:, keep]
    # Row k of `inverse` is the diagonal of the penalised inverse at strength k, in the eigenbasis.
    inverse = 1 / (values[keep] + strength_unit(source) * values.new_tensor(STRENGTHS).unsqueeze(1))
    shift = held_source.mean - source.mean
    scatter = V.mT @ (held_source.scatter + held_source.n * torch.outer(shift, shift)) @ V
    strengths = []
    for target, held in zip(targets, held_targets, strict=True):
        cross = held.cross + held_source.n * torch.outer(shift, held.mean - target.mean)
        fitted, held_cross = V.mT @ target.cross, V.mT @ cross
        # The error is quadratic in a row of `inverse`: one product of d³ serves the whole grid.
        quadratic = scatter * (fitted @ fitted.mT)
        linear = (fitted * held_cross).sum(1)
        errors = ((inverse @ quadratic) * inverse).sum(1) - 2 * (inverse @ linear)
        strengths.append(STRENGTHS[int(errors.argmin())])
    return strengths


def descend_strengths(error: Callable[[float], float], start: int | None = None) -> int:
    """Return the index in `STRENGTHS` of the least error, by steps downhill: few strengths are tried.

    `start` is a guess, such as the strength of similar features. The error falls and then rises along the grid, but for
    noise; a local minimum ends the search. A weaker penalty must lower the error by 3e-5 of it: with it weights grow,
    and their rounding in float32.
    """
    errors: dict[int, float] = {}

    def error_at(index: int) -> float:
        if index not in errors:
            errors[index] = error(STRENGTHS[index])
        return errors[index] + (MIN_GAIN * abs(errors[index]) if index < best else 0.0)

    best = len(STRENGTHS) // 2 if start is None else start
    for step in (4, 2, 1) if start is None else (2, 1):
        while True:
            around = [index for index in (best, best - step, best + step) if 0 <= index < len(STRENGTHS)]
            lowest = min(around, key=error_at)
            if lowest == best:
                break
            best = lowest
    return best


@dataclass(frozen=True, eq=False)
class CholeskyFactor:
    """S = D L Lᵀ D with a well-conditioned Cholesky factor L."""

    inverse_scale: Tensor  # (d,), the diagonal of D⁻¹
    lower: Tensor  # (d, d), L

    def solve(self, columns: Tensor) -> Tensor:
        """Return S⁻¹ @ columns."""
        scale = self.inverse_scale.unsqueeze(1)
        solution = torch.cholesky_solve(columns * scale, self.lower)
        solution *= scale
        return solution


@dataclass(frozen=True, eq=False)
class TruncatedFactor:
    """S⁺ = D⁻¹ B Bᵀ D⁻¹: B holds the directions that vary, each divided by the root of its eigenvalue."""

    inverse_scale: Tensor  # (d,), the diagonal of D⁻¹
    basis: Tensor  # (d, k), B

    def solve(self, columns: Tensor) -> Tensor:
        """Return the least-norm solution of S @ solution = columns, in the divided coordinates."""
        scale = self.inverse_scale.unsqueeze(1)
        return (self.basis @ (self.basis.mT @ (columns * scale))) * scale


Factor = CholeskyFactor | TruncatedFactor


def factorise_centred(source: Source, *, penalty: float = 0.0) -> Factor:
    """Factorise Σ (x − x̄)(x − x̄)ᵀ + penalty · I, for maps with an intercept."""
    dead = is_constant(source.n, source.mean, source.scatter.diagonal())
    n_independent = source.n - 1 if penalty == 0 else len(dead)
    return factorise(source.scatter, dead, n_independent=n_independent, penalty=penalty)


def factorise_uncentred(source: Source) -> Factor:
    """Factorise Σ x xᵀ, for maps without an intercept."""
    gram = source.scatter + source.n * torch.outer(source.mean, source.mean)
    return factorise(gram, gram.diagonal() <= 0, n_independent=source.n)


def factorise(matrix: Tensor, dead: Tensor, *, n_independent: int, penalty: float = 0.0) -> Factor:
    """Factorise a second-moment matrix of `n_independent` rows plus `penalty` · I; `dead` coordinates get weight 0."""
    tiny = torch.finfo(matrix.dtype).tiny
    # A penalty changes the diagonal alone, which is 1 after the division.
    inverse_scale = (matrix.diagonal() + penalty).clamp_min(tiny).rsqrt().masked_fill(dead, 0.0)
    unit = matrix * inverse_scale.unsqueeze(1)
    unit *= inverse_scale
    # Exact for the live coordinates up to rounding; it decouples a dead coordinate from the others.
    unit.fill_diagonal_(1.0)
    rank = n_independent + int(dead.sum())
    if rank >= len(unit):
        lower, info = torch.linalg.cholesky_ex(unit)
        limit = len(unit) * torch.finfo(unit.dtype).eps * torch.linalg.matrix_norm(unit)
        # The least eigenvalue, estimated from above by inverse power steps on a few vectors.
        generator = torch.Generator(lower.device).manual_seed(0)
        probe = torch.randn(len(lower), 4, generator=generator, dtype=lower.dtype, device=lower.device)
        for _ in range(4 if int(info) == 0 else 0):
            probe = torch.cholesky_solve(probe / torch.linalg.vector_norm(probe, dim=0), lower)
        # Written so that a NaN from an overflowing solve counts as singular.
        if int(info) == 0 and bool(1 / torch.linalg.vector_norm(probe, dim=0).max() > limit):
            return CholeskyFactor(inverse_scale, lower)
    values, vectors = torch.linalg.eigh(unit)
    keep = values > eigenvalue_cutoff(values)
    # n rows span n directions: anything else that looks like variation is rounding.
    keep[: max(0, len(unit) - rank)] = False
    return TruncatedFactor(inverse_scale, vectors[:, keep] * values[keep].rsqrt())


def eigenvalue_cutoff(values: Tensor) -> Tensor:
    """Return the size up to which an eigenvalue of a PSD matrix is rounding; `values` are ascending.

    Such a matrix has no negative eigenvalue, so the most negative one shows how large the error of
    the sums is (it matters when their products were formed in float32).
    """
    rounding = len(values) * torch.finfo(values.dtype).eps * values[-1]
    return torch.maximum(rounding, -2 * values[0])


def _through_means(weight: Tensor, source: Source, target: Target, *, strength: float | None = None) -> Affine:
    return Affine.of(weight, bias=target.mean - weight @ source.mean, strength=strength)


def _square_shape(source: Source, target: Target) -> tuple[int, int]:
    dx, dy = len(source.mean), len(target.mean)
    if dx != dy:
        raise BadMoments(
            f"this estimator needs sites of the same width, but the source has {dx} coordinates and the target {dy}; "
            f"use affine, mat, ridge or low-rank"
        )
    return dy, dx
