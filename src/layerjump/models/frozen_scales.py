"""Run modules as affine maps around one state: scales of norms and slopes of activations stay as they are there.

A norm divides by a length that depends on the state, so its output is not a sum over what was added to the state. With
the length frozen at this state it is. The same holds for an activation f: with its slope f(x) / x frozen, it is a
multiplication. `linearize_at` returns the frozen map of any module as a gradient, so no kind of norm needs code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LENGTHS = {"rsqrt", "rsqrt_", "sqrt", "sqrt_", "norm", "vector_norm", "var", "std"}
_ACTIVATIONS = {"gelu", "relu", "relu_", "silu", "tanh", "tanh_", "sigmoid", "softplus", "elu", "leaky_relu", "mish"}


class FrozenScales(TorchFunctionMode):
    """A mode in which gradients treat the scales of norms and the slopes of activations as constants."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "layer_norm":
            return _layer_norm(*args, **kwargs)
        if name == "rms_norm":
            return _rms_norm(*args, **kwargs)
        output = func(*args, **kwargs)
        if name in _LENGTHS or (name in ("pow", "__pow__") and args[1] in (-0.5, 0.5)):
            return output.detach() if isinstance(output, Tensor) else output
        if name in _ACTIVATIONS and isinstance(args[0], Tensor):
            states, result = args[0], output.detach()
            slope = torch.where(states == 0, 0, result / states).detach()
            linear = states * slope
            return linear + (result - linear.detach())
        return output


def linearize_at(function: Callable[[Tensor], Tensor], state: Tensor, weights: Tensor) -> tuple[Tensor, float]:
    """The frozen map of ⟨weights, function(state)⟩ at one state (d,): its weights on the state, and its constant."""
    with torch.enable_grad(), FrozenScales():
        leaf = state.detach().clone().requires_grad_()
        output = function(leaf[None])[0]
        value = (output * weights.to(output)).sum()
        (gradient,) = torch.autograd.grad(value, leaf)
    return gradient, float(value.detach()) - float(gradient.double() @ leaf.detach().double())


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    centred = input - input.mean(-1, keepdim=True)
    output = centred * torch.rsqrt(centred.detach().square().mean(-1, keepdim=True) + eps)
    output = output if weight is None else output * weight
    return output if bias is None else output + bias


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    output = input * torch.rsqrt(input.detach().square().mean(-1, keepdim=True) + eps)
    return output if weight is None else output * weight
