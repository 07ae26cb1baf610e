"""A tuner's state: what is kept of each map, and how fast it goes on."""

import math

import pytest
import torch
from torch import nn

from layerjump.errors import BadArtifact
from layerjump.lens.tuning import CHECKPOINT_NAME, TrainableMap, Tuner
from layerjump.models.structure import FINAL, Site


def both(one, other):
    """What is said of the maps of two levels."""
    return {(Site(0), FINAL): one, (Site(1), FINAL): other}


def test_a_level_that_is_never_a_number_keeps_its_start():
    rows = torch.randn(50, 4)
    tuned = both(TrainableMap(nn.Linear(4, 4), rows), TrainableMap(nn.Linear(4, 4), rows))
    starts = [one.to_affine().factors[0] for one in tuned.values()]
    tuner = Tuner(tuned, learning_rate=0.1, steps=100)
    tuner.record_validation(both(1.0, math.nan))
    for step in range(3):
        for one in tuned.values():
            one(rows).square().sum().backward()
        tuner.update(both(1.0, 1.0))
        tuner.record_validation(both(0.9 - 0.1 * step, math.nan))
    kept = [jump.factors[0] for jump in tuner.best_maps().values()]
    assert not torch.equal(kept[0], starts[0])
    assert torch.equal(kept[1], starts[1])
    assert not tuner.is_finished(patience=2)  # the other level still falls


def test_a_level_that_got_worse_goes_back_and_takes_smaller_steps():
    rows = torch.randn(50, 4)
    tuned = both(TrainableMap(nn.Linear(4, 4), rows), TrainableMap(nn.Linear(4, 4), rows))
    tuner = Tuner(tuned, learning_rate=0.1, steps=100)

    def step():
        """How far each level's weights have gone."""
        before = [one.to_affine().factors[0] for one in tuned.values()]
        for one in tuned.values():
            one(rows).square().sum().backward()
        tuner.update(both(1.0, 1.0))
        after = [one.to_affine().factors[0] for one in tuned.values()]
        return [float((b - a).norm()) for a, b in zip(before, after, strict=True)]

    tuner.record_validation(both(1.0, 1.0))
    starts = [one.to_affine().factors[0] for one in tuned.values()]
    first = step()
    tuner.record_validation(both(0.9, 1.1))
    now = [one.to_affine().factors[0] for one in tuned.values()]
    assert not torch.equal(now[0], starts[0])
    assert torch.equal(now[1], starts[1])
    second = step()
    assert second[0] == pytest.approx(first[0], rel=0.1)
    assert second[1] < 0.5 * first[1]


@pytest.mark.parametrize("spoilt", ["loss", "gradient", "square"])
def test_a_step_that_is_no_number_is_not_taken_and_forgotten(spoilt):
    """By the optimiser too, which would keep it for good."""
    rows = torch.randn(50, 4)
    tuned = both(TrainableMap(nn.Linear(4, 4), rows), TrainableMap(nn.Linear(4, 4), rows))
    tuner = Tuner(tuned, learning_rate=0.1, steps=100)
    for step in range(3):
        before = [one.to_affine().factors[0] for one in tuned.values()]
        for one in tuned.values():
            one(rows).square().sum().backward()
        second = list(tuned.values())[1]
        if step == 1 and spoilt != "loss":
            value = math.nan if spoilt == "gradient" else 1e30
            next(second.parameters()).grad[0] = value
        tuner.update(both(1.0, math.nan if step == 1 and spoilt == "loss" else 1.0))
        moved = [
            not torch.equal(a, one.to_affine().factors[0])
            for a, one in zip(before, tuned.values(), strict=True)
        ]
        assert moved == [True, step != 1]
        assert all(bool(p.isfinite().all()) for one in tuned.values() for p in one.parameters())


def test_it_is_over_when_looks_no_longer_lower_the_mean():
    rows = torch.randn(50, 4)
    tuned = both(TrainableMap(nn.Linear(4, 4), rows), TrainableMap(nn.Linear(4, 4), rows))
    tuner = Tuner(tuned, learning_rate=0.1, steps=100)
    for look in range(6):
        tuner.record_validation(both(1.0 - 0.1 * min(look, 2), 1.0))
        # Looks 0, 1 and 2 lower it; from then on two in a row do not.
        assert tuner.is_finished(patience=2) == (look >= 4)
    assert tuner.step == 0


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
    tuned = both(TrainableMap(nn.Linear(4, 4), rows), TrainableMap(nn.Linear(4, 4), rows))
    tuner = Tuner(tuned, learning_rate=0.1, steps=100)
    tuner.record_validation(both(1.0, 1.0))
    tuner.save(tmp_path, "mine")
    tuner.restore(tmp_path, "mine")
    state = torch.load(tmp_path / CHECKPOINT_NAME)
    spoil(state["kept"]["1>final"])
    torch.save(state, tmp_path / CHECKPOINT_NAME)
    with pytest.raises(BadArtifact, match="damaged"):
        tuner.restore(tmp_path, "mine")


def test_a_saved_kl_below_zero_is_refused(tmp_path):
    tuner = Tuner(
        both(*(TrainableMap(nn.Linear(4, 4), torch.randn(50, 4)) for _ in range(2))), 0.1, 9
    )
    tuner.record_validation(both(1.0, 1.0))
    tuner.best_kl[0] = -100.0  # which no look would ever undercut
    tuner.save(tmp_path, "mine")
    with pytest.raises(BadArtifact, match="below 0"):
        tuner.restore(tmp_path, "mine")
