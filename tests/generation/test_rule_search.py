"""Probes, rule search and costs, on synthetic calibration sets whose answer is known; the binomial test."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.linear_model import LogisticRegression

from layerjump.generation.calibration.calibrate import binomial_tail, loosest_threshold
from layerjump.generation.calibration.dataset import CalibrationSet, candidate_levels
from layerjump.generation.calibration.exit_draft_search import break_even_acceptance, draft_cost, search_drafts
from layerjump.generation.calibration.result import Costs
from layerjump.generation.calibration.rule_search import (
    FittedProbes,
    Replay,
    RuleCandidate,
    search_rule,
    single_level_candidates,
)
from layerjump.generation.exit_rules import LevelReading
from layerjump.generation.probes import Probe, fit_logistic, probe_features


def synthetic_set(n=4_000, right=0.9, seed=0):
    """Two levels of a synthetic model whose gap is the probability of a correct token."""
    draw = torch.Generator().manual_seed(seed)
    gap = torch.rand(2, n, generator=draw) ** (1 - right)
    hit = torch.rand(2, n, generator=draw) < gap
    features = torch.cat([torch.logit(gap.clamp(1e-4, 1 - 1e-4))[..., None], torch.ones(2, n, 1)], -1)
    return CalibrationSet((1, 2), hit, gap, features, torch.arange(n))


def test_logistic_is_scikit_learns():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(400, 5, generator=draw).double() * torch.tensor([1, 5, 0.2, 1, 1])
    y = (x[:, 0] - x[:, 2] + torch.randn(400, generator=draw)) > 0
    ones = torch.cat([x, torch.ones(400, 1)], 1)
    found = fit_logistic(ones, y, 0.01)
    z = (x - x.mean(0)) / x.std(0)
    theirs = LogisticRegression(C=1 / (0.01 * 400), tol=1e-10).fit(z.numpy(), y.numpy())
    odds = torch.as_tensor(theirs.decision_function(z.numpy()))
    assert torch.allclose(ones @ found, odds, atol=1e-5)


def test_equal_labels_give_finite_weights():
    x = torch.cat([torch.randn(50, 3), torch.ones(50, 1)], 1)
    weights = fit_logistic(x, torch.ones(50), 0.01)
    assert bool(torch.isfinite(weights).all())
    assert float((x.double() @ weights).min()) > 3


def test_a_probe_reads_the_hidden_state_alone():
    states, position = torch.randn(6, 4) * 100, torch.arange(6)
    features = probe_features(states, position)
    assert torch.allclose(features[:, :4].square().mean(-1), torch.ones(6))
    assert torch.allclose(features[:, 4].exp(), states.square().mean(-1).sqrt(), rtol=1e-5)
    assert features[:, 5].tolist() == position.tolist()
    weights = torch.randn(1, 7)
    probe = Probe(weights, (2,), 0.5)

    def read(level, states):
        raise AssertionError("a probe needs no unembedding")

    look = LevelReading(2, states, position, read)
    assert torch.equal(probe.should_exit(look), features @ weights[0] >= 0)
    alone = [probe.log_odds(2, states[row : row + 1], position[row : row + 1]) for row in range(6)]
    assert torch.allclose(torch.cat(alone), features @ weights[0], rtol=1e-4, atol=1e-4)
    assert look.probe_evaluations == 1


def test_the_binomial_tail():
    assert binomial_tail(0, 20, 0.95) == pytest.approx(1)
    assert binomial_tail(20, 20, 0.95) == pytest.approx(0.95**20)
    direct = sum(math.comb(30, k) * 0.8**k * 0.2 ** (30 - k) for k in range(27, 31))
    assert binomial_tail(27, 30, 0.8) == pytest.approx(direct)
    assert binomial_tail(59, 59, 0.95) < 0.05 < binomial_tail(58, 58, 0.95)


def test_the_guarantee_holds_as_often_as_stated():
    """Of many calibrations of the same rule, at most about 1 − confidence end below the target."""
    candidate = RuleCandidate("gap", (1, 2), FittedProbes({1: torch.zeros(2).double(), 2: torch.zeros(2).double()}, {}))
    truth = candidate.replay(synthetic_set(60_000, 0.7, seed=999), 3)
    below, loose = 0, 0
    for seed in range(60):
        threshold = loosest_threshold(candidate, synthetic_set(300, 0.7, seed=seed), 3, 0.9, 0.8)
        if threshold is not None:
            loose += threshold < 0.9
            below += truth(threshold).agreement < 0.9
    assert below <= 60 * 0.2 + 8
    assert loose > 20  # the guarantee does not hold by never exiting


def test_a_replay_counts_unembeddings_and_probes():
    gap = torch.tensor([[0.9, 0.2, 0.2], [0.0, 0.9, 0.2]])
    right = torch.tensor([[True, True, True], [True, False, True]])
    features = torch.cat([torch.logit(gap, eps=1e-6)[..., None], torch.ones(2, 3, 1)], -1)
    seen = CalibrationSet((1, 2), right, gap, features, torch.arange(3))
    same = torch.tensor([1.0, 0.0]).double()  # a probe with the same log-odds as the gap
    probes = FittedProbes(
        {1: same, 2: same}, {1: torch.tensor([0.0, 1, 0]).double()} | {2: torch.tensor([0.0, 1, 0]).double()}
    )
    for rule_type, unembeddings, probes_evaluated in (
        ("gap", [1, 2, 3], [0, 0, 0]),
        ("probe", [1, 1, 1], [1, 2, 2]),
        ("two-stage", [1, 1, 1], [1, 2, 2]),
    ):
        made = RuleCandidate(rule_type, (1, 2), probes, unembed_above=0.5).replay(seen, 4)(0.8)
        assert made.exit_levels.tolist() == [1, 2, 4]
        assert made.correct.tolist() == [True, False, True]
        assert made.unembeddings.tolist() == unembeddings
        assert made.probe_evaluations.tolist() == probes_evaluated
    costs = Costs(block=10, queued_token=1, unembedding=3, probe=0.5)
    assert made.cost(costs, 4) == pytest.approx(((10 + 3 + 3.5) + (20 + 2 + 3 + 1) + (40 + 3 + 1)) / 3)


def test_levels_that_do_not_pay_are_not_selected():
    seen = synthetic_set(right=0.3)
    probes = FittedProbes({1: torch.tensor([1.0, 0]).double(), 2: torch.tensor([1.0, 0]).double()}, {})
    expensive = Costs(block=1, queued_token=0, unembedding=100, probe=0)
    assert search_rule("gap", probes, seen, expensive, 3, 0.9)[0].levels == ()
    cheap = Costs(block=1, queued_token=0, unembedding=0.001, probe=0)
    assert search_rule("gap", probes, seen, cheap, 3, 0.9)[0].levels != ()


def test_draft_cost():
    costs = Costs(block=1, queued_token=0.5, unembedding=2, probe=0)
    none = torch.zeros(4).long()
    whole = Replay(none + 10, none == 0, none + 1, none)
    assert draft_cost(costs, 10, whole, 4) == 12
    # Three drafts at level 4 (4 blocks and a product each), then a token that goes to 10 with them all.
    left, heads = torch.tensor([4, 4, 4, 10]), torch.tensor([1, 1, 1, 1])
    right = torch.tensor([True, True, True, True])
    played = Replay(left, right, heads, none)
    assert draft_cost(costs, 10, played, 4) == (3 * 6 + 12 + 3 * 6 * 0.5) / 4
    wrong = torch.tensor([True, False, True, True])
    played = Replay(left, wrong, heads, none)
    assert draft_cost(costs, 10, played, 4) == (3 * 6 + 12 + 3 * 6 * 0.5) / 2


def test_drafts_exit_where_they_are_cheapest():
    seen = synthetic_set(right=0.6)
    probes = FittedProbes({1: torch.tensor([1.0, 0]).double(), 2: torch.tensor([1.0, 0]).double()}, {})
    tries = single_level_candidates(("gap", "probe"), probes, (1, 2))
    costs = Costs(block=1, queued_token=0.02, unembedding=0.5, probe=0.001)
    found = search_drafts(tries, seen, costs, 20)
    assert found.candidate.levels == (1,)  # both levels are correct as often, and the first is cheaper
    assert found.cost < 0.7 * costs.full_model(20)
    assert found.threshold is not None
    assert found.threshold < 0.8  # looser than any rule that keeps 95 %
    expensive = Costs(block=1, queued_token=1, unembedding=9, probe=0)
    assert search_drafts(tries, seen, expensive, 3).threshold is None


def test_break_even_acceptance():
    costs = Costs(block=1, queued_token=0.5, unembedding=2, probe=0)
    left, none = torch.tensor([4, 4, 10]), torch.zeros(3).long()
    played = Replay(left, none == 0, none + 1, none)
    assert break_even_acceptance(costs, 10, played) == pytest.approx((4 + 6 * 0.5 + 2) / 12)


def test_candidate_levels():
    assert candidate_levels(range(4)) == (0, 1, 2, 3)
    assert candidate_levels(range(30)) == (0, 1, 2, 3, 4, 6, 9, 14, 20, 29)
    assert candidate_levels(range(1, 30)) == (1, 2, 3, 4, 5, 7, 10, 14, 20, 29)


@pytest.mark.parametrize(("hits", "n"), [(59, 59), (58, 59), (980, 1000), (900, 1000), (0, 7)])
def test_the_binomial_tail_is_exact(hits, n):
    ways = (math.comb(n, k) * 0.95**k * 0.05 ** (n - k) for k in range(hits, n + 1))
    assert binomial_tail(hits, n, 0.95) == pytest.approx(math.fsum(ways), rel=1e-9)
