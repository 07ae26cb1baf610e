"""A tuning's state: what is kept of each map, and how fast it goes on."""

import math

import pytest
import torch
from torch import nn

from layerjump.errors import BadArtifact
from layerjump.lens.tuning import NAME, TunedMap, Tuning
from layerjump.models.structure import FINAL, Site


def both(one, other):
    """What is said of the maps of two levels."""
    return {(Site(0), FINAL): one, (Site(1), FINAL): other}


def test_a_level_that_is_never_a_number_keeps_its_start():
    rows = torch.randn(50, 4)
    tuned = both(TunedMap(nn.Linear(4, 4), rows), TunedMap(nn.Linear(4, 4), rows))
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
    tuned = both(TunedMap(nn.Linear(4, 4), rows), TunedMap(nn.Linear(4, 4), rows))
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


@pytest.mark.parametrize("spoilt", ["loss", "gradient", "square"])
def test_a_step_that_is_no_number_is_not_taken_and_forgotten(spoilt):
    """By the optimiser too, which would keep it for good."""
    rows = torch.randn(50, 4)
    tuned = both(TunedMap(nn.Linear(4, 4), rows), TunedMap(nn.Linear(4, 4), rows))
    tuning = Tuning(tuned, rate=0.1, steps=100)
    for step in range(3):
        before = [one.affine().factors[0] for one in tuned.values()]
        for one in tuned.values():
            one(rows).square().sum().backward()
        second = list(tuned.values())[1]
        if step == 1 and spoilt != "loss":
            value = math.nan if spoilt == "gradient" else 1e30
            next(second.parameters()).grad[0] = value
        tuning.take(both(1.0, math.nan if step == 1 and spoilt == "loss" else 1.0))
        moved = [
            not torch.equal(a, one.affine().factors[0])
            for a, one in zip(before, tuned.values(), strict=True)
        ]
        assert moved == [True, step != 1]
        assert all(bool(p.isfinite().all()) for one in tuned.values() for p in one.parameters())


def test_it_is_over_when_looks_no_longer_lower_the_mean():
    rows = torch.randn(50, 4)
    tuned = both(TunedMap(nn.Linear(4, 4), rows), TunedMap(nn.Linear(4, 4), rows))
    tuning = Tuning(tuned, rate=0.1, steps=100)
    for look in range(6):
        tuning.look(both(1.0 - 0.1 * min(look, 2), 1.0))
        # Looks 0, 1 and 2 lower it; from then on two in a row do not.
        assert tuning.over(patience=2) == (look >= 4)
    assert tuning.step == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda kept: kept.clear(),
        lambda kept: kept.update({name: value[None] for name, value in kept.items()}),
        lambda kept: kept.update({name: value * math.nan for name, value in kept.items()}),
        lambda kept: kept.update(dict.fromkeys(kept, 3)),
    ],
)
def test_a_saved_best_that_is_no_map_is_refused(spoil, tmp_path):
    rows = torch.randn(50, 4)
    tuned = both(TunedMap(nn.Linear(4, 4), rows), TunedMap(nn.Linear(4, 4), rows))
    tuning = Tuning(tuned, rate=0.1, steps=100)
    tuning.look(both(1.0, 1.0))
    tuning.save(tmp_path, "mine")
    tuning.restore(tmp_path, "mine")
    state = torch.load(tmp_path / NAME)
    spoil(state["kept"]["1>final"])
    torch.save(state, tmp_path / NAME)
    with pytest.raises(BadArtifact, match="damaged"):
        tuning.restore(tmp_path, "mine")


def test_a_saved_kl_below_zero_is_refused(tmp_path):
    tuning = Tuning(
        both(*(TunedMap(nn.Linear(4, 4), torch.randn(50, 4)) for _ in range(2))), 0.1, 9
    )
    tuning.look(both(1.0, 1.0))
    tuning.best[0] = -100.0  # which no look would ever undercut
    tuning.save(tmp_path, "mine")
    with pytest.raises(BadArtifact, match="below 0"):
        tuning.restore(tmp_path, "mine")
