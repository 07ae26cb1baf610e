"""One factorisation of a source's second moments, from which every jump of that source is solved.

Coordinates are first divided by their root mean square, so that one of huge norm does not decide
what counts as small in the others. Then Cholesky; and where the matrix is singular to working
precision, an eigendecomposition with a cut-off, whose solution is the one of least norm in the
divided coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from layerjump.fit.sums import Source, constant


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
