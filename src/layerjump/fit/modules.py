"""Fitted maps as plain torch modules, and back again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from layerjump.fit.affine import Affine

FeatureKind = Literal["raw", "rms", "both"]
FEATURES: tuple[FeatureKind, ...] = get_args(FeatureKind)


def features(states: Tensor, kind: FeatureKind) -> Tensor:
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
        return features(states, self.kind)

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
