"""The fitted map: frozen, callable, held in the form that costs least."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Affine:
    """x ↦ W x + b. No factor: W is the identity. One: W itself. Two: W = up @ down."""

    shape: tuple[int, int]  # (dy, dx)
    factors: tuple[Tensor, ...] = ()
    bias: Tensor | None = None  # (dy,)
    strength: float | None = None  # ridge only: the strength used, given or chosen

    @classmethod
    def of(
        cls, *factors: Tensor, bias: Tensor | None = None, strength: float | None = None
    ) -> Affine:
        """Make a map from its weight, or from the two thin factors of its weight."""
        shape = (factors[0].shape[0], factors[-1].shape[1])
        # Solvers hand over transposed views; files and kernels want rows in order.
        return cls(shape, tuple(factor.contiguous() for factor in factors), bias, strength)

    @property
    def weight(self) -> Tensor:
        """W, shape (dy, dx), multiplied out."""
        if len(self.factors) == 1:
            return self.factors[0]
        return self.linear(torch.eye(self.shape[1], dtype=torch.float64))

    @property
    def n_parameters(self) -> int:
        """How many numbers the map stores; the identity stores none."""
        stored = self.factors if self.bias is None else (*self.factors, self.bias)
        return sum(tensor.numel() for tensor in stored)

    def to(self, dtype: torch.dtype) -> Affine:
        """The same map with its numbers held in a dtype."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, factors=tuple(factor.to(dtype) for factor in self.factors), bias=bias)

    def times(self, factor: float) -> Affine:
        """The map whose every output is so many times this one's."""
        first, *rest = self.factors
        bias = None if self.bias is None else self.bias * factor
        return replace(self, factors=(first * factor, *rest), bias=bias)

    def linear(self, columns: Tensor) -> Tensor:
        """W @ columns, thin factors first: for rank r this costs 2 d² r instead of d³."""
        for factor in reversed(self.factors):
            columns = factor @ columns
        return columns

    def __call__(self, x: Tensor) -> Tensor:
        """Map states (…, dx) to states (…, dy)."""
        for factor in reversed(self.factors):
            x = x @ factor.mT
        return x if self.bias is None else x + self.bias
