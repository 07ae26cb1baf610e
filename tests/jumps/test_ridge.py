import pytest
import torch
from helpers.regression_data import error, noisy, random, sums
from sklearn.linear_model import Ridge

from layerjump.errors import BadEstimator, BadMoments
from layerjump.jumps.estimators.least_squares import STRENGTHS
from layerjump.jumps.estimators.registry import solve
from layerjump.jumps.moments import Source


def few_rows(seed=0):
    """So little text for so many coordinates that some shrinkage must help."""
    return noisy(40, 30, 8, noise=3.0, seed=seed)


@pytest.mark.parametrize("strength", [1e-4, 0.1, 10.0])
def test_it_is_sklearns_ridge(strength):
    x, y = noisy(100, 9, 7)
    source, targets = sums(x, y)
    alpha = strength * 100 * float(x.var(0, correction=0).mean())
    theirs = Ridge(alpha=alpha).fit(x.numpy(), y.numpy()).predict(x.numpy())
    found = solve("ridge", source, targets, strength=strength)[0]
    torch.testing.assert_close(found(x), torch.from_numpy(theirs), rtol=1e-9, atol=1e-9)
    assert found.strength == strength


def test_no_strength_is_least_squares_and_endless_strength_is_the_mean():
    x, y = noisy(100, 9, 7)
    source, targets = sums(x, y)
    wanted = solve("affine", source, targets)[0](x)
    distances = [float((solve("ridge", source, targets, strength=s)[0](x) - wanted).norm()) for s in (1e-3, 1e-6, 0.0)]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 1e-9
    mean = solve("ridge", source, targets, strength=1e12)[0](x)
    torch.testing.assert_close(mean, y.mean(0).expand_as(y), rtol=1e-6, atol=1e-6)


def test_weights_shrink_as_strength_grows():
    source, targets = sums(*few_rows())
    norms = [float(solve("ridge", source, targets, strength=s)[0].weight.norm()) for s in STRENGTHS]
    assert norms == sorted(norms, reverse=True)


def test_doubled_inputs_with_twice_the_strength_predict_the_same():
    x, y = noisy(60, 5, 4)
    doubled = torch.cat([x, x], 1)
    once = solve("ridge", *sums(x, y), strength=0.1)[0]
    twice = solve("ridge", *sums(doubled, y), strength=0.2)[0]
    torch.testing.assert_close(twice(doubled), once(x), rtol=1e-9, atol=1e-9)


def test_strength_has_no_unit():
    x, y = noisy(60, 5, 4)
    small, large = solve("ridge", *sums(x, y), strength=0.1)[0], solve("ridge", *sums(1e3 * x, y), strength=0.1)[0]
    torch.testing.assert_close(large(1e3 * x), small(x), rtol=1e-9, atol=1e-9)


def test_a_huge_coordinate_does_not_spoil_the_small_ones():
    x, y = noisy(200, 8, 6)
    x[:, 3] *= 1e4
    source, targets = sums(x, y)
    found, wanted = solve("ridge", source, targets, strength=0.0)[0], solve("affine", source, targets)[0]
    torch.testing.assert_close(found(x), wanted(x), rtol=1e-6, atol=1e-6)


def test_the_chosen_strength_is_the_best_of_the_grid_by_brute_force():
    x, y = few_rows()
    held_x, held_y = few_rows(seed=1)
    # Different tasks want different strengths; the shift makes the two splits' means differ.
    ys, held = ([y, y + 30 * random(40, 8), 0.01 * y + x[:, :8]], [held_y + 0.5, held_y, 0.01 * held_y + held_x[:, :8]])
    source, targets = sums(x, *ys)
    found = solve("ridge", source, targets, validation=sums(held_x, *held))
    for target, map_, rows in zip(targets, found, held, strict=True):
        tried = [solve("ridge", source, [target], strength=s)[0] for s in STRENGTHS]
        best = min(tried, key=lambda m, rows=rows: error(m, held_x, rows))
        assert map_.strength == best.strength
        torch.testing.assert_close(map_.weight, best.weight)
    assert len({map_.strength for map_ in found}) == 3


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_counts_that_the_two_splits_have_different_means(seed):
    x, y = few_rows()
    source, targets = sums(x, y)
    # The rows are those of the fit, moved: were the move not counted, nothing would be shrunk.
    assert solve("ridge", source, targets, validation=(source, targets))[0].strength == STRENGTHS[0]
    held_x, held_y = x + 2 * random(30, seed=seed), y + 4 * random(8, seed=seed)
    found = solve("ridge", source, targets, validation=sums(held_x, held_y))[0]
    tried = [solve("ridge", source, targets, strength=s)[0] for s in STRENGTHS]
    assert found.strength == min(tried, key=lambda m: error(m, held_x, held_y)).strength
    assert found.strength > STRENGTHS[0]


def test_a_source_that_does_not_vary_predicts_the_mean():
    x, y = torch.full((40, 3), 1 / 3).double(), random(40, 8)
    source, targets = sums(x, y)
    found = solve("ridge", source, targets, validation=sums(random(40, 3, seed=1), y))[0]
    torch.testing.assert_close(found(x), y.mean(0).expand_as(y))


def test_with_little_text_the_chosen_strength_beats_least_squares_on_a_third_split():
    source, targets = sums(*few_rows())
    found = solve("ridge", source, targets, validation=sums(*few_rows(seed=1)))[0]
    test = few_rows(seed=2)
    assert error(found, *test) < 0.8 * error(solve("affine", source, targets)[0], *test)


def test_settings_that_make_no_sense_are_refused():
    source, targets = sums(*few_rows())
    with pytest.raises(BadEstimator, match="at least 0, got -1"):
        solve("ridge", source, targets, strength=-1.0)
    with pytest.raises(BadEstimator, match="needs a strength or"):
        solve("ridge", source, targets, strength=1.0, validation=(source, targets))
    with pytest.raises(BadEstimator, match="expected 2 targets in the validation split, got 1"):
        solve("ridge", source, targets * 2, validation=(source, targets))
    with pytest.raises(BadMoments, match="0 rows"):
        solve("ridge", source, targets, validation=(Source(0, source.mean, source.scatter), targets))
    with pytest.raises(BadMoments, match="validation source has 2 coordinates"):
        solve("ridge", source, targets, validation=sums(random(9, 2), random(9, 8)))
