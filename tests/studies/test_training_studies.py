"""`training_dynamics`, `finetuning`, `architecture`: small runs and their figures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from helpers.pretraining import SMALL
from helpers.story_text import stories
from helpers.study_results import check_figures

import layerjump as lj
from layerjump.errors import BadStudy, ModelNotFound
from layerjump.studies import architecture, finetuning, training_dynamics
from layerjump.studies.runner import run_studies, select_studies
from layerjump.studies.setup import Setup, StudySettings
from layerjump.training.build_model import VARIANTS
from layerjump.training.finetune_on_task import ChoiceItem
from layerjump.training.linearity_profile import measure_profile
from layerjump.training.pretrain import pretrain

TEXT = stories(200)
RECIPE = replace(SMALL, steps=9, eval_every=3, learning_rate=1e-3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trained model, with the folder of its checkpoints next to it."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    pretrain(TEXT, folder, RECIPE, device="cpu", keep_checkpoints=True)
    return folder


@pytest.fixture(scope="module")
def setup(trained):
    return Setup(lj.load(trained), stories(60, seed=2), StudySettings(training_runs=2))


def with_settings(setup, **changes):
    return setup.with_empty_cache(settings=replace(setup.settings, **changes))


def test_missing_settings_are_skipped(setup, tmp_path):
    results = run_studies(setup, select_studies("training_dynamics,finetuning,architecture"), tmp_path)
    reasons = {name: outcome.reason for name, outcome in results.studies.items()}
    assert "pass checkpoints" in reasons["training_dynamics"]
    assert "pass finetune_data" in reasons["finetuning"]
    assert "pass training_steps" in reasons["architecture"]


def test_dynamics_sorts_checkpoints_by_step(setup, trained):
    work = trained.with_name("model-training")
    result = training_dynamics.run(with_settings(setup, checkpoints=(str(trained), str(work)))).to_json()
    steps = [row["step"] for row in result["tables"]["steps"]]
    assert steps == [1, 3, 6, 9]  # the final model has no number in its name: its index in the series
    last, final = result["tables"]["steps"][-1], result["tables"]["steps"][0]
    for name, value in measure_profile(setup.model, setup.corpus).summary_row().items():
        assert last[name] == pytest.approx(value, rel=1e-6)
        assert final[name] == last[name]
    assert len(result["tables"]["blocks"]) == 4 * 2
    assert result["headline"]["last_perplexity"] == last["perplexity"]
    panels = check_figures(training_dynamics.STUDY, result)
    assert [panel.title for panel in panels] == ["From step to step", "Block by block"]
    assert json.dumps(result)


def test_dynamics_refuses_other_folders_and_revisions(setup, tmp_path):
    with pytest.raises(BadStudy, match="expected a checkpoint or a folder of checkpoint"):
        training_dynamics.run(with_settings(setup, checkpoints=(str(tmp_path),)))
    named = replace(setup.model, name="no/such-model")
    with pytest.raises(ModelNotFound):
        training_dynamics.run(with_settings(setup, checkpoints=("step1000",)).with_empty_cache(model=named))


def test_every_item_is_held_out_once():
    items = [ChoiceItem(str(n), ("a", "b"), 0) for n in range(11)]
    splits = finetuning.folds(items, 3, seed=0)
    held_out = [item for _, part in splits for item in part]
    assert sorted(item.prompt for item in held_out) == sorted(item.prompt for item in items)
    assert all(not set(learnt) & set(part) for learnt, part in splits)
    ((learnt, part),) = finetuning.folds(items, 1, seed=0)
    assert (len(learnt), len(part)) == (8, 3)


def test_finetune_measures_before_and_after(setup, tmp_path):
    task = tmp_path / "task.jsonl"
    rows = [{"query": f"Tom has {n}", "choices": ["balls", "dogs"], "gold": n % 2} for n in range(8)]
    task.write_text("\n".join(map(json.dumps, rows)))
    run_setup = with_settings(setup, finetune_data=str(task), training_steps=3)
    result = finetuning.run(run_setup).to_json()
    before = measure_profile(setup.model, setup.corpus)
    assert [row["items scored"] for row in result["tables"]["runs"]] == [4, 4]
    for row in result["tables"]["runs"]:
        name = "without residual"
        assert row[f"{name} before"] == pytest.approx(before.mean(name), rel=1e-6)
        assert row[f"{name} change"] == row[f"{name} after"] - row[f"{name} before"] != 0
    changes = [row["without residual change"] for row in result["tables"]["runs"]]
    assert result["headline"]["without_residual_change"] == pytest.approx(sum(changes) / 2)
    by_block = [row["without residual change"] for row in result["tables"]["blocks"]]
    assert sum(by_block) / 2 == pytest.approx(sum(changes) / 2)
    (panel,) = check_figures(finetuning.STUDY, result)
    assert "task.jsonl" in panel.reading
    task.write_text(json.dumps(rows[0]))
    with pytest.raises(BadStudy, match="at least 2 items for 2 runs, got 1"):
        finetuning.run(run_setup)


def test_architectures_are_trained_and_compared(setup):
    run_setup = with_settings(setup, training_steps=2, training_runs=1)
    result = architecture.run(run_setup).to_json()
    every = [(varies, name) for varies, variants in VARIANTS.items() for name in variants]
    rows = result["tables"]["variants"]
    assert [(row["varies"], row["variant"]) for row in rows] == every
    for row in rows:
        assert row["gain"] == pytest.approx(row["agreement map"] - row["agreement identity"])
    parameters = {(row["varies"], row["variant"]): row["parameters"] for row in rows}
    assert parameters["attention", "full"] == parameters["attention", "local"]
    (panel,) = check_figures(architecture.STUDY, result)
    assert len(panel.figures) == 4
    assert json.dumps(result)


def test_masked_models_are_skipped(data_folder):
    setup = Setup(lj.load(data_folder / "tiny-bert"), TEXT, StudySettings(training_steps=2, finetune_data="x"))
    assert "not causal" in architecture.cannot_run(setup)
    assert "not causal" in finetuning.cannot_run(setup)
