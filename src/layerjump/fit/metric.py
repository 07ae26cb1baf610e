"""The unembedding's metric: which errors of a state the vocabulary can see."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from layerjump.errors import BadEstimator
from layerjump.inputs.models import Model
from layerjump.inputs.sites import FINAL, Site


@torch.no_grad()
def unembedding_metric(model: Model, target: Site) -> Tensor:
    """EᵀE of the vocabulary-centred unembedding E; for level L seen through the final norm's weight w.

    A shift of all logits changes no probability, hence the centring. The norm's division by the length is left out:
    it is the same for every coordinate.
    """
    embedding = model.anatomy.head.get_parameter("weight").double()
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
    steps = model.anatomy.final_steps
    if len(steps) != 1 or not isinstance(steps[0], nn.Module) or not hasattr(steps[0], "weight"):
        return None
    weight = steps[0].get_parameter("weight").double()
    if weight.dim() != 1:
        return None
    # Gemma stores the scale's distance from one.
    offset = 1.0 if type(steps[0]).__name__.startswith("Gemma") else 0.0
    return weight + offset
