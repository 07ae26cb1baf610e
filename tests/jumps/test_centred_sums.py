import pytest
import torch
from helpers.regression_data import noisy, random, sums

from layerjump.errors import BadMoments
from layerjump.jumps.statistics import Source, Target, check_moments, is_constant, pool


def test_pooled_sums_are_those_of_all_rows():
    x, y = noisy(100, 5, 4)
    x[:30] += 50  # groups far apart: most of the scatter lies between them
    parts = [slice(0, 30), slice(30, 31), slice(31, 100)]
    pairs = [(source, targets[0]) for source, targets in (sums(x[p], y[p]) for p in parts)]
    source, target = pool(pairs)
    whole, (wanted,) = sums(x, y)
    assert source.n == 100
    for name in ("mean", "scatter"):
        torch.testing.assert_close(getattr(source, name), getattr(whole, name))
    for name in ("mean", "cross", "sum_squares", "scatter"):
        torch.testing.assert_close(getattr(target, name), getattr(wanted, name))


def test_pooling_keeps_the_targets_scatter_only_where_every_group_has_it():
    source, (full,) = sums(*noisy(20, 3, 3))
    thin = Target(full.mean, full.cross, full.sum_squares)
    assert pool([(source, full), (source, thin)])[1].scatter is None


def test_pooling_nothing_is_refused():
    with pytest.raises(BadMoments, match="at least one pair of moments to pool"):
        pool([])


def test_constant_means_constant_up_to_rounding():
    x = torch.cat([torch.full((50, 2), 1e5 / 3).double(), 1e5 / 3 + 1e-2 * random(50, 1)], 1)
    x[:, 1] = 0
    source, _ = sums(x)
    assert is_constant(50, source.mean, source.scatter.diagonal()).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mean": random(3)}, r"target 0's cross of shape \(5, 3\), got \(5, 4\)"),
        ({"sum_squares": random(4, 1)}, r"target 0's sum_squares of shape \(4,\), got \(4, 1\)"),
        ({"cross": random(5, 4).float()}, "target 0's cross in float64, got torch.float32"),
        ({"scatter": torch.full((4, 4), torch.nan).double()}, "target 0's scatter holds NaN"),
    ],
)
def test_sums_that_do_not_fit_together_are_refused(change, message):
    source, (target,) = sums(*noisy(30, 5, 4))
    fields = {name: getattr(target, name) for name in ("mean", "cross", "sum_squares", "scatter")}
    with pytest.raises(BadMoments, match=message):
        check_moments(source, [Target(**{**fields, **change})])


def test_a_source_without_rows_is_refused():
    with pytest.raises(BadMoments, match="these moments hold 0 rows"):
        check_moments(Source(0, random(2), random(2, 2)), [])
