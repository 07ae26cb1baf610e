"""The parameters that a part of a block writes its output with, so that a map of the output can be folded into them.

Most parts end in one linear layer. The output of a mixture of experts is a weighted sum of the outputs of several: of
stacked weights (experts, d, width), and of a shared expert beside them. A parameter writes linearly if, for a random
matrix T along one of its axes,

    out(T W) − out(W) = (T − I) (out(W) − out(0)),

and the parameters that do so write the whole output if T in all of them gives T out(W), and zeros in all of them give
zero. Both are measured on the inputs that the part gets for random tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from layerjump.errors import BadModel
from layerjump.models.hooks import hidden_output
from layerjump.models.model import Model
from layerjump.models.self_check import TOLERANCE, sample
from layerjump.models.structure import Write

_ROWS = 32
"""Rows of random tokens: enough that every expert gets some."""


@dataclass(frozen=True, eq=False)
class OutputWeights:
    """The parameters that write a part's output, each with its axis of output coordinates."""

    weights: tuple[tuple[nn.Parameter, int], ...]
    bias: nn.Parameter | None = None
    """The one of them that is added to every output as it is; None if there is none."""

    @classmethod
    def of_layer(cls, layer: nn.Module) -> OutputWeights:
        """Those of one linear layer."""
        bias: nn.Parameter | None = getattr(layer, "bias", None)
        weight = (layer.get_parameter("weight"), 1 if isinstance(layer, Conv1D) else 0)
        return cls((weight,) if bias is None else (weight, (bias, 0)), bias)

    @torch.no_grad()
    def fold(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Fold a map T, c of the output into the weights: W becomes T W, and the bias b becomes T b + c."""
        for parameter, axis in self.weights:
            by_output = parameter.movedim(axis, -1)
            by_output.copy_(by_output.double() @ weight.to(parameter.device).double().mT)
        if bias is not None:
            if self.bias is None:
                raise BadModel("a map with a bias cannot be folded into a layer that has no bias")
            self.bias.copy_(self.bias.double() + bias.to(self.bias.device).double())

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter, _ in self.weights]


_FOUND: WeakKeyDictionary[nn.Module, dict[tuple[int, str], tuple[tuple[str, int], ...] | str]] = WeakKeyDictionary()
"""Model → (block, write) → names and axes of the weights, or why there are none."""


def output_weights(model: Model, block: int, write: Write) -> OutputWeights:
    """The parameters that write the output of a part of a block; `BadModel` tells why there are none."""
    if write.output_layer is not None:
        return OutputWeights.of_layer(model.structure.module(write.output_layer))
    cached = _FOUND.setdefault(model.hf, {})
    if (block, write.name) not in cached:
        cached[block, write.name] = _find(model, block, write)
    weights = cached[block, write.name]
    if isinstance(weights, str):
        raise BadModel(f"the {write.name} of block {block} of {model.model_type} {weights}")
    return OutputWeights(tuple((model.hf.get_parameter(name), axis) for name, axis in weights))


@torch.no_grad()
def _find(model: Model, block: int, write: Write) -> tuple[tuple[str, int], ...] | str:
    points = dict(model.structure.anatomy.blocks[block - 1].points)
    point = points.get(f"{write.name}_raw", points[f"{write.name}.out"])
    module, width = model.structure.module(point.path), model.d_model
    run = _recorded_call(model, module, point.call)
    if run is None:
        return "is not computed by a module that can be run by itself"
    before = run()
    if before.shape[-1] != width:
        return f"writes {before.shape[-1]} coordinates to a stream of {width}"
    scale, tolerance = float(before.abs().max()), TOLERANCE[before.dtype] * 10
    if not scale:
        return "writes nothing for random tokens"
    noise = torch.randn(width, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = torch.eye(width, dtype=torch.float64) + noise / width**0.5
    difference = (matrix - torch.eye(width, dtype=torch.float64)).to(before)

    def is_close(first: Tensor, second: Tensor) -> bool:
        return float((first - second).abs().max()) <= tolerance * scale

    shared = _shared_parameters(model)
    chosen: list[tuple[str, nn.Parameter, int]] = []
    for name, parameter in module.named_parameters():
        axes = [axis for axis, size in enumerate(parameter.shape) if size == width]
        if not axes or parameter.dim() > 3 or not parameter.is_floating_point():
            continue
        with _restored(parameter):
            parameter.zero_()
            without = run()
        if is_close(without, before):
            if float((without - before).abs().max()) == 0 and parameter.any():
                return f"does not use {name} for any of {before.numel() // width} random tokens"
            continue
        for axis in axes:
            with _restored(parameter):
                OutputWeights(((parameter, axis),)).fold(matrix)
                mapped = run()
            if is_close(mapped - before, (before - without) @ difference.mT):
                if id(parameter) in shared:
                    return f"shares {name} with another block"
                chosen.append((name, parameter, axis))
                break
    if not chosen:
        return "is not linear in any of its weights"
    with _restored(*(parameter for _, parameter, _ in chosen)):
        OutputWeights(tuple((parameter, axis) for _, parameter, axis in chosen)).fold(matrix)
        mapped = run()
        for _, parameter, _ in chosen:
            parameter.zero_()
        nothing = run()
    if not is_close(mapped, before @ matrix.to(before).mT) or not is_close(nothing, torch.zeros_like(nothing)):
        return f"is not written by {', '.join(name for name, _, _ in chosen)} alone"
    return tuple((f"{point.path}.{name}", axis) for name, _, axis in chosen)


def _recorded_call(model: Model, module: nn.Module, call: int) -> Callable[[], Tensor] | None:
    """Run a module again on what it gets when the model reads random tokens."""
    recorded: list[tuple[Any, Any]] = []

    def record(module: nn.Module, args: Any, kwargs: Any) -> None:
        recorded.append(copy.deepcopy((args, kwargs)))

    batch = sample(model, rows=_ROWS)
    handle = module.register_forward_pre_hook(record, with_kwargs=True)
    try:
        model.run_body(batch.input_ids, torch.ones_like(batch.attention_mask))
    finally:
        handle.remove()
    if len(recorded) <= call:
        return None
    args, kwargs = recorded[call]

    def run() -> Tensor:
        fresh_args, fresh_kwargs = copy.deepcopy((args, kwargs))  # a cache, or an addition in place
        return hidden_output(module(*fresh_args, **fresh_kwargs)).clone()

    return run


def _shared_parameters(model: Model) -> set[int]:
    """Parameters of more than one block."""
    seen: dict[int, int] = {}
    for block in model.structure.blocks:
        for parameter in block.parameters():
            seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    return {key for key, count in seen.items() if count > 1}


@contextmanager
def _restored(*parameters: Tensor) -> Iterator[None]:
    saved = [parameter.clone() for parameter in parameters]
    try:
        yield
    finally:
        for parameter, values in zip(parameters, saved, strict=True):
            parameter.copy_(values)
