import pytest
import torch
from helpers.regression_data import random, sums

from layerjump.jumps.estimators.least_squares import (
    CholeskyFactor,
    TruncatedFactor,
    factorise,
    factorise_centred,
    factorise_uncentred,
)


def source_of(x):
    return sums(x)[0]


def test_regular_sums_take_the_fast_path_whatever_their_scales():
    x = random(60, 10) * torch.logspace(-8, 8, 10).double() + 3
    for factor in (factorise_centred(source_of(x)), factorise_uncentred(source_of(x))):
        assert isinstance(factor, CholeskyFactor)


@pytest.mark.parametrize("n", [3, 10, 60])
def test_both_paths_solve_the_same_system(n):
    x = random(n, 10)
    matrix = x.mT @ x
    columns = matrix @ random(10, 4, seed=1)
    factor = factorise(matrix, torch.zeros(10).bool(), n_independent=n)
    assert isinstance(factor, CholeskyFactor if n == 60 else CholeskyFactor | TruncatedFactor)
    torch.testing.assert_close(matrix @ factor.solve(columns), columns, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("spoil", "rank"),
    [
        (lambda x: torch.cat([x, x[:, :3]], 1), 10),  # duplicated
        (lambda x: torch.cat([x, x @ random(10, 3, seed=2)], 1), 10),  # dependent
        (lambda x: x[:6], 5),  # wide: centring costs one direction
    ],
)
def test_singular_sums_keep_exactly_the_directions_that_vary(spoil, rank):
    factor = factorise_centred(source_of(spoil(random(60, 10))))
    assert isinstance(factor, TruncatedFactor)
    assert factor.basis.shape[1] == rank


def test_a_constant_coordinate_leaves_the_fast_path():
    x = random(60, 10)
    x[:, 4] = 1 / 3
    factor = factorise_centred(source_of(x))
    assert isinstance(factor, CholeskyFactor)
    assert factor.inverse_scale[4] == 0


def test_a_cholesky_factor_without_a_small_pivot_is_still_seen_as_singular():
    # No pivot of L is small, yet L⁻¹ doubles from row to row.
    lower = (torch.eye(27) - torch.ones(27, 27).tril(-1)).double()
    lower = lower / torch.linalg.vector_norm(lower, dim=1, keepdim=True)
    matrix = lower @ lower.mT
    assert torch.linalg.cholesky(matrix).diagonal().min() > 0.1
    assert isinstance(factorise(matrix, torch.zeros(27).bool(), n_independent=1000), TruncatedFactor)


def test_few_rows_span_few_directions_however_the_sums_are_rounded():
    source = source_of(random(5, 6))
    source.scatter.diagonal().add_(1e-7)
    factor = factorise_centred(source)
    assert isinstance(factor, TruncatedFactor)
    assert factor.basis.shape[1] == 4


def test_a_negative_eigenvalue_shows_how_large_rounding_is():
    rotation = torch.linalg.qr(random(8, 8))[0]
    split = torch.tensor([1, 1, 1, 1, 1, 1, 1e-8, -1e-8]).double()
    factor = factorise((rotation * split) @ rotation.mT, torch.zeros(8).bool(), n_independent=1000)
    assert factor.basis.shape[1] == 6


def test_nothing_that_varies_gives_nothing():
    factor = factorise_centred(source_of(torch.ones(5, 3).double()))
    assert torch.equal(factor.solve(random(3, 2)), torch.zeros(3, 2).double())
