"""The main studies: what must hold of them whatever the model."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.study_results import tables_of

from layerjump.errors import BadText
from layerjump.generation.exit_rules import FINE, GRID, NEVER, SoftmaxGap
from layerjump.studies import early_exit, examples, predictions, r2
from layerjump.studies.formatting import number
from layerjump.studies.setup import make_settings


def test_the_ends_of_the_exit_curve(study_setup):
    result = early_exit.run(study_setup)
    blocks = study_setup.model.n_blocks
    for lens, grid in (("mat", GRID), ("identity", (*GRID, *FINE))):
        rows = [r for r in tables_of(result)["curves"] if (r["lens"], r["kind"]) == (lens, "dynamic")]
        assert [row["at"] for row in rows] == sorted(grid)
        by = {row["at"]: row for row in rows}
        assert (by[NEVER]["blocks"], by[NEVER]["agreement"]) == (blocks, 1)
        assert by[-NEVER]["blocks"] == 1
        costs = [row["blocks"] for row in rows]
        assert costs == sorted(costs)


def test_the_exact_curve_is_the_rule_at_every_threshold(study_setup):
    """At any λ it has the exits that the rule gives; nothing changes between two of its points."""
    scores = study_setup.lens_scores()
    length = float((scores.position + 1).double().mean())
    ones = np.ones(scores.n_examples)
    for index, _ in enumerate(scores.lenses):
        gaps, hits = scores.confidence[index], scores.hits(1)[index]
        curve = early_exit.ExactCurve.of(gaps, hits, SoftmaxGap(0, length), scores.position)
        lams, (blocks, agreement) = curve.lams, curve(ones)
        assert len(lams) == len(blocks) > scores.n_examples
        assert (np.diff(lams) < 0).all()
        assert (np.diff(blocks) < 0).all()  # every change lets an example exit earlier
        assert (blocks[0], agreement[0], blocks[-1]) == (study_setup.model.n_blocks, 1, 1)
        changes = np.unique(curve.lam)
        for lam in (*GRID, *np.random.default_rng(0).uniform(-0.2, 1.2, 200)):
            point = np.searchsorted(-changes[::-1], -lam)  # how many changes lie above λ
            level = SoftmaxGap(lam, length).replay(gaps, scores.position)
            assert float(level.double().mean()) == pytest.approx(blocks[point])
            right = hits.gather(0, level[None])[0].double()
            assert float(right.mean()) == pytest.approx(agreement[point])


def test_weights_of_examples_are_repetitions_of_them(study_setup):
    scores = study_setup.lens_scores()
    weights = np.random.default_rng(1).integers(0, 3, scores.n_examples)
    rule, hits, gaps = SoftmaxGap(0, 10.0), scores.hits(1)[0], scores.confidence[0]
    rows = np.repeat(np.arange(scores.n_examples), weights)
    repeated = early_exit.ExactCurve.of(gaps[:, rows], hits[:, rows], rule, scores.position[rows])
    weighted = early_exit.ExactCurve.of(gaps, hits, rule, scores.position)
    for target in (0.8, 0.95):
        found = early_exit.blocks_needed(*weighted(weights.astype(float)), target)
        assert found == pytest.approx(early_exit.blocks_needed(*repeated(np.ones(len(rows))), target))


def test_the_paper_s_grid_reads_points_of_the_exact_curve(study_setup):
    """So no point of the grid is better than the exact curve at the same cost, and the headline is the exact one."""
    result = early_exit.run(study_setup)
    saved = {(r["lens"], r["kind"]): r for r in tables_of(result)["saved"]}
    for lens in ("identity", "mat"):
        exact = saved[lens, "exact"]
        assert result.headline.blocks_saved[f"exact_{lens}_at_0.95"] == exact["blocks_saved"]
        assert exact["low"] <= exact["blocks_saved"] <= exact["high"]
        assert number(exact["blocks_saved"]) in early_exit.saved_sentence(result)
        listed = [r for r in tables_of(result)["curves"] if (r["lens"], r["kind"]) == (lens, "exact")]
        assert 10 < len(listed) <= early_exit.LISTED_POINTS
        grid = [r for r in tables_of(result)["curves"] if (r["lens"], r["kind"]) == (lens, "dynamic")]
        reaching = [r["blocks"] for r in grid if r["agreement"] >= 0.95]
        assert study_setup.model.n_blocks - min(reaching) <= exact["blocks_saved"] + 1e-9


def test_results_without_an_exact_curve_still_have_a_sentence(study_setup):
    """Results of earlier versions hold the grid alone."""
    result = early_exit.run(study_setup)
    tables = early_exit.Tables(
        [row for row in result.tables.curves if row.kind != "exact"],
        [row for row in result.tables.saved if row.kind != "exact"],
    )
    former = replace(result, tables=tables)
    (row,) = [row for row in tables.saved if (row.lens, row.kind) == ("mat", "dynamic")]
    assert number(row.blocks_saved) in early_exit.saved_sentence(former)
    assert len(early_exit.figures(former)) == 2


def test_a_fixed_exit_is_the_lens_at_that_level(study_setup):
    levels = {(r["lens"], r["level"]): r for r in tables_of(predictions.run(study_setup))["levels"]}
    rows = [row for row in tables_of(early_exit.run(study_setup))["curves"] if row["kind"] == "fixed"]
    assert len(rows) == 2 * (study_setup.model.n_blocks + 1)
    for row in rows:
        level = levels[row["lens"], row["at"]]
        assert (row["blocks"], row["agreement"]) == (row["at"], level["p@1"])
        assert (row["agreement low"], row["agreement high"]) == (level["p@1 low"], level["p@1 high"])


def test_always_stopping_at_level_1_is_the_fixed_exit_there(study_setup):
    rows = {(r["lens"], r["kind"], r["at"]): r for r in tables_of(early_exit.run(study_setup))["curves"]}
    for lens in ("identity", "mat"):
        always, fixed = rows[lens, "dynamic", -NEVER], rows[lens, "fixed", 1.0]
        assert always["agreement"] == fixed["agreement"]


def test_no_rule_that_is_always_right_saves_more_than_the_oracle(study_setup):
    result = early_exit.run(study_setup)
    for lens in ("identity", "mat"):
        (oracle,) = [r for r in tables_of(result)["saved"] if (r["lens"], r["kind"]) == (lens, "oracle")]
        for row in tables_of(result)["curves"]:
            if row["lens"] == lens and row["agreement"] == 1 and row["blocks"] >= 1:
                assert study_setup.model.n_blocks - row["blocks"] <= oracle["blocks_saved"] + 1e-12
        assert oracle["low"] <= oracle["blocks_saved"] <= oracle["high"]


@pytest.mark.parametrize(
    ("cost", "agreement", "target", "blocks"),
    [
        ([1, 2, 4], [0.5, 0.9, 1.0], 0.95, 3.0),  # half way between two points
        ([4, 1, 2], [1.0, 0.5, 0.9], 0.95, 3.0),  # in any order
        ([1, 2, 4], [0.5, 0.95, 1.0], 0.95, 2.0),  # at a point
        ([1, 2, 3, 4], [0.9, 0.6, 0.7, 1.0], 0.95, 3.5),  # a dip does not undo what was reached
        ([1, 1, 2], [0.2, 0.96, 1.0], 0.95, 1.0),  # two points of one cost: the better one
        ([0, 4], [0.99, 1.0], 0.95, 0.0),  # reached at once
        ([1, 2], [0.5, 0.9], 0.95, float("nan")),
        ([1, 4], [0.5, 1.0], 1.0, 4.0),
    ],
)
def test_blocks_needed_for_a_target(cost, agreement, target, blocks):
    found = early_exit.blocks_needed(np.array(cost, float), np.array(agreement), target)
    assert found == pytest.approx(blocks, nan_ok=True)


def test_predictions_at_the_last_level_and_in_order_of_k(study_setup):
    rows = tables_of(predictions.run(study_setup))["levels"]
    for row in rows:
        assert row["p@1"] <= row["p@5"] <= row["p@10"]
        for name in ("p@1", "p@5", "p@10", "surprisal", "kl"):
            assert row[f"{name} low"] <= row[name] + 1e-9
            assert row[name] <= row[f"{name} high"] + 1e-9
    for row in rows:
        if row["level"] == study_setup.model.n_blocks:
            assert row["p@1"] == row["p@5"] == row["p@10"] == 1
            assert row["kl"] < 1e-5
            assert row["surprisal"] > 0


def test_r2_of_neighbours_is_their_composition_and_the_map_beats_identity(study_setup):
    result = r2.run(study_setup)
    composed = tables_of(result)["composed mat"]
    blocks = study_setup.model.n_blocks
    assert [row["from"] for row in composed] == list(range(blocks))
    assert composed[-1]["r2_composed"] == pytest.approx(composed[-1]["r2_direct"], abs=1e-6)
    assert result.headline.pairs == blocks * (blocks + 1) // 2
    assert result.headline.pairs_where_map_beats_identity == result.headline.pairs


def test_every_estimator_is_composed_and_read(study_setup):
    names = ("identity", "mean-shift", "affine", "ridge", "orthogonal", "n-njtc")
    settings = make_settings("ours", tokens=6_000, n_test_positions=120, estimators=names)
    other = study_setup.with_empty_cache(settings=settings)
    result = r2.run(other)
    for name in names:
        last = tables_of(result)[f"composed {name}"][-1]
        assert last["r2_composed"] == pytest.approx(last["r2_direct"], abs=1e-6)
    assert set(predictions.run(other).settings["lenses"]) == {"identity", *names}


def test_examples_are_a_few_sentences_with_five_words_each(study_setup):
    rows = tables_of(examples.run(study_setup))["examples"]
    assert len({row["context"] for row in rows}) == examples.SENTENCES
    assert {row["level"] for row in rows} == set(range(study_setup.model.n_blocks + 1))
    for row in rows:
        assert len(row["identity"]) == len(row["mat"]) == 5
        if row["level"] == study_setup.model.n_blocks:
            assert row["identity"] == row["mat"]


def test_no_test_documents_is_said_before_anything_is_run(study_setup):
    other = study_setup.with_empty_cache(settings=make_settings("ours", split="90/10/0"))
    with pytest.raises(BadText, match="leaves no test documents"):
        r2.run(other)
