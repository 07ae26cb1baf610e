"""The parameters that a part of a block writes its output with, so that a map of the output can be folded into them.

Most parts end in one linear layer. The output of a mixture of experts is a weighted sum of the outputs of several: of
stacked weights (experts, d, width), and of a shared expert beside them. A parameter writes linearly if, for a random
matrix T along one of its axes,

    out(T W) − out(W) = (T − I) (out(W) − out(0)),

and the parameters that do so write the whole output if T in all of them gives T out(W), and zeros in all of them give
zero. Both are measured on the inputs that the part gets for random tokens.

`folded_output` is the part of a block that maps are folded into.
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
from layerjump.models.anatomy import Write
from layerjump.models.hooks import hidden_output
from layerjump.models.model import Model
from layerjump.models.self_check import TOLERANCE, sample
from layerjump.models.weight_forms import describe_storage, require_plain, shared_weights

_ROWS = 32
"""Rows of random tokens: enough that every expert gets some."""
_ROLES = {"ffn": "feed-forward", "attn": "attention", "mixer": "mixer", "xattn": "cross-attention", "aside": "last"}


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
            require_plain(parameter, "of a part's output")
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
    """The parameters that write the output of a part of a block; `BadModel` tells why there are none to edit."""
    if write.output_layer is not None:
        layer = model.structure.module(write.output_layer)
        require_editable(model, write.output_layer)
        return OutputWeights.of_layer(layer)
    cached = _FOUND.setdefault(model.hf, {})
    if (block, write.name) not in cached:
        cached[block, write.name] = _find(model, block, write)
    weights = cached[block, write.name]
    if isinstance(weights, str):
        raise BadModel(f"the {write.name} of block {block} of {model.model_type} {weights}")
    return OutputWeights(tuple((model.hf.get_parameter(name), axis) for name, axis in weights))


def require_editable(model: Model, *paths: str) -> None:
    """Raise `BadModel` unless the weights of these modules are plain, and of no other module besides."""
    shared = shared_weights(model.hf)
    for path in paths:
        for name, parameter in model.structure.module(path).named_parameters():
            require_plain(parameter, f"{path}.{name}")
            if id(parameter) in shared:
                raise BadModel(
                    f"the weight {path}.{name} is shared with another module, which an edit would change too"
                )


@torch.no_grad()
def _find(model: Model, block: int, write: Write) -> tuple[tuple[str, int], ...] | str:
    points = dict(model.structure.anatomy.blocks[block - 1].points)
    point = points.get(f"{write.name}_raw", points[f"{write.name}.out"])
    module, width = model.structure.module(point.path), model.d_model
    for name, parameter in module.named_parameters():
        if (storage := describe_storage(parameter)) is not None:
            return f"has the weight {name}, which {storage}, and only plain weights can be edited"
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

    shared = shared_weights(model.hf)
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
                    return f"shares {name} with another module"
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


@contextmanager
def _restored(*parameters: Tensor) -> Iterator[None]:
    saved = [parameter.clone() for parameter in parameters]
    try:
        yield
    finally:
        for parameter, values in zip(parameters, saved, strict=True):
            parameter.copy_(values)


def cannot_fold(model: Model) -> str | None:
    """Return why no map can be folded into the outputs of this model's blocks, or None if one can be."""
    model_type = model.model_type
    if model.task != "causal":
        return f"blocks of a {model.task} model do not add the feed-forward output to the stream unchanged"
    if any(block.call for block in model.structure.anatomy.blocks):
        return f"the blocks of {model_type} run several times, and a folded map would act each time"
    for block in range(1, model.n_blocks + 1):
        write = folded_write(model, block)
        if write is None:
            return f"the parts of {model_type} blocks are unknown, so no map can be folded into them"
        if write.is_normed_after or output_gain(model, block, write) is None:
            return (
                f"in {model_type} blocks a norm follows the {_ROLES[write.role]} output: no map can be folded through "
                f"a norm"
            )
        try:
            output_weights(model, block, write)
        except BadModel as error:
            return str(error)
    return None


def folded_write(model: Model, block: int) -> Write | None:
    """The write of a block that maps are folded into: its feed-forward's, or the last one where it has none.

    Nothing else in the block reads it.
    """
    writes = model.structure.writes(block)
    last_phase = max((write.phase for write in writes), default=0)
    writes = tuple(write for write in writes if write.phase == last_phase)
    return next((write for write in writes if write.role == "ffn"), writes[-1] if writes else None)


def folded_output(model: Model, block: int) -> tuple[str, OutputWeights, Tensor]:
    """The part of a block that maps are folded into: its output's site, its weights, and its gain.

    The block's output is the rest of the stream plus gain · the part's output; the gain is one for each coordinate.
    """
    write = folded_write(model, block)
    gain = None if write is None else output_gain(model, block, write)
    if write is None or gain is None:
        raise BadModel(cannot_fold(model) or f"no map can be folded into block {block}")
    return f"{write.name}.out", output_weights(model, block, write), gain


@torch.no_grad()
def output_gain(model: Model, block: int, write: Write, *, until: int | None = None) -> Tensor | None:
    """What multiplies each coordinate of a part's output on its way to the next level; None if that is no factor.

    `until` is the number of the block's steps to follow, fewer than all for a stream inside the block.
    """
    steps = model.structure.anatomy.blocks[block - 1].steps[:until]
    index = next(n for n, step in enumerate(steps) if step.kind == "add" and step.name == write.name)
    gain = torch.ones(model.d_model, dtype=torch.float64)
    for step in steps[index:]:
        if step.kind == "norm":
            return None
        if step.kind == "mul" or step is steps[index]:
            factor = model.structure.constant(step.factor)
            gain = gain * (factor.double().cpu().reshape(-1) if isinstance(factor, Tensor) else factor)
    return gain if bool(gain.ne(0).all()) else None
