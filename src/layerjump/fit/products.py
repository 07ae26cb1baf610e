"""Products of states that are added to sums, without temporaries and without doing anything twice."""

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


def mirrored(total: Tensor) -> Tensor:
    """The whole of a sum of which what is on and above the diagonal was added."""
    return total.triu() + total.triu(1).mT


def _square_blocks(width: int) -> list[tuple[int, int]]:
    step = -(-width // SQUARE_BLOCKS)
    return [(start, min(start + step, width)) for start in range(0, width, step)]
