"""Linear maps: the fitted form, the torch modules that apply them, and their storage in fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from layerjump.models.sites import Pair

FeatureKind = Literal["raw", "rms", "both"]
FEATURES: tuple[FeatureKind, ...] = get_args(FeatureKind)


@dataclass(frozen=True, eq=False)
class Affine:
    """x ↦ W x + b. No factor: W is the identity. One: W itself. Two: W = up @ down."""

    shape: tuple[int, int]  # (dy, dx)
    factors: tuple[Tensor, ...] = ()
    bias: Tensor | None = None  # (dy,)
    strength: float | None = None  # ridge only: the regularisation strength, passed or chosen

    @classmethod
    def of(cls, *factors: Tensor, bias: Tensor | None = None, strength: float | None = None) -> Affine:
        """Make a map from its weight, or from the two thin factors of its weight."""
        shape = (factors[0].shape[0], factors[-1].shape[1])
        # Solvers return transposed views; files and kernels need contiguous rows.
        return cls(shape, tuple(factor.contiguous() for factor in factors), bias, strength)

    @property
    def weight(self) -> Tensor:
        """W, shape (dy, dx), multiplied out."""
        if len(self.factors) == 1:
            return self.factors[0]
        stored = self.factors if self.bias is None else (*self.factors, self.bias)
        device = stored[0].device if stored else None
        return self.linear(torch.eye(self.shape[1], dtype=torch.float64, device=device))

    @property
    def n_parameters(self) -> int:
        """The number of values the map stores; the identity stores none."""
        stored = self.factors if self.bias is None else (*self.factors, self.bias)
        return sum(tensor.numel() for tensor in stored)

    def to(self, dtype: torch.dtype) -> Affine:
        """Return the same map in another dtype."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, factors=tuple(factor.to(dtype) for factor in self.factors), bias=bias)

    def on(self, device: torch.device) -> Affine:
        """Return the same map on a device."""
        bias = None if self.bias is None else self.bias.to(device)
        return replace(self, factors=tuple(factor.to(device) for factor in self.factors), bias=bias)

    def times(self, factor: float) -> Affine:
        """Return the map whose outputs are `factor` times this one's."""
        first, *rest = self.factors
        bias = None if self.bias is None else self.bias * factor
        return replace(self, factors=(first * factor, *rest), bias=bias)

    def linear(self, columns: Tensor) -> Tensor:
        """Return W @ columns, thin factors first: for rank r this costs 2 d² r instead of d³."""
        for factor in reversed(self.factors):
            columns = factor @ columns
        return columns

    def __call__(self, x: Tensor) -> Tensor:
        """Map states (…, dx) to states (…, dy)."""
        for factor in reversed(self.factors):
            x = x @ factor.mT
        return x if self.bias is None else x + self.bias


@dataclass(frozen=True, eq=False)
class SolvedMap:
    """The map that an estimator computed for one pair."""

    pair: Pair
    jump: Affine
    features: FeatureKind
    """The features of the source states that it reads."""
    temperature: float | None = None
    """The factor that its outputs were multiplied by, where an estimator chooses one."""


def compute_features(states: Tensor, kind: FeatureKind) -> Tensor:
    """Return what a map reads of states h: h itself, h / rms(h), or the two concatenated."""
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
    """The identity, with its width."""

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
    """Return the module that applies a map to raw states, in float32 and without gradients."""
    steps: list[nn.Module] = [] if kind == "raw" else [Features(kind)]
    if affine.factors:
        up, *down = affine.factors
        steps += [_linear(factor, None) for factor in reversed(down)]
        steps.append(_linear(up, affine.bias))
    elif affine.bias is None:
        steps.append(Unchanged(affine.shape[1]))
    else:
        steps.append(Shift(affine.bias.float()))
    return steps[0] if len(steps) == 1 else nn.Sequential(*steps)


def to_affine(module: nn.Module) -> Affine:
    """Return the map inside a module of `to_module`, without its `Features` step."""
    children: Iterable[nn.Module] = module if isinstance(module, nn.Sequential) else [module]
    steps = [step for step in children if not isinstance(step, Features)]
    last = steps[-1]
    if isinstance(last, Unchanged):
        return Affine((last.width, last.width))
    if isinstance(last, Shift):
        return Affine((len(last.bias), len(last.bias)), bias=last.bias.detach())
    linears = [step for step in reversed(steps) if isinstance(step, nn.Linear)]
    bias = linears[0].bias
    return Affine.of(*(linear.weight.detach() for linear in linears), bias=None if bias is None else bias.detach())


def apply_map(jump: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    """Apply a map, a module in its own dtype and on its own device; return the result in those of the states."""
    weight = next(jump.parameters(), None) if isinstance(jump, nn.Module) else None
    return jump(states if weight is None else states.to(weight)).to(states)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    # On the meta device, because the weights exist already.
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.float().contiguous(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.float(), requires_grad=False)
    return linear


_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
STORAGES = (*_FLOATS, "int8")


class QuantizedMap(NamedTuple):
    """A map after a round trip through a storage type, and the bytes it took there."""

    affine: Affine
    n_bytes: int


def quantize_map(affine: Affine, storage: str) -> QuantizedMap:
    """Quantise a map to one of `STORAGES` and read it back in float64, with the rounding that this implies."""
    if dtype := _FLOATS.get(storage):
        return QuantizedMap(affine.to(dtype).to(torch.float64), dtype.itemsize * affine.n_parameters)
    if storage != "int8":
        raise ValueError(f"expected a storage of {', '.join(STORAGES)}, got {storage!r}")
    quantized = [quantize_int8(factor) for factor in affine.factors]
    factors = tuple(dequantize_int8(codes, scales) for codes, scales in quantized)
    n_bytes = sum(codes.nbytes + scales.nbytes for codes, scales in quantized)
    if affine.bias is None:
        return QuantizedMap(replace(affine, factors=factors), n_bytes)
    bias = affine.bias.float()  # as small as the scales, so it stays in float32
    return QuantizedMap(replace(affine, factors=factors, bias=bias.double()), n_bytes + bias.nbytes)


def quantize_int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes and each row's float32 scale: its largest entry becomes ±127."""
    scales = (matrix.abs().amax(1) / 127).float()
    safe = torch.where(scales > 0, scales, 1).to(matrix.dtype)
    codes = (matrix / safe[:, None]).round().clamp(-127, 127)
    return codes.to(torch.int8), scales


def dequantize_int8(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the matrix of codes and scales, in float64."""
    return codes.double() * scales.double()[:, None]
