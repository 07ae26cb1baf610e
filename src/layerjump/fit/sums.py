"""What closed-form fitting reads: centred sums of one site, and of one site paired with another.

All tensors are float64. Centred sums keep the small differences that uncentred ones lose beside a
large mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerjump.errors import BadMoments

# A standard deviation below this share of the mean counts as none. Float32 states cannot vary by
# less; and rounding of float64 ones, squared beside such a deviation, stays under every cut-off.
CONSTANT = 1e-8


@dataclass(frozen=True, eq=False)
class Source:
    """One site's side: count, mean and scatter of its states x."""

    n: int
    mean: Tensor  # (dx,)
    scatter: Tensor  # (dx, dx), Σ (x − x̄)(x − x̄)ᵀ


@dataclass(frozen=True, eq=False)
class Target:
    """What pairs a source with one target site, whose states are y."""

    mean: Tensor  # (dy,)
    cross: Tensor  # (dx, dy), Σ (x − x̄)(y − ȳ)ᵀ
    spread: Tensor  # (dy,), Σ (y − ȳ)², the diagonal only
    scatter: Tensor | None = None  # (dy, dy), where a study keeps it


def constant(n: int, mean: Tensor, spread: Tensor) -> Tensor:
    """Say which coordinates do not vary: standard deviation at most 1e-8 of the mean."""
    return spread <= n * (CONSTANT * mean).square()


def pool(pairs: Sequence[tuple[Source, Target]]) -> tuple[Source, Target]:
    """Combine the sums of several groups of rows into those of all rows together, exactly.

    Each group's scatter is about its own mean; moving it to the common mean adds n δδᵀ.
    """
    if not pairs:
        raise BadMoments("there is nothing to pool: give at least one pair of sums.")
    for source, target in pairs:
        check(source, [target])
    n = sum(source.n for source, _ in pairs)
    mean_x = _total([source.mean * (source.n / n) for source, _ in pairs])
    mean_y = _total([target.mean * (source.n / n) for source, target in pairs])
    moved = [recentre(source, target, mean_x, mean_y) for source, target in pairs]
    kept = [target.scatter for _, target in moved if target.scatter is not None]
    return Source(n, mean_x, _total([source.scatter for source, _ in moved])), Target(
        mean=mean_y,
        cross=_total([target.cross for _, target in moved]),
        spread=_total([target.spread for _, target in moved]),
        scatter=_total(kept) if len(kept) == len(pairs) else None,
    )


def recentre(
    source: Source, target: Target, mean_x: Tensor, mean_y: Tensor
) -> tuple[Source, Target]:
    """Take the same sums about other centres than the rows' own means."""
    dx, dy = source.mean - mean_x, target.mean - mean_y
    scatter = None if target.scatter is None else target.scatter + source.n * torch.outer(dy, dy)
    return Source(source.n, mean_x, source.scatter + source.n * torch.outer(dx, dx)), Target(
        mean=mean_y,
        cross=target.cross + source.n * torch.outer(dx, dy),
        spread=target.spread + source.n * dy.square(),
        scatter=scatter,
    )


def _total(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def check(source: Source, targets: Sequence[Target]) -> None:
    """Refuse sums that would give NaN or nonsense, and say which and why."""
    if source.n < 1:
        raise BadMoments(
            f"these sums hold {source.n} rows, and at least one is needed. "
            "Collect them over some text first."
        )
    dx = source.mean.numel()
    _check_tensor("the source's mean", source.mean, (dx,))
    _check_tensor("the source's scatter", source.scatter, (dx, dx))
    for i, target in enumerate(targets):
        _check_target(f"target {i}'s", target, dx)


def _check_target(whose: str, target: Target, dx: int) -> None:
    dy = target.mean.numel()
    _check_tensor(f"{whose} mean", target.mean, (dy,))
    _check_tensor(f"{whose} cross", target.cross, (dx, dy))
    _check_tensor(f"{whose} spread", target.spread, (dy,))
    if target.scatter is not None:
        _check_tensor(f"{whose} scatter", target.scatter, (dy, dy))


def _check_tensor(what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise BadMoments(
            f"{what} has shape {tuple(tensor.shape)}, but {shape} was wanted. "
            "Pair sums of the same source and target sites."
        )
    if tensor.dtype != torch.float64:
        raise BadMoments(f"{what} is {tensor.dtype}, but float64 was wanted. Convert the sums.")
    if not torch.isfinite(tensor).all():
        raise BadMoments(
            f"{what} holds NaN or infinite values. Some states were not finite when the sums were "
            "collected: load the model in float32 or bfloat16, and collect again."
        )
