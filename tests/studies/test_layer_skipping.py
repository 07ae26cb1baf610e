"""`layer_skipping`: schedules against brute force; runs of a small trained model and of one with affine blocks."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from helpers.study_results import tables_of
from helpers.tiny_models import silent_gpt2
from helpers.tokenizers import byte_tokenizer

import layerjump as lj
from layerjump.errors import BadArtifact
from layerjump.interventions.rerun_from_level import Rerun
from layerjump.report.write_report import panels
from layerjump.studies import layer_skipping
from layerjump.studies.compare_variants import small_batches
from layerjump.studies.layer_skipping import Schedule, cheapest, most_explained, round_robins, single_jumps
from layerjump.studies.setup import Setup, StudySettings

SETTINGS = StudySettings(tokens=12_000, n_test_positions=100, rerun_tokens=400)


@pytest.fixture(scope="module")
def text():
    return lj.load_text("pydoc", limit=400)


@pytest.fixture(scope="module")
def setup(data_folder, text) -> Setup:
    return Setup(lj.load(data_folder / "tiny-gpt2"), text, SETTINGS)


@pytest.fixture(scope="module")
def result(setup):
    return layer_skipping.run(setup)


def test_every_rule_reaches_every_number_of_blocks(result):
    rows = tables_of(result)["schedules"]
    for rule in ("single jump", "r2", "kl", "ours"):
        assert [row["blocks run"] for row in rows if row["rule"] == rule] == [0, 1, 2, 3]
    robin = [row for row in rows if row["rule"] == "round robin"]
    assert [(row["a"], row["b"], row["schedule"]) for row in robin] == [(1, 1, "0-1 → 2-3 → 4")]
    for row in rows:
        assert row["p@1 low"] <= row["p@1"] <= row["p@1 high"]
        assert row["kl"] >= 0


def test_the_figure_has_every_rules_best_and_says_which_is_best(result):
    panel, _ = panels(result)  # and the jumps alone
    rows = tables_of(result)["schedules"]
    for figure, column in zip(panel.figures, ("p@1", "kl"), strict=True):
        assert {line.name for line in figure.data} >= {row["rule"] for row in rows}
        for line in [line for line in figure.data if line.name == "ours"]:
            mine = [row for row in rows if row["rule"] == "ours"]
            assert list(line.y) == [row[column] for row in mine]
    best = max((row for row in rows if row["blocks run"] <= 2), key=lambda row: row["p@1"])
    assert f"the rule {best['rule']} with {best['blocks run']} of 4 blocks" in panel.reading


def test_with_no_block_run_all_rules_are_one_jump(result):
    none = [row for row in tables_of(result)["schedules"] if row["blocks run"] == 0]
    assert {row["schedule"] for row in none} == {"0 → 4"}
    assert len({row["kl"] for row in none}) == 1


def test_a_jump_alone_costs_what_it_costs_as_a_schedule(setup, result):
    jumps = setup.all_position_jumps("mat", "all")
    costs, _ = layer_skipping._jump_costs(setup, jumps)
    pairs = {(row["from"], row["to"]): row["kl"] for row in tables_of(result)["pairs"]}
    assert costs == pairs
    assert len(costs) == 10


def test_the_choice_is_made_on_select_documents(setup):
    select = {int(document) for batch in layer_skipping._validation_batches(setup) for document in batch.document}
    assert select <= set(setup.splits().validation)


def test_without_select_documents_some_are_held_out(setup):
    other = setup.with_empty_cache(settings=StudySettings(tokens=6_000, split="300/0/60"))
    changed, note = layer_skipping.with_validation_documents(other)
    assert "held out" in note
    assert changed.splits().test == other.splits().test
    assert set(changed.splits().validation) | set(changed.splits().fit) == set(other.splits().fit)
    assert len(changed.splits().validation) == 30


def test_an_empty_schedule_is_the_model(setup):
    jumps = setup.all_position_jumps("mat", "all")
    rerun = Rerun(setup.model, small_batches(setup)[0])
    assert torch.equal(layer_skipping.run_schedule(rerun, Schedule((), setup.model.n_blocks), jumps), rerun.levels[-1])


def sink_errors(setup: Setup) -> list[tuple[float, float]]:
    """Relative errors of jumped states at position 0, by maps fitted with it and by the lens' maps, without."""
    jumps, without = setup.all_position_jumps("mat", "all"), setup.jumps("mat", "all")
    assert (jumps.provenance.skip_first, without.provenance.skip_first) == (0, 1)
    rerun = Rerun(setup.model, small_batches(setup)[0])
    found = []
    for source, target in jumps:
        state, exact = rerun.levels[source.index][:, 0], rerun.levels[target.index][:, 0]
        errors = [(maps[source, target](state) - exact).norm() for maps in (jumps, without)]
        found.append(tuple(float(error / exact.norm()) for error in errors))
    return found


def test_the_first_states_survive_every_jump(setup):
    """The tiny model has no real sink, but its first states differ from all others."""
    assert all(ours < theirs and ours < 0.7 for ours, theirs in sink_errors(setup))


def test_a_real_sinks_state_survives_every_jump(real_folder, text):
    setup = Setup(lj.load(real_folder("stories15M")), text, SETTINGS)
    errors = sink_errors(setup)
    assert max(ours for ours, _ in errors) < 0.15
    assert max(theirs for _, theirs in errors) > 0.3


def test_in_an_affine_network_every_schedule_is_exact(text):
    hf = silent_gpt2()
    model = lj.Model.wrap(hf, byte_tokenizer())
    settings = StudySettings(tokens=8_000, n_test_positions=60, rerun_tokens=200, estimators=("affine",))
    result = layer_skipping.run(Setup(model, text, settings))
    for row in tables_of(result)["schedules"]:
        assert row["p@1"] == 1
        assert row["kl"] == pytest.approx(0, abs=1e-6)
    for row in tables_of(result)["pairs"]:
        assert row["r2"] == pytest.approx(1, abs=1e-6)


def test_it_runs_on_an_encoder(data_folder, text):
    setup = Setup(lj.load(data_folder / "tiny-bert"), text, SETTINGS)
    result = layer_skipping.run(setup)
    assert "masked" in result.settings["positions"]
    ours = [row for row in tables_of(result)["schedules"] if row["rule"] == "ours"]
    assert ours[-1]["p@1"] > ours[0]["p@1"]


def test_it_follows_the_papers_protocol(data_folder, text):
    settings = StudySettings(positions="one", split="330/0/60", paper=True, n_test_positions=10**9, rerun_tokens=400)
    setup = Setup(lj.load(data_folder / "tiny-gpt2"), text, settings)
    result = layer_skipping.run(setup)
    assert result.settings["n_fit"] == 297
    assert "33 of the 330 fit documents" in result.notes[0]


# Schedules


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
                assert math.prod(max(r2[jump], 1e-12) for jump in rival.jumps) <= product * (1 + 1e-9)


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
