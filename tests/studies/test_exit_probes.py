"""`exit_probes`: early exit replayed with probes."""

from dataclasses import replace

import torch
from helpers.story_text import stories
from helpers.study_results import check_figures

import layerjump as lj
from layerjump.generation.calibration.rule_search import THRESHOLDS
from layerjump.studies import early_exit, exit_probes
from layerjump.studies.setup import Setup, make_settings


def test_curves_reach_from_all_blocks_to_early_levels(study_setup):
    result = exit_probes.run(study_setup).to_json()
    check_figures(exit_probes.STUDY, result)
    blocks = study_setup.model.n_blocks
    for lens in study_setup.lenses():
        for kind in exit_probes.RULES:
            rows = [r for r in result["tables"]["curves"] if (r["lens"], r["kind"]) == (lens, kind)]
            assert [row["at"] for row in rows] == list(THRESHOLDS)
            run = [row["blocks"] for row in rows]
            assert run == sorted(run, reverse=True)  # a lower threshold never exits later
            assert run[0] > 0.9 * blocks
            assert rows[0]["agreement"] > 0.98
            assert run[-1] < 0.8 * blocks
    assert result["settings"]["n_select"] > 300


def test_with_enough_text_probes_save_more_than_the_papers_rule(data_folder):
    """On a trained model and text of its domain, one threshold on the lead for all levels is not the best rule."""
    settings = make_settings("ours", tokens=30_000, n_test_positions=800, split="60/20/20")
    setup = Setup(lj.load(data_folder / "tiny-gpt2"), stories(1500), settings)
    paper_rule, with_probes = (study.run(setup).headline.blocks_saved for study in (early_exit, exit_probes))
    for lens in ("identity", "mat"):
        assert with_probes[f"both_{lens}_at_0.95"] > paper_rule[f"exact_{lens}_at_0.95"] + 0.02


def test_calibration_set_agrees_with_lens_scores(study_setup):
    test = exit_probes._calibration_set(study_setup, "mat", "test")
    scores = study_setup.lens_scores()
    index = scores.lenses.index("mat")
    assert torch.equal(test.correct, scores.hits(1)[index][:-1])
    torch.testing.assert_close(test.gap, scores.confidence[index][:-1].float())
    assert torch.equal(test.documents, scores.document)


def test_empty_validation_split_is_skipped(study_setup):
    settings = replace(study_setup.settings, split="80/0/20")
    reason = exit_probes.cannot_run(study_setup.with_empty_cache(settings=settings))
    assert reason is not None
    assert "validation split" in reason
    assert exit_probes.cannot_run(study_setup) is None


def test_both_halves_of_the_documents_are_non_empty():
    assert exit_probes.every_second_document(torch.tensor([4, 4, 5, 6])).tolist() == [True, True, False, True]
    for documents in ([4, 4, 8], [3, 3, 7]):
        assert exit_probes.every_second_document(torch.tensor(documents)).tolist() == [True, True, False]
