"""The final norm and unembedding: their metric, and an unembedding of some tokens only."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor, nn

from layerjump.errors import BadEstimator
from layerjump.models.model import Model
from layerjump.models.structure import FINAL, Site, Structure


def can_restrict(structure: Structure) -> bool:
    """Whether `unembedding_rows` of this model's unembedding give the logits of some tokens."""
    return type(structure.unembedding) is nn.Linear and structure.family.logits_bias is None


def with_unembedding(structure: Structure, unembedding: nn.Linear) -> Structure:
    """The same structure with another unembedding."""
    changed = copy(structure)
    changed.unembedding = unembedding
    return changed


def unembedding_rows(unembedding: nn.Linear, tokens: Tensor) -> nn.Linear:
    """An unembedding of these tokens only, in their order: fewer rows are a cheaper product."""
    rows = tokens.to(unembedding.weight.device)
    has_bias = unembedding.bias is not None
    short = nn.Linear(unembedding.in_features, len(rows), bias=has_bias, device="meta")
    short.weight = nn.Parameter(unembedding.weight.detach()[rows], requires_grad=False)
    if has_bias:
        short.bias = nn.Parameter(unembedding.bias.detach()[rows], requires_grad=False)
    return short


@torch.no_grad()
def unembedding_metric(model: Model, target: Site) -> Tensor:
    """EᵀE of the vocabulary-centred unembedding E; at level L, through the final norm's weight: diag(w) EᵀE diag(w).

    It measures the errors of a state that change logits. A shift of all logits changes no probability, hence the
    centring. The norm's division by the length is left out: it is the same for every coordinate.
    """
    embedding = model.structure.unembedding.get_parameter("weight").double()
    embedding = embedding - embedding.mean(0)
    metric = embedding.mT @ embedding
    if target == FINAL:
        return metric
    weight = norm_weight(model)
    if target != Site(model.n_blocks) or weight is None:
        raise BadEstimator(
            f"expected final, or the last level of a model with one final norm, as the target of the unembedding's "
            f"metric, got {target}"
        )
    return weight[:, None] * metric * weight


def norm_weight(model: Model) -> Tensor | None:
    """The final norm's scale of each coordinate; None unless a single norm precedes the unembedding."""
    steps = model.structure.final_steps
    if len(steps) != 1 or not isinstance(steps[0], nn.Module) or not hasattr(steps[0], "weight"):
        return None
    weight = steps[0].get_parameter("weight").double()
    return weight + model.structure.family.norm_offset if weight.dim() == 1 else None
