"""Schedules: all of them listed by brute force for small models, and the best compared."""

import itertools
import math
import random

import pytest

from layerjump.errors import BadArtifact
from layerjump.studies.layer_skipping import (
    Schedule,
    cheapest,
    most_explained,
    round_robins,
    single_jumps,
)


def every_schedule(blocks: int) -> list:
    """All sets of jumps that do not overlap or touch."""
    jumps = [(a, b) for a in range(blocks) for b in range(a + 1, blocks + 1)]
    found = []
    for count in range(1, blocks + 1):
        for chosen in itertools.combinations(jumps, count):
            if all(one[1] < two[0] for one, two in itertools.pairwise(chosen)):
                found.append(Schedule(chosen, blocks))
    return found


@pytest.mark.parametrize("blocks", range(1, 7))
def test_no_schedule_is_cheaper(blocks):
    draw = random.Random(blocks)
    cost = {(a, b): draw.random() for a in range(blocks) for b in range(a + 1, blocks + 1)}
    found = cheapest(blocks, cost)
    assert sorted(found) == list(range(blocks))
    for count, schedule in found.items():
        assert schedule.blocks_run == count
        rivals = [s for s in every_schedule(blocks) if s.blocks_run == count]
        assert schedule in rivals
        least = min(sum(cost[jump] for jump in rival.jumps) for rival in rivals)
        assert sum(cost[jump] for jump in schedule.jumps) == pytest.approx(least)


def test_the_r2_rule_has_the_greatest_product():
    draw = random.Random(0)
    r2 = {(a, b): draw.uniform(-0.2, 1) for a in range(6) for b in range(a + 1, 7)}
    for count, schedule in most_explained(6, r2).items():
        product = math.prod(max(r2[jump], 1e-12) for jump in schedule.jumps)
        for rival in every_schedule(6):
            if rival.blocks_run == count:
                assert math.prod(max(r2[jump], 1e-12) for jump in rival.jumps) <= product * (
                    1 + 1e-9
                )


def test_a_jump_that_is_not_on_offer_is_not_made():
    found = cheapest(4, {(0, 1): 1.0, (2, 4): 1.0})
    jumps = {count: schedule.jumps for count, schedule in found.items()}
    assert jumps == {1: ((0, 1), (2, 4)), 2: ((2, 4),), 3: ((0, 1),)}


def test_round_robins_take_turns():
    assert {period: schedule.jumps for period, schedule in round_robins(6).items()} == {
        (1, 1): ((1, 2), (3, 4), (5, 6)),
        (1, 2): ((1, 3), (4, 6)),
        (2, 1): ((2, 3), (5, 6)),
    }
    assert round_robins(7) == {}
    for (run, jumped), schedule in round_robins(12).items():
        assert schedule.blocks_run == 12 * run // (run + jumped)
        assert schedule.jumps[-1][1] == 12


def test_single_jumps_lead_to_the_last_level():
    assert [schedule.jumps for schedule in single_jumps(3)] == [((0, 3),), ((1, 3),), ((2, 3),)]
    assert [schedule.blocks_run for schedule in single_jumps(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("jumps", "n_blocks", "text", "legs"),
    [
        (((4, 6), (9, 12)), 12, "0-4 → 6-9 → 12", [(0, 4), (6, 9), (12, 12)]),
        (((0, 3), (5, 7)), 9, "0 → 3-5 → 7-9", [(0, 0), (3, 5), (7, 9)]),
        (((0, 12),), 12, "0 → 12", [(0, 0), (12, 12)]),
        ((), 4, "0-4", [(0, 4)]),
    ],
)
def test_a_schedule_is_written_as_its_legs_and_read_back(jumps, n_blocks, text, legs):
    schedule = Schedule(jumps, n_blocks)
    assert schedule.to_json() == text
    assert schedule.legs == legs
    assert Schedule.from_json(text) == schedule


def test_other_text_is_not_a_schedule():
    with pytest.raises(BadArtifact, match="expected a schedule"):
        Schedule.from_json("0-4, 6")
