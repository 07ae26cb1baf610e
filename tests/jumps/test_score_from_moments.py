import pytest
import torch
from helpers.regression_data import noisy, random, sums
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import r2_score

from layerjump.errors import BadMoments
from layerjump.jumps.estimators.registry import solve
from layerjump.jumps.maps import Affine
from layerjump.jumps.score_from_moments import r2, r2_identity, residual

FITS = [
    ("identity", {}),
    ("mean-shift", {}),
    ("mat", {}),
    ("affine", {}),
    ("ridge", {"strength": 0.1}),
    ("orthogonal", {}),
    ("low-rank", {"rank": 2}),
]


def sklearns(y, predicted):
    y, predicted = y.numpy(), predicted.numpy()
    return r2_score(y, predicted), r2_score(y, predicted, multioutput="variance_weighted")


@pytest.mark.parametrize(("name", "extra"), FITS)
def test_r2_on_other_text_is_sklearns(name, extra):
    fitted = solve(name, *sums(*noisy(80, 6, 6)), **extra)[0]
    x, y = noisy(50, 6, 6, seed=1)
    x, y = x + 0.3, y * torch.logspace(0, 4, 6).double()
    source, (target,) = sums(x, y)
    assert r2(fitted, source, target) == pytest.approx(sklearns(y, fitted(x)), rel=1e-10, abs=1e-10)
    wanted = (fitted(x) - y).square().sum(0)
    torch.testing.assert_close(residual(fitted, source, target), wanted, rtol=1e-9, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 30), dx=st.integers(1, 8), dy=st.integers(1, 8), seed=st.integers(0, 99))
def test_r2_of_any_map_is_sklearns(n, dx, dy, seed):
    fitted = Affine.of(random(dy, dx, seed=seed), bias=random(dy, seed=seed + 1))
    x, y = random(n, dx, seed=seed + 2), random(n, dy, seed=seed + 3)
    source, (target,) = sums(x, y)
    assert r2(fitted, source, target) == pytest.approx(sklearns(y, fitted(x)), rel=1e-9)


def test_rows_of_huge_norm_cost_no_precision():
    x, y = noisy(500, 8, 8)
    x[:3] *= 500
    y[:3] *= 500
    source, (target,) = sums(x, y)
    fitted = solve("affine", source, [target])[0]
    assert r2(fitted, source, target) == pytest.approx(sklearns(y, fitted(x)), abs=1e-10)


def test_identity_is_scored_the_same_with_and_without_a_map():
    x, y = noisy(80, 6, 6)
    source, targets = sums(x, y, x + 0.1 * y, x)
    maps = solve("identity", source, targets)
    slow = [r2(map_, source, target) for map_, target in zip(maps, targets, strict=True)]
    for target, wanted in zip(targets, slow, strict=True):
        assert r2_identity(source, target) == pytest.approx(wanted, rel=1e-12)
    assert slow[2] == pytest.approx((1, 1), abs=1e-14)


def test_an_exact_map_scores_one_and_the_mean_scores_zero():
    x, y = noisy(80, 6, 4, noise=0.0)
    source, (target,) = sums(x, y)
    assert r2(solve("affine", source, [target])[0], source, target) == pytest.approx((1, 1))
    mean = Affine.of(torch.zeros(4, 6).double(), bias=target.mean)
    assert r2(mean, source, target) == pytest.approx((0, 0))


def test_squared_errors_are_never_below_zero():
    x, y = noisy(80, 6, 60, noise=0.0)
    source, (target,) = sums(x, y)
    assert (residual(solve("affine", source, [target])[0], source, target) >= 0).all()


def test_scores_below_zero_are_not_clipped():
    x, y = noisy(80, 6, 6)
    source, (target,) = sums(x, y + 100)
    assert r2_identity(source, target).uniform < -10


@pytest.mark.parametrize("value", [0.0, 1 / 3, -1e5])
@pytest.mark.parametrize("hit", [True, False])
def test_a_constant_coordinate_scores_one_if_hit_and_zero_if_not(value, hit):
    x, y = noisy(64, 5, 3)
    y[:, 1] = value
    source, (target,) = sums(x, y)
    fitted = solve("affine", source, [target])[0]
    if not hit:
        fitted = Affine.of(fitted.weight, bias=fitted.bias + torch.tensor([0, 0.5, 0]).double())
    others = r2_score(y[:, [0, 2]].numpy(), fitted(x)[:, [0, 2]].numpy())
    assert r2(fitted, source, target).uniform == pytest.approx((2 * others + hit) / 3, abs=1e-10)


def test_where_nothing_varies_the_weighted_score_is_the_uniform_one():
    x = random(20, 3)
    source, (target,) = sums(x, torch.ones(20, 2).double())
    ones = Affine.of(torch.zeros(2, 3).double(), bias=torch.tensor([1.0, 2.0]).double())
    assert r2(ones, source, target) == (0.5, 0.5)


def test_a_map_of_another_shape_is_refused():
    source, targets = sums(*noisy(30, 5, 4))
    with pytest.raises(BadMoments, match="the map goes 3 → 4, but these moments pair 5 with 4"):
        r2(Affine.of(random(4, 3)), source, targets[0])
    with pytest.raises(BadMoments, match="5 coordinates and the target 4"):
        r2_identity(source, targets[0])


def test_sums_that_are_not_finite_are_refused():
    source, targets = sums(*noisy(30, 4, 4))
    targets[0].sum_squares[2] = float("nan")
    with pytest.raises(BadMoments, match="target 0's sum_squares holds NaN"):
        r2_identity(source, targets[0])
