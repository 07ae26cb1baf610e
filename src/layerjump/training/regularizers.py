"""Penalties on the distance between neighbouring levels.

    with Levels(model) as levels:
        loss = model(**batch).loss
        loss = loss + 0.5 * cosine(levels.states, batch["attention_mask"])

`cosine` and `mse` are the regularisers of "Your Transformer is Secretly Linear" (arXiv 2405.12250), which does not say
over which positions it averages: here it is all that are no padding. `jump` is ours: that the last levels' turn can be
penalised is the finding of arXiv 2601.18302, whose formula is not public. States are levels 0 to L, the last one before
the final norm, each (…, d).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from layerjump.errors import BadTraining
from layerjump.metrics.logits import upcast


class Penalty(Protocol):
    """States of levels 0 to L, which positions count, and which levels enter the sum → one number."""

    def __call__(
        self,
        states: Sequence[Tensor],
        mask: Tensor | None = None,
        levels: Sequence[int] | None = None,
    ) -> Tensor: ...


def cosine(
    states: Sequence[Tensor], mask: Tensor | None = None, levels: Sequence[int] | None = None
) -> Tensor:
    """Σ_l mean(1 − cos(h^l, h^{l−1})).

    The mean is over positions where `mask` (the states' shape without d) is not zero; l runs over `levels`, or from 1
    to L.
    """
    return _total(states, mask, levels, lambda x, y, _: 1 - cosine_similarity(x, y, dim=-1))


def mse(
    states: Sequence[Tensor], mask: Tensor | None = None, levels: Sequence[int] | None = None
) -> Tensor:
    """Σ_l mean ‖h^l − h^{l−1}‖², over the same positions and levels as `cosine`."""
    return _total(states, mask, levels, lambda x, y, _: (y - x).square().sum(-1))


def jump(
    states: Sequence[Tensor], mask: Tensor | None = None, levels: Sequence[int] | None = None
) -> Tensor:
    """Σ_l (l/L) mean angle(h^l, h^{l−1})/π, over the same positions and levels as `cosine`.

    The weight grows with depth over all levels: with the last alone the turn would move to the one before.
    """
    return _total(states, mask, levels, lambda x, y, depth: depth * _angle(x, y))


PENALTIES: dict[str, Penalty] = {"cosine": cosine, "mse": mse, "jump": jump}


def _angle(x: Tensor, y: Tensor) -> Tensor:
    """arccos(cos)/π as 2 atan(‖u − v‖ / ‖u + v‖)/π: arccos has no finite slope where the states agree."""
    u, v = normalize(x, dim=-1), normalize(y, dim=-1)
    apart, together = (u - v).norm(dim=-1), (u + v).norm(dim=-1)
    return 2 * torch.atan2(apart, together) / torch.pi


def _total(
    states: Sequence[Tensor],
    mask: Tensor | None,
    levels: Sequence[int] | None,
    step: Callable[[Tensor, Tensor, float], Tensor],
) -> Tensor:
    last = len(states) - 1
    chosen = _checked(states, mask, levels)
    found = [
        step(states_before, states_after, level / last).mean()
        for level, states_before, states_after in _pairs(states, mask, chosen)
    ]
    return torch.stack(found).sum()


def _pairs(
    states: Sequence[Tensor], mask: Tensor | None, levels: Sequence[int]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each level with its two ends. Padding is left out, not multiplied by zero: it may hold anything, also NaN."""
    keep = None if mask is None or bool(mask.bool().all()) else mask.bool()
    wanted = {end for level in levels for end in (level - 1, level)}
    ends = {at: upcast(states[at]) for at in sorted(wanted)}
    if keep is not None:
        ends = {at: state[keep.to(state.device)] for at, state in ends.items()}
    for level in levels:
        yield level, ends[level - 1], ends[level]


def _checked(
    states: Sequence[Tensor], mask: Tensor | None, levels: Sequence[int] | None
) -> Sequence[int]:
    last = len(states) - 1
    if last < 1:
        raise BadTraining(
            f"a penalty was given the states of {len(states)} levels; give those of levels 0 to L, two or more"
        )
    if mask is not None and mask.shape != states[0].shape[:-1]:
        raise BadTraining(
            f"the mask is {tuple(mask.shape)} and the states are {tuple(states[0].shape)}; give the mask the states' "
            "shape without its last dimension"
        )
    if mask is not None and not bool(mask.any()):
        raise BadTraining("the mask leaves no position to penalise; give a batch with some text")
    chosen = range(1, last + 1) if levels is None else levels
    if not chosen or any(not 1 <= level <= last for level in chosen):
        raise BadTraining(
            f"the levels to penalise are {list(chosen)}; give some of 1 to {last} (level l is held against l − 1)"
        )
    return chosen
