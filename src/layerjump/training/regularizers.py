"""Penalties on the distance between the hidden states of neighbouring levels.

    with LevelStates(hf) as levels:
        loss = hf(**batch).loss
        loss = loss + 0.5 * cosine(levels.states, batch["attention_mask"])

`cosine` and `mse` are the regularisers of "Your Transformer is Secretly Linear" (arXiv 2405.12250). The paper does not
say over which positions it averages; we average over all but padding. `jump` is our own formula: arXiv 2601.18302
reports that the angle between the last levels can be penalised, but does not publish how. All penalties take the hidden
states of levels 0 to L, each (…, d); level L is the state before the final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from layerjump.errors import BadTraining, argument
from layerjump.metrics.logits import upcast


class Penalty(Protocol):
    """A scalar penalty of the states of levels 0 to L, over the positions in `mask` and the levels in `levels`."""

    def __call__(
        self, states: Sequence[Tensor], mask: Tensor | None = None, levels: Sequence[int] | None = None
    ) -> Tensor: ...


def cosine(states: Sequence[Tensor], mask: Tensor | None = None, levels: Sequence[int] | None = None) -> Tensor:
    """Return Σ_l mean(1 − cos(h^l, h^{l−1})).

    The mean is over positions where `mask` (the states' shape without d) is nonzero; l runs over `levels`, by default
    1 to L.
    """
    return _sum_over_levels(states, mask, levels, lambda x, y, _: 1 - cosine_similarity(x, y, dim=-1))


def mse(states: Sequence[Tensor], mask: Tensor | None = None, levels: Sequence[int] | None = None) -> Tensor:
    """Return Σ_l mean ‖h^l − h^{l−1}‖², over the same positions and levels as `cosine`."""
    return _sum_over_levels(states, mask, levels, lambda x, y, _: (y - x).square().sum(-1))


def jump(states: Sequence[Tensor], mask: Tensor | None = None, levels: Sequence[int] | None = None) -> Tensor:
    """Return Σ_l (l/L) mean angle(h^l, h^{l−1})/π, over the same positions and levels as `cosine`.

    The weight grows with depth over all levels: a penalty of the last level alone moves the angle to the level before.
    """
    return _sum_over_levels(states, mask, levels, lambda x, y, depth: depth * _angle(x, y))


PENALTIES: dict[str, Penalty] = {"cosine": cosine, "mse": mse, "jump": jump}


def _angle(x: Tensor, y: Tensor) -> Tensor:
    """arccos(cos)/π as 2 atan(‖u − v‖ / ‖u + v‖)/π: the slope of arccos is infinite where the states agree."""
    u, v = normalize(x, dim=-1), normalize(y, dim=-1)
    return 2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1)) / torch.pi


def _sum_over_levels(
    states: Sequence[Tensor],
    mask: Tensor | None,
    levels: Sequence[int] | None,
    distance: Callable[[Tensor, Tensor, float], Tensor],
) -> Tensor:
    """Sum over levels the mean distance of level l − 1 and level l; `distance` also gets the relative depth l/L."""
    last = len(states) - 1
    if last < 1:
        raise BadTraining(f"expected the states of levels 0 to L, two or more, got {len(states)}; pass all levels")
    if mask is not None and mask.shape != states[0].shape[:-1]:
        raise BadTraining(
            f"expected a mask of shape {tuple(states[0].shape[:-1])} (the states' shape without its last dimension), "
            f"got {tuple(mask.shape)}"
        )
    if mask is not None and not bool(mask.any()):
        raise BadTraining("the mask leaves no position to penalise; pass a batch with some text")
    levels = range(1, last + 1) if levels is None else levels
    if not levels or any(not 1 <= level <= last for level in levels):
        raise BadTraining(
            f"expected {argument('levels')} among 1 to {last} (level l is compared with l − 1), got {list(levels)}"
        )
    ends = {level: upcast(states[level]) for level in sorted({end for level in levels for end in (level - 1, level)})}
    if mask is not None and not bool(mask.bool().all()):
        # Padding is selected out, not multiplied by zero: it may hold NaN.
        ends = {level: state[mask.bool().to(state.device)] for level, state in ends.items()}
    return torch.stack([distance(ends[level - 1], ends[level], level / last).mean() for level in levels]).sum()
