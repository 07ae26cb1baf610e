"""`pruning` on small trained models: properties that hold for any numbers, and the figures."""

from __future__ import annotations

import json

import pytest
from helpers.study_results import check_figures
from helpers.task_data import write_questions

from layerjump.errors import BadEvaluation, BadStudy
from layerjump.studies import pruning
from layerjump.studies.pruning import drop_counts, methods_of
from layerjump.studies.setup import make_settings


@pytest.fixture(scope="module")
def result(study_setup):
    return pruning.run(study_setup).to_json()


def test_rows_cover_every_method_and_count(study_setup, result):
    rows = result["tables"]["pruned"]
    methods = methods_of(study_setup.model)
    expected = [("whole model", 0)] + [(m, n) for n in (1,) for m in methods]
    assert [(row["method"], row["dropped"]) for row in rows] == expected
    assert methods == (["remove", "linear"] if study_setup.model.masked else ["remove", "linear", "replaceme", "fold"])
    assert set(result["settings"]["stay"]) == {"1", "4"}
    assert json.dumps(result)


def test_ratios_parameters_and_front_are_consistent(result):
    whole, *rows = result["tables"]["pruned"]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["perplexity"] / whole["perplexity"], rel=1e-6)
        assert row["ratio low"] <= row["ratio"] <= row["ratio high"]
        assert row["parameters"] < whole["parameters"]
    assert whole["front"] or any(row["loss"] <= whole["loss"] for row in rows)
    for row in rows:
        if not row["front"]:
            assert any(
                other["loss"] <= row["loss"] and other["parameters"] <= row["parameters"]
                for other in (whole, *rows)
                if other is not row
            )


def test_panel_has_figures_and_a_reading(result):
    (panel,) = check_figures(pruning.STUDY, result)
    assert "perplexity is" in panel.reading
    assert len(panel.figures) == 2
    assert {trace.name for trace in panel.figures[1].data} >= {"whole model", "remove", "linear"}


def test_drop_counts():
    assert drop_counts(27, 30) == [1, 3, 6, 9]
    assert drop_counts(2, 4) == [1]
    assert drop_counts(0, 2) == []


def test_tasks_are_scored_for_every_model(study_setup, tmp_path):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra `eval`)")
    from layerjump.evaluation.tasks import evaluate

    data = write_questions(tmp_path)
    settings = make_settings(
        "ours", tokens=6_000, n_test_positions=120, eval_tasks=("copa", "lambada"), eval_data=str(data)
    )
    result = pruning.run(study_setup.with_empty_cache(settings=settings)).to_json()
    if study_setup.model.masked:
        assert "tasks" not in result["tables"]
        assert any("next token" in note for note in result["notes"])
        return
    rows = result["tables"]["tasks"]
    models = ["whole model", *methods_of(study_setup.model)]
    kinds = [("copa", "acc"), ("lambada", "acc"), ("lambada", "perplexity")]
    assert [(row["method"], row["task"], row["metric"]) for row in rows] == [
        (model, *kind) for model in models for kind in kinds
    ]
    alone = evaluate(study_setup.model, "copa,lambada", data)
    assert [row["score"] for row in rows[:3]] == [row.value for row in alone.scores]
    assert len({row["score"] for row in rows if row["metric"] == "perplexity"}) == len(models)
    panel = check_figures(pruning.STUDY, result)[1]
    assert "whole model is right in" in panel.reading
    assert len(panel.figures) == 2
    assert {trace.name for trace in panel.figures[0].data} == set(models) - {"whole model"}


def test_wrong_tasks_raise_before_the_run(tmp_path):
    with pytest.raises(BadStudy, match="pass eval_data"):
        make_settings("ours", eval_tasks=("copa",))
    with pytest.raises(BadEvaluation, match="does not exist"):
        make_settings("ours", eval_tasks=("copa",), eval_data=str(tmp_path))
