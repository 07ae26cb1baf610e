"""Sums that are hard to solve are solved as well as they can be; what cannot be is refused."""

import pytest
import torch
from helpers.regression_data import BY_SOURCE, CLOSE, error, fit, noisy, random, sums
from hypothesis import given, settings
from hypothesis import strategies as st

from layerjump.errors import BadEstimator, BadMoments
from layerjump.jumps.estimators.registry import ESTIMATORS, solve
from layerjump.jumps.moments import Source, Target

# ---- hard sums -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mat", "affine"])
@pytest.mark.parametrize("n", [1, 2, 7, 20])
def test_fewer_rows_than_coordinates_are_interpolated(name, n):
    x, y = random(n, 20) + 1, random(n, 5, seed=1)
    torch.testing.assert_close(fit(name, x, y)(x), y, rtol=1e-7, atol=1e-7)


def test_the_least_norm_solution_is_the_one_lstsq_finds_in_divided_coordinates():
    x, y = random(9, 20) * torch.logspace(0, 4, 20).double(), random(9, 5, seed=1)
    scale = x.square().sum(0).sqrt()
    wanted = torch.linalg.lstsq(x / scale, y, driver="gelsd").solution.mT / scale
    torch.testing.assert_close(fit("mat", x, y).weight, wanted, rtol=1e-6, atol=1e-12)


def test_a_constant_coordinate_is_ignored_by_affine_and_is_mats_intercept():
    x, y = noisy(90, 5, 4)
    with_constant = torch.cat([x, torch.full((90, 1), 1e3 / 3).double()], 1)
    plain = fit("affine", x, y)
    beside = fit("affine", with_constant, y)
    assert torch.equal(beside.weight[:, -1], torch.zeros(4).double())
    torch.testing.assert_close(beside.weight[:, :-1], plain.weight, **CLOSE)
    torch.testing.assert_close(fit("mat", with_constant, y)(with_constant), plain(x), **CLOSE)


def test_a_coordinate_that_is_always_zero_gets_no_weight():
    x, y = noisy(90, 5, 4)
    x[:, 2] = 0
    assert torch.equal(fit("mat", x, y).weight[:, 2], torch.zeros(4).double())


@pytest.mark.parametrize("name", ["mat", "affine", "low-rank", "n-njtc"])
@pytest.mark.parametrize("huge", [1e4, 1e8])
def test_a_huge_coordinate_does_not_spoil_the_small_ones(name, huge):
    x, y = noisy(200, 8, 6)
    scaled = x.clone()
    scaled[:, 3] *= huge
    torch.testing.assert_close(fit(name, scaled, y)(scaled), fit(name, x, y)(x), **CLOSE)


def test_a_nearly_singular_source_falls_back_without_large_weights():
    x, y = noisy(200, 6, 6)
    twin = x[:, :1] * (1 + 1e-9 * random(200, 1, seed=3))
    weight = fit("affine", torch.cat([x, twin], 1), y).weight
    assert weight.abs().max() < 100


def test_products_formed_in_float32_are_solved_to_their_own_precision():
    # Float32 keeps 7 digits: singular directions of these sums are noise of 1e-7, of either sign.
    x, y = noisy(400, 6, 6)
    x = torch.cat([x, x @ random(6, 6, seed=7)], 1)
    source, (target,) = sums(x, y)
    xc, yc = (x - x.mean(0)).float(), (y - y.mean(0)).float()
    float32_products = Source(400, source.mean, (xc.mT @ xc).double())
    rough_target = Target(target.mean, (xc.mT @ yc).double(), target.sum_squares)
    found = solve("affine", float32_products, [rough_target])[0]
    wanted = solve("affine", source, [target])[0]
    torch.testing.assert_close(found(x), wanted(x), rtol=1e-3, atol=1e-3)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(BY_SOURCE),
    n=st.integers(1, 20),
    rank=st.integers(0, 6),
    exponent=st.integers(-12, 12),
    offset=st.sampled_from([0.0, 1.0, 1e6]),
    seed=st.integers(0, 50),
)
def test_maps_are_finite_and_fit_no_worse_than_the_mean(name, n, rank, exponent, offset, seed):
    x = random(n, rank, seed=seed) @ random(rank, 6, seed=seed + 1)
    x = x * 10.0 ** torch.linspace(0, exponent, 6).double() + offset
    y = random(n, 6, seed=seed + 2)
    found = fit(name, x, y)
    assert torch.isfinite(found.weight).all()
    assert torch.isfinite(found(x)).all()
    if name in ("affine", "ridge", "low-rank", "n-njtc"):
        assert error(found, x, y) <= (y - y.mean(0)).square().sum() * (1 + 1e-6) + 1e-6


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in BY_SOURCE if ESTIMATORS[name].same_width])
def test_square_estimators_refuse_other_shapes(name):
    x, y = noisy(30, 5, 4)
    with pytest.raises(BadMoments, match="5 coordinates and the target 4"):
        fit(name, x, y)


@pytest.mark.parametrize("name", [name for name in BY_SOURCE if not ESTIMATORS[name].same_width])
@pytest.mark.parametrize(("dx", "dy"), [(5, 3), (3, 5)])
def test_the_others_map_between_any_widths(name, dx, dy):
    x, y = noisy(30, dx, dy)
    assert fit(name, x, y)(x).shape == y.shape


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_sums_that_are_not_finite_are_refused(bad):
    source, targets = sums(*noisy(30, 5, 4))
    source.scatter[1, 2] = bad
    with pytest.raises(BadMoments, match="source's scatter holds NaN or infinite"):
        solve("affine", source, targets)


def test_empty_sums_are_refused():
    source, targets = sums(*noisy(30, 5, 4))
    with pytest.raises(BadMoments, match="0 rows"):
        solve("affine", Source(0, source.mean, source.scatter), targets)


def test_an_unknown_estimator_is_refused_and_the_known_ones_are_named():
    with pytest.raises(BadEstimator, match="unknown estimator 'ols'; choose one of identity, mean-shift, mat"):
        solve("ols", *sums(*noisy(30, 5, 4)))


def test_a_setting_the_estimator_does_not_have_is_refused():
    with pytest.raises(BadEstimator, match="affine has no setting rank"):
        solve("affine", *sums(*noisy(30, 5, 4)), rank=3)


def test_a_setting_it_cannot_do_without_is_asked_for():
    with pytest.raises(BadEstimator, match="low-rank needs a rank"):
        solve("low-rank", *sums(*noisy(30, 5, 4)))
    with pytest.raises(BadEstimator, match="a strength or"):
        solve("ridge", *sums(*noisy(30, 5, 4)))
