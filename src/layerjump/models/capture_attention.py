"""Record the attention weights and values of one position while a model runs.

    with AttentionPatterns(position) as patterns:
        model.hf(input_ids)
    patterns.find(heads)                              # the attention whose output, at the position, these heads are

Fused attention returns no weights, and models hold values under many names. So the calls themselves are watched:
`scaled_dot_product_attention`, or a softmax whose result multiplies the values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_HANDED_ON = {"dropout", "to", "type", "type_as", "float", "half", "bfloat16", "contiguous", "getitem", "__getitem__"}
_PRODUCTS = {"matmul", "__matmul__", "bmm"}


@dataclass(frozen=True, eq=False)
class AttentionPattern:
    """The attention of one position in one call: the heads' outputs are the sums of their weighted values."""

    weights: Tensor
    """(heads, source positions)."""
    values: Tensor
    """(heads, source positions, head width)."""

    @property
    def outputs(self) -> Tensor:
        """(heads, head width)."""
        return (self.weights[..., None] * self.values).sum(1)


class AttentionPatterns(TorchFunctionMode):
    """The patterns of one position, of every attention call while the mode is active; the batch has one row."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self.position = position
        self.patterns: list[AttentionPattern] = []
        self._softmaxes: dict[int, Tensor] = {}

    def find(self, heads: Tensor, n_heads: int) -> AttentionPattern | None:
        """The pattern whose outputs are these (heads · head width); None if no call that was seen computed them."""
        expected = heads.reshape(n_heads, -1).double()
        scale = expected.abs().max().clamp_min(1e-12)
        tolerance = 1e-3 if heads.dtype in (torch.float32, torch.float64) else 5e-2
        for pattern in self.patterns:
            outputs = pattern.outputs.to(expected)
            if outputs.shape == expected.shape and (outputs - expected).abs().max() <= tolerance * scale:
                return pattern
        return None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        output = func(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            self._record_fused(*args, **kwargs)
        elif isinstance(output, Tensor) and self._is_softmax(name, args, output):
            self._softmaxes[id(output)] = output
        elif name in _PRODUCTS and id(args[0]) in self._softmaxes:
            self._record(args[0], args[1])
        return output

    def _is_softmax(self, name: str, args: tuple[Any, ...], output: Tensor) -> bool:
        if name == "softmax":
            return output.dim() in (3, 4)
        return name in _HANDED_ON and bool(args) and id(args[0]) in self._softmaxes

    def _record(self, weights: Tensor, values: Tensor) -> None:
        if weights.dim() == 4:
            weights, values = weights[0], values[0]
        if values.dim() == 3 and self.position < weights.shape[1] and weights.shape[2] == values.shape[1]:
            values = values.repeat_interleave(len(weights) // len(values), 0)
            self.patterns.append(AttentionPattern(weights[:, self.position].detach(), values.detach()))

    def _record_fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        if query.dim() != 4 or self.position >= query.shape[2]:
            return
        n_heads = query.shape[1]
        keys, values = (x[0].repeat_interleave(n_heads // x.shape[1], 0) for x in (key, value))
        rows = query[0, :, self.position, None]
        scores = (rows @ keys.mT)[:, 0] * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            scores[:, self.position + 1 :] = -torch.inf
        if attn_mask is not None:
            row = attn_mask.expand(*attn_mask.shape[:2], query.shape[2], keys.shape[1])[0, :, self.position]
            scores = scores.masked_fill(~row, -torch.inf) if row.dtype == torch.bool else scores + row
        self.patterns.append(AttentionPattern(scores.softmax(-1).detach(), values.detach()))
