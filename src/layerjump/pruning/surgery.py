"""Edit a model: drop blocks, fold maps into weights, rotate and scale the residual stream.

Folding and rotating are exact changes of coordinates. An RMSNorm is invariant to rotation and scale of its input. So
from some level on, the residual stream h may become c Q h: every matrix that writes to the stream is multiplied by c Q,
every matrix that reads it by Qᵀ (and by the norm's weight, which becomes one), and the unembedding by Qᵀ, for which it
must not share its weights with the embedding. A LayerNorm is invariant to scale alone, which leaves the unembedding as
it is. (Norms add a small ε to the variance, so a scale changes results by about that much.)
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from layerjump.errors import BadModel, LayerjumpError, one_line
from layerjump.models.discovery import discover, is_norm, is_rms_norm
from layerjump.models.families import text_config
from layerjump.models.model import Model
from layerjump.models.structure import Write, norm_factors
from layerjump.pruning.block_config import select_blocks
from layerjump.pruning.output_weights import OutputWeights, output_weights

BLOCK_INDEX_NAMES = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx")
"""Attributes with a module's block index, which selects its layer of the KV cache."""


def cannot_drop(model: Model) -> str | None:
    """Return why no block of this model can be dropped, or None if blocks can be."""
    model_type = model.model_type
    if model.task in ("seq2seq", "encoder"):
        return (
            f"{model_type} is an encoder–decoder, and only models with a single stack can be pruned; pass a decoder or "
            f"an encoder model"
        )
    if model.structure.block_list is None:
        return f"the blocks of {model_type} form groups that share weights, so none can be dropped; pass another model"
    if any(block.call for block in model.structure.anatomy.blocks):
        return f"the blocks of {model_type} run several times, so none can be dropped; pass another model"
    return None


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
        if write.is_normed_after or _gain(model, block, write) is None:
            return (
                f"in {model_type} blocks a norm follows the {_NAMES[write.role]} output: no map can be folded through "
                f"a norm"
            )
        try:
            output_weights(model, block, write)
        except BadModel as error:
            return str(error)
    return None


_NAMES = {"ffn": "feed-forward", "attn": "attention", "mixer": "mixer", "xattn": "cross-attention", "aside": "last"}


def cannot_rotate(model: Model) -> str | None:
    """Return why this model's residual stream cannot be rotated, or None if it can be."""
    if reason := cannot_fold(model):
        return reason
    model_type, structure = model.model_type, model.structure
    final_norm = structure.final_steps[0] if len(structure.final_steps) == 1 else None
    if not isinstance(final_norm, nn.Module) or not is_rms_norm(final_norm, model.d_model):
        return f"the norms of {model_type} subtract the mean, so its residual stream cannot be rotated"
    for block, anatomy in enumerate(structure.anatomy.blocks, start=1):
        if any(step.kind != "add" for step in anatomy.steps):
            return f"block {block} of {model_type} scales or shifts its residual stream, which cannot be rotated"
        points = dict(anatomy.points)
        for write in anatomy.writes:
            if write.output_layer is None or write.linear_readers is None or write.norm is None or write.reads_aside:
                return f"not all that reads or writes the stream in block {block} of {model_type} is a linear layer"
            if not isinstance(write.factor, float):
                return f"block {block} of {model_type} scales each coordinate of its {write.name} output"
            if not is_rms_norm(structure.module(points[f"{write.norm}.in"].path), model.d_model):
                return f"the norms of {model_type} subtract the mean, so its residual stream cannot be rotated"
    return None


def can_scale(model: Model) -> bool:
    """Return whether a scale of the residual stream has no effect if all that is added to it has the same scale.

    Every part and the unembedding must read the stream through a norm.
    """
    steps = model.structure.final_steps
    if not steps or not isinstance(steps[0], nn.Module) or not is_norm(steps[0], model.d_model):
        return False
    for block, anatomy in enumerate(model.structure.anatomy.blocks, start=1):
        if any(step.kind in ("shift", "norm") for step in anatomy.steps):
            return False
        for write in anatomy.writes:
            if not write.norm_first or write.is_normed_after or write.role == "aside":
                return False
            try:
                output_weights(model, block, write)
            except BadModel:
                return False
    return True


@torch.no_grad()
def without_blocks(model: Model, dropped: Collection[int]) -> Model:
    """Return a copy of the model without the dropped blocks, counted from 1."""
    if reason := cannot_drop(model):
        raise BadModel(reason)
    remaining = [block for block in range(1, model.n_blocks + 1) if block not in set(dropped)]
    # Dropped blocks are not copied.
    placeholders: dict[int, Any] = {id(model.structure.blocks[block - 1]): nn.Identity() for block in dropped}
    # States that a module keeps from its last forward pass are no parameters, and only those can be copied.
    states = [value for module in model.hf.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    placeholders |= {id(state): state.detach().clone() for state in states if not state.is_leaf}
    hf = copy.deepcopy(model.hf, placeholders)
    modules = [hf.get_submodule(anatomy.path) for anatomy in model.structure.anatomy.blocks]
    path, _, name = (model.structure.block_list or "").rpartition(".")
    setattr(hf.get_submodule(path), name, nn.ModuleList(modules[old - 1] for old in remaining))

    config = text_config(hf)
    try:
        if isinstance(config, PretrainedConfig) and dropped:
            select_blocks(config, remaining, model.n_blocks)
    except Exception as error:  # a configuration checks itself
        raise _cannot_do_without(model, dropped, error) from error

    for new, old in enumerate(remaining, start=1):
        for module in modules[old - 1].modules():
            for name in BLOCK_INDEX_NAMES:
                if isinstance(module.__dict__.get(name), int):
                    setattr(module, name, new - 1)
        if getattr(config, "scale_attn_by_inverse_layer_idx", False):
            # This GPT-2 divides attention scores by the block's number; queries compensate for the new number.
            attention: Any = modules[old - 1].get_submodule("attn")
            queries = slice(0, attention.embed_dim)
            attention.c_attn.weight[:, queries] *= new / old
            attention.c_attn.bias[queries] *= new / old
            attention.scaling *= old / new
    try:
        structure = discover(hf, extra_inputs=model.extra_inputs)
    except LayerjumpError as error:
        raise _cannot_do_without(model, dropped, error) from error
    return replace(model, hf=hf, structure=structure)


def _cannot_do_without(model: Model, dropped: Collection[int], error: Exception) -> BadModel:
    blocks = ", ".join(map(str, sorted(dropped)))
    return BadModel(
        f"{model.model_type} does not run without block {blocks}, on which other blocks depend: "
        f"{one_line(error.__cause__ or error)}; drop other blocks"
    )


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
    gain = None if write is None else _gain(model, block, write)
    if write is None or gain is None:
        raise BadModel(cannot_fold(model) or f"no map can be folded into block {block}")
    return f"{write.name}.out", output_weights(model, block, write), gain


@torch.no_grad()
def _gain(model: Model, block: int, write: Write) -> Tensor | None:
    """What multiplies each coordinate of a part's output on its way to the next level; None if that is no factor."""
    steps = model.structure.anatomy.blocks[block - 1].steps
    index = next(n for n, step in enumerate(steps) if step.kind == "add" and step.name == write.name)
    gain = torch.ones(model.d_model, dtype=torch.float64)
    for step in steps[index:]:
        if step.kind == "norm":
            return None
        if step.kind == "mul" or step is steps[index]:
            factor = model.structure.constant(step.factor)
            gain = gain * (factor.double().cpu().reshape(-1) if isinstance(factor, Tensor) else factor)
    return gain if bool(gain.ne(0).all()) else None


def _layers_reading_norms(model: Model, block: int) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    structure = model.structure
    points = dict(structure.anatomy.blocks[block - 1].points)
    # Parallel parts can share a norm.
    readers = {points[f"{w.norm}.in"].path: w.linear_readers or () for w in structure.writes(block)}
    for norm, paths in readers.items():
        yield structure.module(norm), [structure.module(path) for path in paths]


@torch.no_grad()
def fold_input_map(layer: nn.Module, weight: Tensor) -> None:
    """Fold a map T of a layer's input into the layer: W becomes W T."""
    matrix = _weight_matrix(layer)
    matrix.copy_(matrix.double() @ weight.to(matrix.device).double())


def _weight_matrix(layer: nn.Module) -> Tensor:
    """A view of a layer's weight, (outputs, inputs)."""
    weight = layer.get_parameter("weight")
    return weight.mT if isinstance(layer, Conv1D) else weight


@torch.no_grad()
def transform_stream(model: Model, level: int, rotation: Tensor | None, scale: float = 1.0) -> None:
    """Edit the weights so that the residual stream h from a level on becomes scale · rotation @ h."""
    identity = torch.eye(model.d_model, dtype=torch.float64)
    matrix = identity if rotation is None else rotation.double().cpu()
    for block in range(level + 1, model.n_blocks + 1):
        for write in model.structure.writes(block):
            output_weights(model, block, write).fold(scale * matrix)
        if rotation is not None:
            for norm, layers in _layers_reading_norms(model, block):
                norm_weight = absorb_norm_weight(norm)
                for layer in layers:
                    fold_input_map(layer, norm_weight[:, None] * matrix.mT)
    if rotation is not None:
        final_norm = model.structure.final_steps[0]
        if not isinstance(final_norm, nn.Module):
            raise BadModel("the stream cannot be rotated without a norm before the unembedding")
        untie_unembedding(model)
        norm_weight = absorb_norm_weight(final_norm)
        fold_input_map(model.structure.unembedding, norm_weight[:, None] * matrix.mT)


def untie_unembedding(model: Model) -> None:
    """Give the unembedding its own weights if it shares them with the embedding."""
    unembedding = model.structure.unembedding
    if unembedding.weight is model.hf.get_input_embeddings().weight:
        assert isinstance(unembedding.weight, Tensor)
        unembedding.weight = nn.Parameter(unembedding.weight.detach().clone(), requires_grad=True)
    model.hf.config.tie_word_embeddings = False


@torch.no_grad()
def absorb_norm_weight(norm: nn.Module) -> Tensor:
    """Return the factors of a norm in float64, and set them to one and its bias to zero."""
    weight = norm.get_parameter("weight")
    factors = norm_factors(norm).cpu()
    offset = factors - weight.double().cpu()  # what the norm adds to its stored weight
    weight.copy_(1.0 - offset)
    if getattr(norm, "bias", None) is not None:
        norm.get_parameter("bias").zero_()
    return factors


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of a model; shared parameters count once."""
    return sum(parameter.numel() for parameter in model.parameters())
