"""`data`: prefixes of the fit text, and corrupted copies of it."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers.story_text import stories
from helpers.study_results import check_figures

from layerjump.models.loading import load
from layerjump.studies import data_requirements
from layerjump.studies.setup import Setup, StudySettings


@pytest.fixture(scope="module", params=["tiny-gpt2", "tiny-bert"])
def setup(data_folder, request):
    settings = StudySettings(n_test_positions=150, estimators=("affine",))
    return Setup(load(data_folder / request.param), stories(240), settings)


@pytest.fixture(scope="module")
def result(setup):
    return data_requirements.run(setup).to_json()


def test_the_last_prefix_is_the_whole_fit(setup, result):
    whole = setup.jumps("affine", "to-last")
    last = result["tables"]["prefixes"][-1]
    assert last["positions"] == setup.moments("to-last").fit.n
    rows = result["tables"]["prefix levels"][-4:]
    # The same sequences in other batches; the model computes in float32.
    for row in rows:
        assert row["r2"] == pytest.approx(whole.info[row["level"], 4].r2[0], abs=1e-6)
        assert row["r2 weighted"] == pytest.approx(whole.info[row["level"], 4].r2[1], abs=1e-6)


def test_prefixes_grow_and_more_text_scores_higher(setup, result):
    rows = result["tables"]["prefixes"]
    assert 6 <= len(rows) <= 8
    counts = [row["positions"] for row in rows]
    assert counts == sorted(set(counts))
    assert rows[-1]["r2"] > rows[0]["r2"]
    for row in rows:
        assert row["few"] == (row["positions"] < 5 * 80)
        assert row["per d"] == row["positions"] / 80
    assert rows[0]["few"]


def test_level_rows_average_to_the_prefix(result):
    for prefix in result["tables"]["prefixes"]:
        rows = [row for row in result["tables"]["prefix levels"] if row["positions"] == prefix["positions"]]
        assert sum(row["p@1"] for row in rows) / 4 == pytest.approx(prefix["p@1"])


def test_clean_text_scores_highest(setup, result):
    rows = {row["variant"]: row for row in result["tables"]["variants"]}
    assert list(rows) == ["clean", "shuffled", "duplicated", "noised"]
    assert rows["clean"]["r2"] == result["tables"]["prefixes"][-1]["r2"]
    if setup.model.masked:
        return  # the tiny masked model hardly uses its context, so word order matters little
    for name in ("shuffled", "duplicated", "noised"):
        assert rows[name]["r2"] < rows["clean"]["r2"]


def test_corruption_leaves_other_documents_unchanged():
    corpus = stories(10)
    for variant in data_requirements.CORRUPTIONS:
        changed = data_requirements.corrupt(corpus, [1, 2, 3, 4], variant, seed=0)
        assert changed == data_requirements.corrupt(corpus, [1, 2, 3, 4], variant, seed=0)
        same = [a == b for a, b in zip(corpus.documents, changed.documents, strict=True)]
        assert [same[document] for document in (0, 5, 6, 7, 8, 9)] == [True] * 6
        assert not all(same)


def test_shuffling_keeps_words_and_whitespace():
    before = "one  two\nthree four five six seven"
    (after,) = data_requirements.shuffle_words([before], 0)
    assert after != before
    assert Counter(after.split()) == Counter(before.split())
    assert [c for c in after if c.isspace()] == [c for c in before if c.isspace()]


def test_duplication_repeats_the_first_half():
    assert data_requirements.duplicate_half(["a", "b", "c", "d"], 0) == ["a", "b", "a", "b"]
    assert data_requirements.duplicate_half(["a", "b", "c"], 0) == ["a", "b", "a"]


def test_noise_replaces_about_15_percent_with_words_of_the_text():
    before = [" ".join(f"w{n}" for n in range(5000))]
    after = data_requirements.replace_words(before, 0)[0].split()
    changed = sum(f"w{n}" != word for n, word in enumerate(after))
    assert 0.13 < changed / 5000 < 0.17
    assert set(after) <= set(before[0].split())


def test_every_table_has_a_figure(result):
    check_figures(data_requirements.STUDY, result)
