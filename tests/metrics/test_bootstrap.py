"""Intervals: seeded, by document, and right as often as they say."""

import numpy as np
import pytest

from layerjump.metrics.bootstrap import document_weights, mean_interval, statistic_interval


def clustered(generator, documents=40, each=12):
    """Values that share much within a document, about a true mean of 2."""
    of = np.repeat(np.arange(documents), each)
    values = 2 + generator.normal(size=documents)[of] + 0.3 * generator.normal(size=len(of))
    return values, of


def test_the_mean_is_the_plain_mean_and_lies_inside():
    values, of = clustered(np.random.default_rng(0))
    mean, low, high = mean_interval(values, of)
    assert mean == pytest.approx(values.mean(), rel=1e-12)
    assert low < mean < high


def test_documents_may_come_in_any_order_under_any_number():
    values, of = clustered(np.random.default_rng(0))
    order = np.random.default_rng(1).permutation(len(of))
    assert mean_interval(values, of) == pytest.approx(mean_interval(values[order], 1000 + 7 * of[order]), rel=1e-12)


def test_the_interval_is_that_of_resampled_documents():
    """Against resampling written out, document by document."""
    values, of = clustered(np.random.default_rng(0), documents=7, each=3)
    values, of = values[:-2], of[:-2]  # documents need not be of one length
    parts = [values[of == document] for document in range(7)]
    means = []
    for weights in document_weights(7, 1000, 3):
        drawn = [part for part, weight in zip(parts, weights, strict=True) for _ in range(int(weight))]
        means.append(np.concatenate(drawn).mean())
    _, low, high = mean_interval(values, of, seed=3)
    assert (low, high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), rel=1e-12)
    ends = statistic_interval(lambda weight: values @ weight / weight.sum(), of, draws=1000, seed=3)
    assert ends == pytest.approx((low, high), rel=1e-12)


def test_it_covers_the_truth_about_as_often_as_it_says():
    hits, naive = 0, 0
    for seed in range(200):
        values, of = clustered(np.random.default_rng(seed))
        _, low, high = mean_interval(values, of, draws=300)
        hits += low <= 2 <= high
        _, low, high = mean_interval(values, np.arange(len(of)), draws=300)
        naive += low <= 2 <= high
    assert 0.88 <= hits / 200 <= 0.99
    assert naive / 200 < 0.7  # what resampling positions would claim


def test_axes_before_the_last_are_kept():
    values, of = clustered(np.random.default_rng(0))
    mean, low, high = mean_interval(np.stack([values, values + 1]).reshape(2, 1, -1), of)
    assert mean.shape == low.shape == high.shape == (2, 1)
    assert high[1, 0] == pytest.approx(high[0, 0] + 1)


def test_the_same_seed_gives_the_same_interval_and_another_one_another():
    values, of = clustered(np.random.default_rng(0))
    assert mean_interval(values, of, seed=1) == mean_interval(values, of, seed=1)
    assert mean_interval(values, of, seed=1) != mean_interval(values, of, seed=2)


def test_one_document_has_an_interval_of_no_width():
    mean, low, high = mean_interval([1.0, 2.0], [4, 4])
    assert mean == low == high == 1.5


def test_a_statistic_that_is_never_defined_has_no_interval():
    assert np.isnan(statistic_interval(lambda _: np.nan, [0, 1])).all()
