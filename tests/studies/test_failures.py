"""`failures`: bins partition the examples, errors equal direct computation, the worst examples come first."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from helpers.story_text import stories
from helpers.study_results import check_figures

from layerjump.models.loading import load
from layerjump.models.model import capture_states
from layerjump.studies import failures
from layerjump.studies.setup import Setup, StudySettings

BINNED = ("by position", "by frequency", "by entropy")


@pytest.fixture(scope="module", params=["tiny-gpt2", "tiny-bert"])
def setup(data_folder, request):
    return Setup(load(data_folder / request.param), stories(160), StudySettings(n_test_positions=200, rerun_tokens=800))


@pytest.fixture(scope="module")
def result(setup):
    return failures.run(setup).to_json()


@pytest.mark.parametrize("table", BINNED)
def test_bins_partition_the_examples(setup, result, table):
    scores = setup.lens_scores()
    hits = scores.hits(1).double().mean(-1)
    for level in (1, 2, 3):
        for index, lens in enumerate(scores.lenses):
            rows = [r for r in result["tables"][table] if (r["level"], r["lens"]) == (level, lens)]
            assert sum(row["n"] for row in rows) == scores.n_examples
            mean = sum(row["n"] * row["p@1"] for row in rows) / scores.n_examples
            assert mean == pytest.approx(float(hits[index, level]))
            kl = sum(row["n"] * row["kl"] for row in rows) / scores.n_examples
            assert kl == pytest.approx(float(scores.kl[index, level].double().mean()), rel=1e-5)


def test_entropy_bins_are_quartiles(setup, result):
    counts = [row["n"] for row in result["tables"]["by entropy"][:4]]
    assert max(counts) - min(counts) <= 2


def test_worst_examples_have_the_largest_kl(setup, result):
    scores = setup.lens_scores()
    worst = result["tables"]["worst"]
    kl = [row["kl"] for row in worst]
    assert kl == sorted(kl, reverse=True)
    index = scores.lenses.index("mat")
    largest = scores.kl[index, 2].sort(descending=True).values[:20]
    assert kl == pytest.approx(largest.tolist())
    assert len(worst) == 20


def test_contexts_match_their_documents(setup, result):
    for row in result["tables"]["worst"]:
        story = setup.corpus.documents[row["document"]].lower().replace(" ", "")
        shown = re.sub(r"\s|##", "", row["context"].lower())
        # Between [MASK]s and the [word] that stood at the gap; the ends may be cut within one.
        pieces = re.split(r"^[^[]*\]|\[[^]]*\]|\[[^]]*$", shown)
        assert all(piece in story for piece in pieces)


def test_percentiles_equal_direct_computation(setup, result):
    jumps, errors, targets = setup.jumps("mat"), [], []
    with torch.no_grad():
        for states in capture_states(setup.model, setup.test_batches(), [1, 4]):
            errors.append((jumps[1, 4](states[1]) - states[4]).double().norm(dim=-1))
            targets.append(states[4].double().norm(dim=-1))
    error, target = torch.cat(errors).numpy(), torch.cat(targets).numpy()
    (row,) = [r for r in result["tables"]["errors"] if (r["level"], r["map"]) == (1, "mat")]
    assert row["99 %"] == pytest.approx(np.percentile(error, 99), rel=1e-5)
    assert row["max relative"] == pytest.approx((error / target).max(), rel=1e-5)
    assert row["50 %"] < row["90 %"] < row["95 %"] < row["99 %"] <= row["max"]


def test_first_token_rows_separate_position_0(setup, result):
    rows = result["tables"]["first token"]
    assert {row["at"] for row in rows} == {"position 0", "other positions"}
    assert {row["map"] for row in rows} == {"mat", "identity"}
    counts = {(row["at"], row["n"]) for row in rows}
    assert len(counts) == 2  # the same positions at every level
    if setup.model.masked:
        assert any("at masked positions" in note for note in result["notes"])
        return
    mat = {row["at"]: row for row in rows if (row["level"], row["map"]) == (2, "mat")}
    # Maps skip position 0 when they are fitted.
    assert mat["position 0"]["relative error"] > mat["other positions"]["relative error"]


def test_bin_edges():
    bins, names = failures.bin_positions(torch.tensor([0, 1, 2, 3, 4, 7, 8]))
    assert [names[b] for b in bins] == ["0", "1", "2–3", "2–3", "4–7", "4–7", "8–15"]
    bins, names = failures.bin_counts(np.array([0, 1, 9, 10, 999, 1000]))
    assert [names[b] for b in bins] == ["never", "1–9", "1–9", "10–99", "100–999", "1,000–9,999"]
    assert failures.quarter_levels(12) == [3, 6, 9]
    assert failures.quarter_levels(1) == [0]


def test_every_table_has_a_figure(result):
    check_figures(failures.STUDY, result)
