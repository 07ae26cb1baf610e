"""Exit rules: their decisions, CALM's threshold, the ends of the published grid, and a plain loop."""

import json
from pathlib import Path

import pytest
import torch
from helpers.regression_data import random
from hypothesis import given, settings
from hypothesis import strategies as st

from layerjump.errors import BadExit
from layerjump.generation.exit_rules import (
    FINE,
    GRID,
    NEVER,
    Agree,
    Entropy,
    Fixed,
    LevelReading,
    MaxProb,
    Never,
    SoftmaxGap,
    parse_rule,
)

GOLDEN = Path(__file__).parents[1] / "golden"


def confidences(levels=6, examples=40, seed=0):
    return random(levels, examples, seed=seed).abs().clamp(max=1)


def test_thresholds_are_the_papers():
    known = json.loads((GOLDEN / "thresholds.json").read_text())
    positions = torch.tensor([row["t"] for row in known["rows"]])
    found = SoftmaxGap(known["lambda"], known["N"]).threshold(positions)
    assert found.tolist() == pytest.approx([row["threshold"] for row in known["rows"]], rel=1e-12)
    assert found.tolist() == pytest.approx([1.0, 0.930, 0.902, 0.900], abs=5e-4)


def test_the_grid_is_the_authors():
    assert pytest.approx((-1.112, *(k / 10 for k in range(11)), 1.112)) == GRID
    assert len(FINE) == 9
    assert all(1 < value < NEVER for value in FINE)


@pytest.mark.parametrize("confidence", [confidences(), torch.ones(6, 40), torch.zeros(6, 40)])
@pytest.mark.parametrize("clip", [False, True])
def test_the_ends_of_the_grid_never_exit_and_always_exit(confidence, clip):
    position = torch.arange(40)
    never = SoftmaxGap(NEVER, 20.5, clip=clip).replay(confidence, position)
    assert (never == 5).all()
    if not clip:
        assert (SoftmaxGap(-NEVER, 20.5).replay(confidence, position) == 1).all()


@settings(max_examples=50, deadline=None)
@given(lam=st.floats(-1.2, 1.2), seed=st.integers(0, 999), levels=st.integers(2, 8), strict=st.booleans())
def test_the_exit_level_is_the_first_from_one_on_that_passes(lam, seed, levels, strict):
    confidence, position = confidences(levels, 12, seed), torch.arange(12)
    rule = SoftmaxGap(lam, 6.5, strict=strict)
    enough = rule.threshold(position)
    for example, found in enumerate(rule.replay(confidence, position).tolist()):
        lead = confidence[:, example]
        sure = lead > enough[example] if strict else lead >= enough[example]
        wanted = next((level for level in range(1, levels) if sure[level]), levels - 1)
        assert found == wanted


def test_a_stricter_threshold_never_exits_earlier():
    confidence, position = confidences(), torch.arange(40)
    stops = [SoftmaxGap(value, 20.5).replay(confidence, position) for value in sorted(GRID)]
    assert all((a <= b).all() for a, b in zip(stops, stops[1:], strict=False))


def test_strict_comparison_differs_at_the_threshold_alone():
    confidence = torch.tensor([[0.0], [0.9], [0.0]], dtype=torch.float64)
    far = torch.tensor([10**6])  # where the second term is gone
    assert SoftmaxGap(1, 10).threshold(far).item() == 0.9
    assert SoftmaxGap(1, 10).replay(confidence, far).item() == 2
    assert SoftmaxGap(1, 10, strict=False).replay(confidence, far).item() == 1


def test_replay_does_not_change_its_input():
    confidence = confidences()
    copy = confidence.clone()
    SoftmaxGap(0.5, 20.5).replay(confidence, torch.arange(40))
    assert torch.equal(confidence, copy)


def reading(logits, earlier=(), level=2):
    logits = torch.as_tensor(logits, dtype=torch.float64)
    state = torch.zeros(len(logits), 4)
    return LevelReading(level, state, torch.full((len(logits),), 50), lambda level, states: logits, earlier)


def test_rules_exit_where_they_should():
    logits = torch.tensor([[0.9, 0.05, 0.05], [0.5, 0.4, 0.1]], dtype=torch.float64).log()
    assert reading(logits).gap.tolist() == pytest.approx([0.85, 0.1])
    assert MaxProb(0.6).should_exit(reading(logits)).tolist() == [True, False]
    assert Entropy(0.5).should_exit(reading(logits)).tolist() == [True, False]
    assert SoftmaxGap(0.5, 10).should_exit(reading(logits)).tolist() == [True, False]
    assert Never().should_exit(reading(logits)).tolist() == [False, False]
    tops = torch.tensor([0, 0]), torch.tensor([0, 1])
    assert Agree(2).should_exit(reading(logits, tops)).tolist() == [True, False]
    assert Agree(3).should_exit(reading(logits, tops)).tolist() == [True, False]
    assert Agree(4).should_exit(reading(logits, tops)).tolist() == [False, False]
    assert Agree(1).should_exit(reading(logits)).tolist() == [True, True]


def test_a_rule_that_ignores_the_logits_needs_no_unembedding():
    seen = reading([[1.0, 2.0]])
    Fixed(2).should_exit(seen)
    assert not seen.has_logits


def test_parse_rule():
    assert parse_rule("never") == Never()
    assert parse_rule("fixed:3") == Fixed(3)
    assert parse_rule("maxprob:0.8@2,1") == MaxProb(0.8, levels=(1, 2))
    assert parse_rule("agree:2") == Agree(2)
    gap = parse_rule("gap:0.7@3")
    assert gap.levels == (3,)
    assert gap.threshold(torch.tensor([1, 90])).tolist() == pytest.approx([0.7, 0.7])
    malformed = ("gap", "gap:x", "fixed:1@2", "nothing:1", "never:1", "gap:0.5@a", "gap:nan", "agree:0")
    for text in malformed:
        with pytest.raises(BadExit, match="expects never"):
            parse_rule(text)
