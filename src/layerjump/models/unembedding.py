"""The final norm and unembedding: its metric, and its restriction to some tokens.

A model's way from the last state to logits, for some tokens alone: a vocabulary product with few rows is cheap.

The unembedding's metric: which errors of a state the vocabulary can see.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor, nn

from layerjump.errors import BadEstimator
from layerjump.models.model import Model
from layerjump.models.structure import FINAL, Site, Structure


def can_restrict(structure: Structure) -> bool:
    """Whether some rows of the head are the head of some tokens."""
    return type(structure.unembedding) is nn.Linear and structure.family.logits_bias is None


def with_unembedding(structure: Structure, head: nn.Linear) -> Structure:
    """The same anatomy with another head."""
    changed = copy(structure)
    changed.unembedding = head
    return changed


def unembedding_rows(head: nn.Linear, tokens: Tensor) -> nn.Linear:
    """The head of these tokens, in their order."""
    rows = tokens.to(head.weight.device)
    short = nn.Linear(head.in_features, len(rows), bias=head.bias is not None, device="meta")
    short.weight = nn.Parameter(head.weight.detach()[rows], requires_grad=False)
    if head.bias is not None:
        short.bias = nn.Parameter(head.bias.detach()[rows], requires_grad=False)
    return short


@torch.no_grad()
def unembedding_metric(model: Model, target: Site) -> Tensor:
    """EᵀE of the vocabulary-centred unembedding E; for level L seen through the final norm's weight w.

    A shift of all logits changes no probability, hence the centring. The norm's division by the length is left out:
    it is the same for every coordinate.
    """
    embedding = model.structure.unembedding.get_parameter("weight").double()
    embedding = embedding - embedding.mean(0)
    metric = embedding.mT @ embedding
    if target == FINAL:
        return metric
    weight = norm_weight(model)
    if target != Site(model.n_blocks) or weight is None:
        raise BadEstimator(
            f"the unembedding's metric is known at the last level of models with one final norm, and at final; "
            f"{target} was given"
        )
    return weight[:, None] * metric * weight


def norm_weight(model: Model) -> Tensor | None:
    """The scale the final norm gives each coordinate, if a single norm is all there is before the product."""
    steps = model.structure.final_steps
    if len(steps) != 1 or not isinstance(steps[0], nn.Module) or not hasattr(steps[0], "weight"):
        return None
    weight = steps[0].get_parameter("weight").double()
    if weight.dim() != 1:
        return None
    # Gemma stores the scale's distance from one.
    offset = 1.0 if type(steps[0]).__name__.startswith("Gemma") else 0.0
    return weight + offset
