"""Scores that several studies give to a set of jumps to the last level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from layerjump.fit.affine import Affine
from layerjump.fit.jumps import Jumps
from layerjump.fit.modules import to_affine
from layerjump.fit.moments import Moments
from layerjump.fit.pairs import Pair
from layerjump.fit.score import R2, r2
from layerjump.lens.readings import Readings
from layerjump.studies.result import Row


def maps_of(jumps: Jumps) -> dict[Pair, Affine]:
    """The maps of a set of jumps, in float64 as sums are."""
    return {pair: to_affine(jumps[pair]).to(torch.float64) for pair in jumps}


def r2_on(maps: Mapping[Pair, Affine], sums: Moments) -> list[R2]:
    """R² of each map on the text of some sums, in the order of the maps."""
    return [r2(jump, sums.source(a), sums.target(a, b)) for (a, b), jump in maps.items()]


def mean_r2(scores: Sequence[R2]) -> Row:
    """Both averages of R², each averaged over the levels."""
    return {
        "r2": sum(score.uniform for score in scores) / len(scores),
        "r2 weighted": sum(score.weighted for score in scores) / len(scores),
    }


def hits_below_last(readings: Readings) -> Tensor:
    """The share of the levels below the last that give the model's token, (lenses, examples)."""
    return readings.hits(1)[:, :-1].double().mean(1)
