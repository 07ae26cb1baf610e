"""`text_transfer`: maps of every text, scored on every text."""

from __future__ import annotations

import pytest
from helpers.story_text import letters, stories
from helpers.study_results import check_figures

from layerjump.jumps.fit import solve_jumps
from layerjump.models.loading import load
from layerjump.studies import text_transfer
from layerjump.studies.runner import run_studies, select_studies
from layerjump.studies.setup import Setup, StudySettings

SETTINGS = StudySettings(n_test_positions=150, estimators=("affine",))


@pytest.fixture(scope="module")
def setup(data_folder):
    model = load(data_folder / "tiny-gpt2")
    return Setup(model, stories(120), SETTINGS, [letters(120), stories(60, seed=1)])


@pytest.fixture(scope="module")
def result(setup):
    return text_transfer.run(setup).to_json()


def test_every_pair_has_a_cell_and_every_level_a_row(result):
    names = ["stories", "letters", "stories (2)"]
    pairs = {(row["fit"], row["test"]) for row in result["tables"]["matrix"]}
    assert pairs == {(a, b) for a in names for b in names}
    assert len(result["tables"]["matrix"]) == 9
    assert len(result["tables"]["levels"]) == 9 * 4


def test_losses_are_zero_on_the_text_of_the_fit(result):
    for row in result["tables"]["matrix"]:
        if row["fit"] == row["test"]:
            lost = ("r2 lost", "r2 weighted lost", "p@1 lost", "p@1 lost low", "p@1 lost high")
            assert [row[name] for name in lost] == [0.0] * 5


def test_maps_do_not_transfer_between_stories_and_random_letters(result):
    cells = {(row["fit"], row["test"]): row for row in result["tables"]["matrix"]}
    assert cells["stories", "letters"]["r2 lost"] > 0.05
    assert cells["letters", "stories"]["p@1 lost"] > 0.05
    assert cells["letters", "stories"]["p@1 lost low"] > 0
    alike = cells["stories (2)", "stories"]
    assert alike["r2 lost"] < cells["letters", "stories"]["r2 lost"] / 2


def test_the_matrix_is_the_mean_of_the_levels(result):
    for cell in result["tables"]["matrix"]:
        rows = [row for row in result["tables"]["levels"] if (row["fit"], row["test"]) == (cell["fit"], cell["test"])]
        for name in ("r2", "r2 weighted", "p@1"):
            mean = sum(row[name] for row in rows) / len(rows)
            assert cell[name] == pytest.approx(mean, abs=1e-12)


def test_scores_on_the_text_of_the_fit_equal_a_plain_fit(setup, result):
    jumps = solve_jumps(setup.moments("to-last"), "affine")
    rows = [r for r in result["tables"]["levels"] if r["fit"] == r["test"] == "stories"]
    for row in rows:
        # Jumps are stored in float32.
        assert row["r2"] == pytest.approx(jumps.info[row["level"], 4].r2[0], abs=1e-5)


def test_one_text_is_skipped(setup, tmp_path):
    alone = setup.with_empty_cache(others=())
    results = run_studies(alone, select_studies("text_transfer"), tmp_path)
    assert "pass text more than once" in results.studies["text_transfer"].reason


def test_every_table_has_a_figure(result):
    check_figures(text_transfer.STUDY, result)
