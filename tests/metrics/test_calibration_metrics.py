"""Calibration error and marginal KL: against numbers computed by hand, and their edges."""

import numpy as np
import pytest
import torch
from helpers.regression_data import random

from layerjump.metrics.bootstrap import statistic_interval
from layerjump.metrics.logits import calibration_error, marginal_kl


def test_calibration_error_by_hand():
    """Bins of a tenth: {0.92, 0.98} came true once (short by 0.9), {0.55} did (0.45), {0.3} did not (0.3)."""
    found = calibration_error([0.92, 0.98, 0.55, 0.3], [1, 0, 1, 0])
    assert found == pytest.approx((0.9 + 0.45 + 0.3) / 4, rel=1e-12)


def test_errors_of_one_bin_cancel_and_of_two_do_not():
    assert calibration_error([0.75, 0.75, 0.75, 0.75], [1, 1, 1, 0]) == pytest.approx(0, abs=1e-15)
    assert calibration_error([0.75, 0.25], [0, 1]) == pytest.approx(0.75)
    assert calibration_error([0.75, 0.25], [0, 1], bins=1) == pytest.approx(0)


def test_certainty_falls_into_the_last_bin():
    assert calibration_error([1.0, 1.0, 0.0], [1, 0, 0]) == pytest.approx(1 / 3)


def test_a_weight_is_as_many_copies():
    generator = np.random.default_rng(0)
    probability, hit = generator.random((2, 3, 20)), generator.random((2, 3, 20)) < 0.5
    weight = generator.integers(0, 4, 20)
    copies = np.repeat(np.arange(20), weight)
    found = calibration_error(probability, hit, weight)
    assert found.shape == (2, 3)
    assert found == pytest.approx(calibration_error(probability[..., copies], hit[..., copies]))
    alone = calibration_error(probability[1, 2], hit[1, 2], weight)
    assert found[1, 2] == pytest.approx(alone)


def test_those_who_mean_what_they_say_have_little_error_and_boasters_much():
    generator = np.random.default_rng(0)
    probability = generator.random(4000)
    hit = generator.random(4000) < probability
    of = np.arange(4000) // 4
    low, high = statistic_interval(lambda w: float(calibration_error(probability, hit, w)), of)
    assert calibration_error(probability, hit) < 0.03
    assert high < 0.05 < calibration_error(np.sqrt(probability), hit)
    assert low > 0  # a finite sample is never without error


def test_marginal_kl_by_hand():
    """Means (1/2, 1/2) and (1/4, 3/4): ½ ln 2 + ½ ln ⅔; sums of any number of positions give the same."""
    wanted = 0.5 * np.log(2) + 0.5 * np.log(2 / 3)
    assert float(marginal_kl(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]))) == (
        pytest.approx(wanted, rel=1e-12)
    )
    sums = torch.tensor([[10.0, 10.0]]), torch.tensor([[1.0, 3.0]])
    assert marginal_kl(*sums).tolist() == pytest.approx([wanted], rel=1e-12)


def test_a_lens_that_is_wrong_everywhere_may_be_unbiased():
    p = random(50, 30).softmax(-1)
    swapped = p.flip(0)
    assert float((p * (p / swapped).log()).sum(-1).mean()) > 0.5
    assert float(marginal_kl(p.sum(0), swapped.sum(0))) == pytest.approx(0, abs=1e-12)


def test_marginal_kl_never_exceeds_the_mean_kl():
    """KL is convex in the pair, so averaging first can only lose."""
    p, q = (random(40, 25, seed=seed).softmax(-1) for seed in (1, 2))
    assert 0 < float(marginal_kl(p.sum(0), q.sum(0))) < float((p * (p / q).log()).sum(-1).mean())


def test_tokens_that_never_come_up_cost_nothing():
    zero = torch.tensor([0.0, 1.0])
    assert float(marginal_kl(zero, zero)) == 0
    assert float(marginal_kl(torch.tensor([0.5, 0.5]), zero)) == float("inf")
