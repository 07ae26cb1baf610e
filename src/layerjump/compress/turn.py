"""Turn and stretch the stream of later blocks, exactly: the model computes the same in other coordinates.

An RMSNorm does not care about rotations, nor about scale. So from a level on the stream h may become c Q h: every
product that reads it takes Qᵀ (and the norm's own weight), every product that writes to it takes c Q, and the head
takes Qᵀ too, for which it must no longer share its weights with the embedding. A LayerNorm allows the scale alone,
which leaves the head as it is. (Norms add a tiny ε to the variance, so a scale changes results by about that much.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from layerjump.compress.projections import map_input, map_output, readers, writers
from layerjump.errors import BadModel
from layerjump.inputs.models import Model


def can_stretch(model: Model) -> bool:
    """Whether a norm stands between the last level and the head, so that scale is forgotten there."""
    steps = model.anatomy.final_steps
    return bool(steps) and "norm" in type(steps[0]).__name__.lower()


@torch.no_grad()
def turn(model: Model, level: int, rotation: Tensor | None, scale: float = 1.0) -> None:
    """Change the weights so that what was h from this level on is scale · rotation @ h (None: not turned)."""
    eye = torch.eye(model.width, dtype=torch.float64)
    inside = eye if rotation is None else rotation.double().cpu()
    for block in range(level + 1, model.n_blocks + 1):
        for layer in writers(model, block):
            map_output(layer, scale * inside)
        if rotation is not None:
            for norm, layers in readers(model, block):
                diagonal = take_weight(norm)
                for layer in layers:
                    map_input(layer, diagonal[:, None] * inside.mT)
    if rotation is not None:
        _turn_head(model, inside)


def _turn_head(model: Model, rotation: Tensor) -> None:
    norm = model.anatomy.final_steps[0]
    if not isinstance(norm, nn.Module):
        raise BadModel("a stream cannot be turned where no norm stands before the head")
    untie(model)
    map_input(model.anatomy.head, take_weight(norm)[:, None] * rotation.mT)


def untie(model: Model) -> None:
    """Give the head weights of its own, where it shares them with the embedding."""
    head = model.anatomy.head
    embedding = model.hf.get_input_embeddings()
    if head.weight is embedding.weight:
        assert isinstance(head.weight, Tensor)
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=True)
    model.hf.config.tie_word_embeddings = False


def take_weight(norm: nn.Module) -> Tensor:
    """What the norm multiplies by, in float64; afterwards it multiplies by one and adds nothing."""
    weight = norm.get_parameter("weight")
    # Gemma keeps the weight less one.
    less = 1.0 if "Gemma" in type(norm).__name__ else 0.0
    taken = weight.double().cpu() + less
    with torch.no_grad():
        weight.fill_(1.0 - less)
        if getattr(norm, "bias", None) is not None:
            norm.get_parameter("bias").zero_()
    return taken
