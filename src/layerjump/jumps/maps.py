"""Linear maps: the fitted form, and the torch modules that apply them.

The fitted map: frozen, callable, held in the form that costs least.

Fitted maps as plain torch modules, and back again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn


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


FeatureKind = Literal["raw", "rms", "both"]
FEATURES: tuple[FeatureKind, ...] = get_args(FeatureKind)


def compute_features(states: Tensor, kind: FeatureKind) -> Tensor:
    """What a map reads of states h: h itself, h / rms(h), or the two side by side."""
    if kind == "raw":
        return states
    # Squares of large half-precision states overflow.
    wide = states if states.dtype == torch.float64 else states.float()
    rms = wide.square().mean(-1, keepdim=True).sqrt()
    unit = (wide / rms.clamp_min(torch.finfo(wide.dtype).tiny)).to(states.dtype)
    return unit if kind == "rms" else torch.cat([states, unit], -1)


class Features(nn.Module):
    """The step before a map that does not read raw states."""

    def __init__(self, kind: FeatureKind) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, states: Tensor) -> Tensor:
        return compute_features(states, self.kind)

    def extra_repr(self) -> str:
        return self.kind


class Unchanged(nn.Identity):
    """The identity, which remembers its width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width


class Shift(nn.Module):
    """x ↦ x + b."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, states: Tensor) -> Tensor:
        return states + self.bias


def to_module(affine: Affine, kind: FeatureKind = "raw") -> nn.Module:
    """The module that applies a map to raw states, in float32 and without gradients."""
    steps = _steps(affine)
    if kind != "raw":
        steps = [Features(kind), *steps]
    return steps[0] if len(steps) == 1 else nn.Sequential(*steps)


def to_affine(module: nn.Module) -> Affine:
    """The map inside a module of `to_module`, without its `Features` step."""
    children: Iterable[nn.Module] = module if isinstance(module, nn.Sequential) else [module]
    steps = [step for step in children if not isinstance(step, Features)]
    last = steps[-1]
    if isinstance(last, Unchanged):
        return Affine((last.width, last.width))
    if isinstance(last, Shift):
        return Affine((len(last.bias), len(last.bias)), bias=last.bias.detach())
    linears = [step for step in reversed(steps) if isinstance(step, nn.Linear)]
    bias = linears[0].bias
    return Affine.of(
        *(linear.weight.detach() for linear in linears),
        bias=None if bias is None else bias.detach(),
    )


def _steps(affine: Affine) -> list[nn.Module]:
    """The map as modules in the order of use; the last one has the bias."""
    if not affine.factors:
        return [Unchanged(affine.shape[1]) if affine.bias is None else Shift(affine.bias.float())]
    up, *down = affine.factors
    return [*(_linear(factor, None) for factor in reversed(down)), _linear(up, affine.bias)]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    # Made without memory, because the weights are there already.
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.float().contiguous(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.float(), requires_grad=False)
    return linear


def apply_map(jump: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    """Apply a map, a module in its own dtype and on its own device; return the result in those of the states."""
    weight = next(jump.parameters(), None) if isinstance(jump, nn.Module) else None
    return jump(states if weight is None else states.to(weight)).to(states)
