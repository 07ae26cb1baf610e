import pytest
import torch
from helpers.regression_data import error, noisy, random, sums

from layerjump.errors import BadEstimator
from layerjump.jumps.estimators.n_njtc import njtc_rank
from layerjump.jumps.estimators.ojfa import ojfa
from layerjump.jumps.estimators.registry import solve
from layerjump.jumps.maps import Affine
from layerjump.jumps.score_from_moments import r2


def uneven(n=150, dx=9, dy=7, seed=0):
    """Inputs and outputs whose directions differ widely in size: where low rank has to choose."""
    x, y = noisy(n, dx, dy, noise=1.0, seed=seed)
    return x * torch.logspace(0, 2, dx).double(), y * torch.logspace(1, -1, dy).double()


def metric_error(map_, x, y, metric):
    off = map_(x) - y
    return float(((off @ metric) * off).sum())


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_the_error_is_that_of_least_squares_and_the_dropped_singular_values(rank):
    x, y = uneven()
    source, targets = sums(x, y)
    full = solve("affine", source, targets)[0]
    fitted = full(x) - y.mean(0)
    dropped = torch.linalg.svdvals(fitted)[rank:].square().sum()
    found = solve("low-rank", source, targets, rank=rank)[0]
    assert error(found, x, y) == pytest.approx(error(full, x, y) + float(dropped), rel=1e-10)
    assert torch.linalg.matrix_rank(found.weight) == rank


def test_it_beats_cutting_the_svd_of_the_weight():
    x, y = uneven()
    source, targets = sums(x, y)
    u, s, vh = torch.linalg.svd(solve("affine", source, targets)[0].weight, full_matrices=False)
    cut = (u[:, :2] * s[:2]) @ vh[:2]
    truncated = Affine.of(cut, bias=y.mean(0) - cut @ x.mean(0))
    assert error(solve("low-rank", source, targets, rank=2)[0], x, y) < 0.9 * error(truncated, x, y)


def test_full_rank_is_least_squares_in_any_metric():
    x, y = uneven()
    source, targets = sums(x, y)
    wanted = solve("affine", source, targets)[0].weight
    root = random(7, 7, seed=3)
    for metric in (None, root @ root.mT):
        found = solve("low-rank", source, targets, rank=7, metric=metric)[0].weight
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


def test_the_metric_version_wins_in_its_metric_and_loses_in_the_plain_one():
    x, y = uneven()
    source, targets = sums(x, y)
    unembedding = random(40, 7, seed=3) * torch.logspace(-1, 1, 7).double()
    metric = unembedding.mT @ unembedding
    plain = solve("low-rank", source, targets, rank=2)[0]
    tuned = solve("low-rank", source, targets, rank=2, metric=metric)[0]
    assert metric_error(tuned, x, y, metric) < 0.9 * metric_error(plain, x, y, metric)
    assert error(tuned, x, y) > error(plain, x, y)


def test_the_metric_version_is_the_plain_one_of_transformed_outputs():
    x, y = uneven()
    root = random(7, 7, seed=3)
    tuned = solve("low-rank", *sums(x, y), rank=2, metric=root.mT @ root)[0]
    plain = solve("low-rank", *sums(x, y @ root.mT), rank=2)[0]
    torch.testing.assert_close(tuned(x) @ root.mT, plain(x), rtol=1e-7, atol=1e-7)


def test_a_metric_that_scales_changes_nothing():
    x, y = uneven()
    source, targets = sums(x, y)
    wanted = solve("low-rank", source, targets, rank=3)[0].weight
    found = solve("low-rank", source, targets, rank=3, metric=1e-9 * torch.eye(7).double())[0].weight
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("rank", [2, 5])
def test_a_singular_metric_is_minimised_where_it_sees_and_left_alone_elsewhere(rank):
    x, y = uneven()
    source, targets = sums(x, y)
    seen = random(3, 7, seed=3)
    found = solve("low-rank", source, targets, rank=rank, metric=seen.mT @ seen)[0]
    wanted = solve("low-rank", *sums(x, y @ seen.mT), rank=min(rank, 3))[0]
    torch.testing.assert_close(found(x) @ seen.mT, wanted(x), rtol=1e-7, atol=1e-7)
    blind = torch.linalg.svd(seen)[2][3:]
    assert (found.weight.mT @ blind.mT).abs().max() < 1e-9
    torch.testing.assert_close(found(x.mean(0)), y.mean(0), rtol=1e-9, atol=1e-9)


def test_error_falls_with_rank():
    x, y = uneven()
    source, targets = sums(x, y)
    errors = [error(solve("low-rank", source, targets, rank=r)[0], x, y) for r in range(1, 8)]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("rank", [0, -1, 8])
def test_a_rank_the_map_cannot_have_is_refused(rank):
    with pytest.raises(BadEstimator, match="a rank from 1 to 7"):
        solve("low-rank", *sums(*uneven()), rank=rank)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (torch.eye(4).double(), r"shape \(7, 7\), got \(4, 4\)"),
        (torch.full((7, 7), float("nan")).double(), "NaN or infinite"),
        (-torch.eye(7).double(), "positive semi-definite"),
    ],
)
def test_a_metric_that_is_none_is_refused(metric, message):
    with pytest.raises(BadEstimator, match=message):
        solve("low-rank", *sums(*uneven()), rank=2, metric=metric)


# ---- N-NJTC --------------------------------------------------------------------------------------


def test_normalising_the_input_changes_no_prediction():
    x, y = uneven()
    normalised = (x - x.mean(0)) / x.std(0, correction=0)
    plain, normal = solve("n-njtc", *sums(x, y))[0], solve("n-njtc", *sums(normalised, y))[0]
    torch.testing.assert_close(plain(x), normal(normalised), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("d", "rank", "full", "narrow", "normalised", "percent", "levels", "all_full", "all_narrow"),
    [
        (1600, 16, 2_560_000, 51_200, 54_400, 97.9, 47, 120.3, 2.56),
        (3072, 30, 9_437_184, 184_320, 190_464, 98.0, 31, 292.6, 5.90),
        (4096, 40, 16_777_216, 327_680, 335_872, 98.0, 31, 520.1, 10.4),
    ],
)
def test_parameters_are_those_of_the_papers_models(
    d, rank, full, narrow, normalised, percent, levels, all_full, all_narrow
):
    assert njtc_rank(d) == rank
    assert (d * d, 2 * d * rank, 2 * d * rank + 2 * d) == (full, narrow, normalised)
    assert round(100 * (1 - normalised / full), 1) == percent
    assert round(levels * full / 1e6, 1) == all_full
    assert levels * normalised / 1e6 == pytest.approx(all_narrow, rel=0.005)


def test_a_narrow_map_stores_what_the_count_says_and_an_intercept():
    d = 250
    x = random(300, d)
    found = solve("n-njtc", *sums(x, x.roll(1, 1)))[0]
    assert found.n_parameters == 2 * d * njtc_rank(d) + d
    assert njtc_rank(64) == 1


# ---- one jump for all levels ---------------------------------------------------------------------


def levels(seed=0, n=(60, 90, 120)):
    """Rows of three levels that drift towards a common target."""
    rows = []
    for k, size in enumerate(n):
        x, y = uneven(size, 7, 7, seed=seed + k)
        rows.append((x + 0.1 * k * y + k, y))
    return rows


def level_sums(rows):
    pairs = [sums(x, y) for x, y in rows]
    return [source for source, _ in pairs], [targets[0] for _, targets in pairs]


def test_best_level_is_the_best_by_brute_force():
    sources, targets = level_sums(levels())
    validation = list(zip(*level_sums(levels(seed=50)), strict=True))
    jump, level = ojfa(sources, targets, rank=2, validation=validation, pooling="best-level")
    own = [solve("low-rank", s, [t], rank=2)[0] for s, t in zip(sources, targets, strict=True)]
    means = [sum(r2(map_, *pair).uniform for pair in validation) / 3 for map_ in own]
    assert level == max(range(3), key=means.__getitem__)
    assert torch.equal(jump.weight, own[level].weight)


def test_pooled_is_the_default_and_the_fit_to_all_rows_together():
    rows = levels()
    jump, level = ojfa(*level_sums(rows), rank=2)
    x, y = torch.cat([x for x, _ in rows]), torch.cat([y for _, y in rows])
    wanted = solve("low-rank", *sums(x, y), rank=2)[0]
    torch.testing.assert_close(jump(x), wanted(x), rtol=1e-9, atol=1e-9)
    assert level is None


def test_one_jump_needs_a_validation_split_or_pooling():
    sources, targets = level_sums(levels())
    with pytest.raises(BadEstimator, match="validation split"):
        ojfa(sources, targets, rank=2, pooling="best-level")
    with pytest.raises(BadEstimator, match="'best-level' or 'pooled'"):
        ojfa(sources, targets, rank=2, pooling="sscs")
    with pytest.raises(BadEstimator, match="2 sources and 3 targets"):
        ojfa(sources[:2], targets, rank=2, pooling="pooled")
    with pytest.raises(BadEstimator, match="0 sources"):
        ojfa([], [], rank=2, pooling="pooled")
