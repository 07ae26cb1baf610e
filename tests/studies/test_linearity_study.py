"""Linearity: the paper's score, chance, and the sizes beside it."""

import numpy as np
import pytest
import torch
from helpers.regression_data import random
from helpers.study_results import tables_of

from layerjump.jumps.moments import Moments
from layerjump.jumps.score_from_moments import block_map, block_scores
from layerjump.metrics import geometry as measure
from layerjump.models.sites import Site
from layerjump.studies import linearity


def weighted_r2(x, y):
    """In sample, with an intercept, by scikit-learn."""
    from sklearn.linear_model import LinearRegression
    from sklearn.metrics import r2_score

    predicted = LinearRegression(tol=1e-10).fit(x, y).predict(x)
    return r2_score(y, predicted, multioutput="variance_weighted")


def neighbours(x, y):
    sums = Moments([(Site(0), Site(1))], full_targets=True)
    sums.add({Site(0): x, Site(1): y})
    return sums


def scored(fit, test):
    fit, test = neighbours(*fit), neighbours(*test)
    return block_scores(block_map(fit, 0), fit, test, 0)


@pytest.mark.parametrize("sinks", [0, 3])
def test_the_score_is_the_weighted_r2_in_sample_with_an_intercept(sinks):
    x = random(300, 12) @ random(12, 12, seed=1) + 5
    y = x + torch.tanh(x @ random(12, 12, seed=2))
    x[:sinks] *= 300
    y[:sinks] *= 300
    row = scored((x, y), (x, y))
    assert row["with residual"] == pytest.approx(weighted_r2(x, y), abs=1e-9)
    assert row["without residual"] == pytest.approx(weighted_r2(x, y - x), abs=1e-9)
    step = (y - x) - (y - x).mean(0)
    identity = 1 - float(step.square().sum() / (y - y.mean(0)).square().sum())
    assert row["identity"] == pytest.approx(identity, abs=1e-9)


def test_on_noise_the_score_is_the_chance_floor_and_nothing_holds_out():
    """In sample d / (n − 1), however large that is; on other text no better than the mean."""
    for n, d in ((2_000, 20), (300, 60)):
        fit, test = ((random(n, d, seed=s), random(n, d, seed=s + 1)) for s in (0, 2))
        row = scored(fit, test)
        assert row["chance floor"] == d / (n - 1)
        assert row["with residual"] == pytest.approx(row["chance floor"], rel=0.1)
        assert row["with residual held out"] <= 0


def test_the_chance_floor_is_never_above_one():
    assert measure.chance_floor(100, 50) == measure.chance_floor(3, 1) == 1


@pytest.fixture(scope="module")
def result(study_setup):
    return linearity.run(study_setup)


def test_the_linearity_study(result):
    for row in tables_of(result)["blocks"]:
        for which in ("", " without position 0"):
            assert 0 < row[f"with residual{which}"] <= 1
            assert row[f"without residual{which}"] <= row[f"with residual{which}"] + 1e-9 or row["identity"] < 0
            assert row[f"identity{which}"] <= row[f"with residual{which}"]
        for name in ("with", "without"):
            score = f"{name} residual held out without position 0"
            assert row[f"{score} low"] < row[score] < row[f"{score} high"]
            assert row[score] < row[f"{name} residual without position 0"]
    angles = {(row["from"], row["to"]): row["angle"] for row in tables_of(result)["angles"]}
    for row in tables_of(result)["blocks"]:
        assert row["angle"] == pytest.approx(angles[row["block"] - 1, row["block"]], abs=1e-9)
    steps = [row["angle"] for row in tables_of(result)["blocks"]]
    assert result.headline.jump_strength == pytest.approx(steps[-1] / np.mean(steps[:-1]))


def test_linearity_is_the_same_when_it_is_run_again(result, study_setup):
    assert tables_of(linearity.run(study_setup)) == tables_of(result)


def test_angles_and_dimensions():
    x = random(500, 30)
    turned = torch.stack([-x[:, 1], x[:, 0], *x[:, 2:].mT], 1)
    turned[:, 2:], x[:, 2:] = 0, 0
    found = measure.angles([x, turned, -x, 2 * x])
    assert found[0].tolist() == pytest.approx([0, 0.5, 1, 0], abs=1e-6)
    line = random(400, 1, seed=3) @ random(1, 30, seed=4)
    assert measure.anisotropy((line - line.mean(0)).mT @ (line - line.mean(0))) == pytest.approx(1)
    assert measure.intrinsic_dimension(line) == pytest.approx(1, abs=0.15)
    plane = random(1500, 3, seed=5) @ random(3, 30, seed=6)
    assert measure.intrinsic_dimension(plane) == pytest.approx(3, abs=0.4)
    # The same rows again, but for rounding, are not neighbours.
    again = torch.cat([plane, plane.float().double()])
    assert measure.intrinsic_dimension(again) == pytest.approx(measure.intrinsic_dimension(plane))
    assert np.isnan(measure.intrinsic_dimension(plane[:5]))
    assert np.isnan(measure.jump_strength([0.2]))


def test_of_a_block_that_adds_nothing_all_is_explained():
    x, y = random(300, 12) + 5, random(100, 12, seed=1) + 5
    found = scored((x, x + 3), (y, y + 3))
    assert all(value == pytest.approx(1) for key, value in found.items() if key != "chance floor")
