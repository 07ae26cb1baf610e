"""Products of states that are added to sums, without temporaries and without doing anything twice."""

import torch
from torch import Tensor

SQUARE_BLOCKS = 6
"""Blocks a side of a symmetric product: six save five twelfths of its arithmetic."""


def add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """Add xᵀy to a sum."""
    if x.dtype == total.dtype:
        total.addmm_(x.mT, y)  # without a temporary as large as the sum
    else:
        total += x.mT @ y


def add_square(total: Tensor, x: Tensor) -> None:
    """xᵀx is symmetric: what is below the diagonal is not added; `mirrored` gives it."""
    for start, end in _square_blocks(x.shape[1]):
        add_product(total[start:end, start:], x[:, start:end], x[:, start:])


def add_square_of_both(total: Tensor, rows: Tensor, shift: Tensor) -> None:
    """Add the square of [x, y], where x = h − s and y = h / rms(h) − t, in three quarters of the arithmetic.

    The quarter where they meet is symmetric but for sums of rows: with f = 1 / rms(h), y = f·x + f·s − t, so that
    Σ x yᵀ = Σ f·x xᵀ + (Σ f·x) sᵀ − (Σ x) tᵀ. Rows and sums must be float64: elsewhere h / rms(h) has been rounded,
    and the quarters would be of slightly different numbers.
    """
    width = rows.shape[1] // 2
    (x, y), (s, t) = rows.split(width, 1), shift.split(width)
    rms = (x + s).square().mean(1, keepdim=True).sqrt()
    f = torch.where(rms > 0, 1 / rms, 0)  # a state of zeros stays zeros
    add_square(total[:width, :width], x)
    add_square(total[width:, width:], y)
    meeting = torch.outer((x * f).sum(0), s) - torch.outer(x.sum(0), t)
    weighted = torch.zeros_like(meeting)
    add_square(weighted, x * f.sqrt())
    total[:width, width:] += meeting.add_(mirrored(weighted))


def mirrored(total: Tensor) -> Tensor:
    """The whole of a sum of which what is on and above the diagonal was added."""
    return total.triu() + total.triu(1).mT


def _square_blocks(width: int) -> list[tuple[int, int]]:
    step = -(-width // SQUARE_BLOCKS)
    return [(start, min(start + step, width)) for start in range(0, width, step)]
