"""What a prediction costs: floating-point operations for one token, counted from the weights themselves.

A multiply and an add are two operations. Norms, activations and attention's products with earlier tokens, which grow
with the context and not with the weights, are not counted.
"""

from __future__ import annotations

from torch import nn

from layerjump.fit.modules import to_affine
from layerjump.inputs.models import Model


def block_flops(model: Model) -> list[int]:
    """The operations of each block."""
    return [_products(block) for block in model.anatomy.blocks]


def head_flops(model: Model) -> int:
    """The operations from level L to logits."""
    steps = [step for step in model.anatomy.final_steps if isinstance(step, nn.Module)]
    return sum(map(_products, steps)) + _products(model.anatomy.head)


def jump_flops(jump: nn.Module) -> int:
    """The operations of one jump: its products, not its bias."""
    return 2 * sum(factor.numel() for factor in to_affine(jump).factors)


def jump_bytes(jump: nn.Module) -> int:
    """The bytes of one jump as it is held."""
    return sum(parameter.nbytes for parameter in jump.parameters())


def _products(module: nn.Module) -> int:
    """Two operations for each entry of each matrix: every entry meets every token once."""
    return 2 * sum(weight.numel() for weight in module.parameters() if weight.dim() == 2)
