"""A tuning's state: what is kept of each map, and how fast it goes on."""

import math

import pytest
import torch
from torch import nn

from layerjump.inputs.sites import FINAL, Site
from layerjump.lens.tuning import Tuned, Tuning


def both(one, other):
    """What is said of the maps of two levels."""
    return {(Site(0), FINAL): one, (Site(1), FINAL): other}


def test_a_level_that_is_never_a_number_keeps_its_start():
    rows = torch.randn(50, 4)
    tuned = both(Tuned(nn.Linear(4, 4), rows), Tuned(nn.Linear(4, 4), rows))
    starts = [one.affine().factors[0] for one in tuned.values()]
    tuning = Tuning(tuned, rate=0.1, steps=100)
    tuning.look(both(1.0, math.nan))
    for step in range(3):
        for one in tuned.values():
            one(rows).square().sum().backward()
        tuning.take(both(1.0, 1.0))
        tuning.look(both(0.9 - 0.1 * step, math.nan))
    kept = [jump.factors[0] for jump in tuning.best_maps().values()]
    assert not torch.equal(kept[0], starts[0])
    assert torch.equal(kept[1], starts[1])
    assert not tuning.over(patience=2)  # the other level still falls


def test_a_level_that_got_worse_goes_back_and_takes_smaller_steps():
    rows = torch.randn(50, 4)
    tuned = both(Tuned(nn.Linear(4, 4), rows), Tuned(nn.Linear(4, 4), rows))
    tuning = Tuning(tuned, rate=0.1, steps=100)

    def step():
        """How far each level's weights have gone."""
        before = [one.affine().factors[0] for one in tuned.values()]
        for one in tuned.values():
            one(rows).square().sum().backward()
        tuning.take(both(1.0, 1.0))
        after = [one.affine().factors[0] for one in tuned.values()]
        return [float((b - a).norm()) for a, b in zip(before, after, strict=True)]

    tuning.look(both(1.0, 1.0))
    starts = [one.affine().factors[0] for one in tuned.values()]
    first = step()
    tuning.look(both(0.9, 1.1))
    now = [one.affine().factors[0] for one in tuned.values()]
    assert not torch.equal(now[0], starts[0])
    assert torch.equal(now[1], starts[1])
    second = step()
    assert second[0] == pytest.approx(first[0], rel=0.1)
    assert second[1] < 0.5 * first[1]
