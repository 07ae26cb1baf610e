"""Sums: the same answer under any chunking, order, merge and save, and the right one."""

import pytest
import torch
from helpers.regression_data import noisy, random, sums
from hypothesis import given, settings
from hypothesis import strategies as st

from layerjump.errors import BadMoments
from layerjump.jumps.moments import Moments, Source, Target, check_moments, is_constant, pool
from layerjump.jumps.reservoir import Reservoir, sampling_keys
from layerjump.models.sites import Site

A, B, C = Site(0), Site(1), Site(2)
PAIRS = [(A, C), (B, C), (A, B)]
WIDTH = {A: 5, B: 5, C: 3}


def rows(n: int, *, sinks: int = 0, dtype=torch.float64, seed: int = 0) -> dict[Site, torch.Tensor]:
    """States with a large mean, and some rows of huge norm."""
    generator = torch.Generator().manual_seed(seed)
    made = {s: torch.randn(n, d, generator=generator, dtype=torch.float64) for s, d in WIDTH.items()}
    made = {site: x + 30 * torch.arange(1, x.shape[1] + 1) for site, x in made.items()}
    for x in made.values():
        x[:sinks] *= 500
    return {site: x.to(dtype) for site, x in made.items()}


def take(states, index):
    return {site: x[index] for site, x in states.items()}


def summed(states, chunks, products=torch.float64) -> Moments:
    moments = Moments(PAIRS, reservoir=7, products=products)
    keys = sampling_keys(torch.arange(len(states[A])), torch.zeros(len(states[A])), seed=3)
    for chunk in chunks:
        moments.add(take(states, chunk), keys=keys[chunk])
    return moments


def reference(states, a, b):
    x, y = states[a].double(), states[b].double()
    return (x - x.mean(0)).mT @ (y - y.mean(0))


def assert_same(one: Moments, other: Moments, *, tolerance: float) -> None:
    assert one.n == other.n
    for a, b in PAIRS:
        left, right = one.target(a, b), other.target(a, b)
        for x, y in [(one.source(a).scatter, other.source(a).scatter), (left.cross, right.cross)]:
            assert (x - y).abs().max() <= tolerance * y.abs().max()
        assert torch.allclose(left.mean, right.mean, rtol=tolerance)
        assert torch.allclose(left.sum_squares, right.sum_squares, rtol=tolerance)
        assert one.mean_angle((a, b)) == pytest.approx(other.mean_angle((a, b)), rel=1e-9, nan_ok=True)
    assert torch.equal(one.reservoir.keys, other.reservoir.keys)
    for site in WIDTH:
        assert torch.equal(one.reservoir.states[site], other.reservoir.states[site])


@pytest.mark.parametrize("sinks", [0, 4])
def test_sums_are_the_textbook_ones(sinks):
    states = rows(200, sinks=sinks)
    moments = summed(states, [slice(0, 50), slice(50, 200)])
    for a, b in PAIRS:
        target = moments.target(a, b)
        assert torch.allclose(moments.source(a).scatter, reference(states, a, a), rtol=1e-10, atol=1e-6)
        assert torch.allclose(target.cross, reference(states, a, b), rtol=1e-10, atol=1e-6)
        assert torch.allclose(target.sum_squares, reference(states, b, b).diagonal(), rtol=1e-10)
        assert torch.allclose(target.mean, states[b].mean(0), rtol=1e-12)
    assert moments.mean_norm(A) == pytest.approx(states[A].norm(dim=1).mean().item())


def test_angles_are_those_between_the_raw_states():
    states = rows(40)
    moments = summed(states, [slice(0, 40)])
    cosine = torch.nn.functional.cosine_similarity(states[A], states[B])
    assert moments.mean_cosine((A, B)) == pytest.approx(cosine.mean().item())
    assert moments.mean_angle((A, B)) == pytest.approx((cosine.arccos() / torch.pi).mean().item())
    assert moments.mean_angle((A, C)) != moments.mean_angle((A, C))  # widths differ: NaN


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(1, 119), max_size=6, unique=True), order=st.randoms(), sinks=st.sampled_from([0, 3]))
def test_any_chunking_and_order_gives_the_same_sums(cuts, order, sinks):
    states = rows(120, sinks=sinks)
    edges = [0, *sorted(cuts), 120]
    chunks = [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    order.shuffle(chunks)
    assert_same(summed(states, chunks), summed(states, [slice(0, 120)]), tolerance=1e-9)


@settings(max_examples=25, deadline=None)
@given(cut=st.integers(1, 119))
def test_merging_is_summing_everything(cut):
    """The two halves have different shifts; merging moves one to the other's."""
    states = rows(120, sinks=2)
    left, right = summed(states, [slice(0, cut)]), summed(states, [slice(cut, 120)])
    left.merge(right)
    assert_same(left, summed(states, [slice(0, 120)]), tolerance=1e-9)


def test_merging_into_and_with_nothing():
    states = rows(30)
    full, empty = summed(states, [slice(0, 30)]), Moments(PAIRS, reservoir=7)
    empty.merge(full)
    assert_same(empty, full, tolerance=0)
    full.merge(Moments(PAIRS, reservoir=7))
    assert_same(full, empty, tolerance=0)


def test_float32_states_are_summed_exactly():
    states = rows(5000, sinks=20, dtype=torch.float32)
    moments = summed(states, [slice(0, 2500), slice(2500, 5000)])
    for a, b in PAIRS:
        exact = reference(states, a, b)
        assert (moments.target(a, b).cross - exact).abs().max() < 1e-12 * exact.abs().max()


def test_float32_products_stay_within_a_stated_tolerance():
    """Products of 1,024 float32 rows round at about 1e-6 of the largest entry; sinks must not spoil the rest."""
    states = rows(5000, sinks=20, dtype=torch.float32)
    ordinary = take(states, slice(20, 5000))
    for x, tolerance in ((ordinary, 1e-5), (states, 1e-11)):
        moments = summed(x, [slice(0, 2500), slice(2500, 5000)], products=torch.float32)
        for site in (A, B):
            exact = reference(x, site, site)
            # With sinks, a hundred million times larger, the sums are off by no more than without them.
            error = (moments.source(site).scatter - exact).abs().max()
            assert error < tolerance * exact.abs().max()


def test_half_precision_states_are_widened():
    states = rows(64, dtype=torch.bfloat16)
    moments = summed(states, [slice(0, 64)], products=torch.float32)
    assert torch.allclose(moments.target(A, C).cross, reference(states, A, C), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_states_name_the_site(bad):
    states = rows(20)
    states[B][3, 1] = bad
    with pytest.raises(BadMoments, match="site 1 hold NaN or infinite"):
        summed(states, [slice(0, 20)])


def test_other_widths_and_pairs_are_refused():
    moments = summed(rows(20), [slice(0, 20)])
    wrong = rows(20) | {C: torch.zeros(20, 4, dtype=torch.float64)}
    with pytest.raises(BadMoments, match="width 3 at site 2, got 4"):
        moments.add(wrong)
    with pytest.raises(BadMoments, match="same number of rows"):
        moments.add(rows(20) | {C: torch.zeros(19, 3, dtype=torch.float64)})
    with pytest.raises(BadMoments, match="cannot be merged"):
        moments.merge(Moments([(A, B)]))


def test_full_targets_have_the_scatter_of_a_site_that_is_only_a_target():
    states = rows(60)
    moments = Moments(PAIRS, full_targets=True)
    moments.add(states)
    assert torch.allclose(moments.source(C).scatter, reference(states, C, C), rtol=1e-10, atol=1e-6)


def test_the_reservoir_is_a_fair_sample():
    """Every row is equally likely: over many seeds each of 40 rows is kept about a quarter of the time."""
    kept = torch.zeros(40)
    for seed in range(400):
        keys = sampling_keys(torch.arange(40), torch.arange(40) % 3, seed=seed)
        kept[keys.argsort()[:10]] += 1
    assert (kept > 60).all()
    assert (kept < 140).all()


# ---- the reservoir: a sample of all positions, also where a document is many sequences long


def test_positions_of_a_long_documents_sequences_have_keys_of_their_own():
    sequence, position = torch.arange(300).repeat_interleave(64), torch.arange(64).repeat(300)
    keys = sampling_keys(torch.zeros(300 * 64), position, sequence, seed=0)
    assert len(keys.unique()) == 300 * 64
    first = sequence == 0
    assert torch.equal(keys[first], sampling_keys(torch.zeros(64), torch.arange(64), seed=0))


def test_the_sample_of_one_long_document_is_spread_over_its_positions():
    sequence, position = torch.arange(300).repeat_interleave(64), torch.arange(64).repeat(300)
    kept = Reservoir([A], 2_000)
    kept.add({A: position[:, None].double()}, sampling_keys(0 * position, position, sequence, seed=0))
    counts = torch.bincount(kept.states[A][:, 0].long(), minlength=64)
    assert counts.min() > 10  # 31 of each on average
    assert counts.max() < 60


def test_a_long_documents_sample_does_not_depend_on_the_order_of_its_sequences():
    sequence, position = torch.arange(40).repeat_interleave(16), torch.arange(16).repeat(40)
    states = {site: torch.randn(640, 3, dtype=torch.float64) for site in (A, B)}
    keys = sampling_keys(0 * position, position, sequence, seed=1)
    found = []
    for order in (torch.arange(640), torch.arange(640).flip(0)):
        sums = Moments([(A, B)], reservoir=50)
        for rows in order.split(37):
            sums.add({site: state[rows] for site, state in states.items()}, keys=keys[rows])
        found.append(sums.reservoir.states[A])
    assert torch.equal(*found)


# ---- centred moments


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
    for name in ("mean", "cross", "sum_squares"):
        torch.testing.assert_close(getattr(target, name), getattr(wanted, name))


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
        ({"cross": torch.full((5, 4), torch.nan).double()}, "target 0's cross holds NaN"),
    ],
)
def test_sums_that_do_not_fit_together_are_refused(change, message):
    source, (target,) = sums(*noisy(30, 5, 4))
    fields = {name: getattr(target, name) for name in ("mean", "cross", "sum_squares")}
    with pytest.raises(BadMoments, match=message):
        check_moments(source, [Target(**{**fields, **change})])


def test_a_source_without_rows_is_refused():
    with pytest.raises(BadMoments, match="these moments hold 0 rows"):
        check_moments(Source(0, random(2), random(2, 2)), [])
