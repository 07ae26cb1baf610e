"""Rotate and scale the residual stream of a model by editing its weights.

These are exact changes of coordinates. An RMSNorm is invariant to rotation and scale of its input. So from some level
on, the residual stream h may become c Q h: every matrix that writes to the stream is multiplied by c Q, every
matrix that reads it by Qᵀ (and by the norm's weight, which becomes one), and the unembedding by Qᵀ, for which it must
not share its weights with the embedding. A LayerNorm is invariant to scale alone, which leaves the unembedding as
it is. (Norms add a small ε to the variance, so a scale changes results by about that much.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from layerjump.errors import BadModel
from layerjump.models.discovery import is_norm, is_rms_norm
from layerjump.models.model import Model
from layerjump.models.structure import norm_factors
from layerjump.models.weight_forms import require_plain, shared_weights
from layerjump.pruning.output_weights import cannot_fold, output_weights, require_editable


@dataclass(frozen=True, eq=False)
class StreamTransform:
    """From this level of the pruned model on, its residual stream is scale · rotation @ the original model's."""

    level: int
    scale: float = 1.0
    rotation: Tensor | None = None

    def __call__(self, states: Tensor) -> Tensor:
        """Transform states of the original model."""
        rotated = states if self.rotation is None else states @ self.rotation.mT.to(states)
        return self.scale * rotated


def cannot_rotate(model: Model) -> str | None:
    """Return why this model's residual stream cannot be rotated, or None if it can be."""
    if reason := cannot_fold(model):
        return reason
    model_type, structure = model.model_type, model.structure
    final_norm = structure.final_steps[0] if len(structure.final_steps) == 1 else None
    if not isinstance(final_norm, nn.Module) or not is_rms_norm(final_norm, model.d_model):
        return f"the norms of {model_type} subtract the mean, so its residual stream cannot be rotated"
    if reason := cannot_edit_unembedding(model):
        return reason
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
            try:
                require_editable(model, points[f"{write.norm}.in"].path, *write.linear_readers)
            except BadModel as error:
                return str(error)
    return None


def cannot_edit_unembedding(model: Model) -> str | None:
    """Return why the final norm and the unembedding cannot be edited, or None if they can be; tied weights can."""
    for step in (*model.structure.final_steps, model.structure.unembedding):
        for name, parameter in step.named_parameters() if isinstance(step, nn.Module) else ():
            try:
                require_plain(parameter, f"{name} of the final norm or the unembedding")
            except BadModel as error:
                return str(error)
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
    require_plain(weight, f"of a {type(layer).__name__} layer")
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
    assert isinstance(unembedding.weight, Tensor)
    if id(unembedding.weight) in shared_weights(model.hf):
        unembedding.weight = nn.Parameter(unembedding.weight.detach().clone(), requires_grad=True)
    model.hf.config.tie_word_embeddings = False


@torch.no_grad()
def absorb_norm_weight(norm: nn.Module) -> Tensor:
    """Return the factors of a norm in float64, and set them to one and its bias to zero."""
    weight = norm.get_parameter("weight")
    require_plain(weight, f"of {type(norm).__name__}")
    factors = norm_factors(norm).cpu()
    offset = factors - weight.double().cpu()  # what the norm adds to its stored weight
    weight.copy_(1.0 - offset)
    if getattr(norm, "bias", None) is not None:
        norm.get_parameter("bias").zero_()
    return factors
