"""`dynamics`, `finetune`, `architecture`: small runs of each, and their figures."""

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
from layerjump.studies.setup import Settings, Setup
from layerjump.training.finetune import ChoiceItem
from layerjump.training.model import VARIANTS
from layerjump.training.monitor import measure_profile
from layerjump.training.pretrain import pretrain

TEXT = stories(200)
RECIPE = replace(SMALL, steps=9, eval_every=3, learning_rate=1e-3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model, with all its checkpoints beside it."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    pretrain(TEXT, folder, RECIPE, device="cpu", keep_checkpoints=True)
    return folder


@pytest.fixture(scope="module")
def setup(trained):
    return Setup(lj.load(trained), stories(60, seed=2), Settings(finetune_runs=2))


def with_settings(setup, **changes):
    return setup.with_empty_cache(settings=replace(setup.settings, **changes))


def test_without_what_they_need_they_are_skipped(setup, tmp_path):
    results = run_studies(setup, select_studies("dynamics,finetune,architecture"), tmp_path)
    reasons = {name: outcome.reason for name, outcome in results.studies.items()}
    assert "pass checkpoints" in reasons["dynamics"]
    assert "pass finetune_task" in reasons["finetune"]
    assert "pass train_steps" in reasons["architecture"]


def test_dynamics_follows_a_series_in_order(setup, trained):
    work = trained.with_name("model-training")
    found = training_dynamics.run(with_settings(setup, checkpoints=(str(trained), str(work))))
    found = found.to_json()
    steps = [row["step"] for row in found["tables"]["steps"]]
    assert steps == [1, 3, 6, 9]  # the model itself has no number: its place in the series
    last, itself = found["tables"]["steps"][-1], found["tables"]["steps"][0]
    for name, value in measure_profile(setup.model, setup.corpus).summary_row().items():
        assert last[name] == pytest.approx(value, rel=1e-6)
        assert itself[name] == last[name]
    assert len(found["tables"]["blocks"]) == 4 * 2
    assert found["headline"]["last_perplexity"] == last["perplexity"]
    shown = check_figures(training_dynamics.STUDY, found)
    assert [panel.title for panel in shown] == ["From step to step", "Block by block"]
    assert json.dumps(found)


def test_dynamics_refuses_what_is_no_checkpoint(setup, tmp_path):
    with pytest.raises(BadStudy, match="expected a checkpoint or a folder of checkpoint"):
        training_dynamics.run(with_settings(setup, checkpoints=(str(tmp_path),)))
    named = replace(setup.model, name="no/such-model")
    with pytest.raises(ModelNotFound):
        training_dynamics.run(
            with_settings(setup, checkpoints=("step1000",)).with_empty_cache(model=named)
        )


def test_every_item_is_held_out_once():
    items = [ChoiceItem(str(n), ("a", "b"), 0) for n in range(11)]
    dealt = finetuning.folds(items, 3, seed=0)
    held = [item for _, part in dealt for item in part]
    assert sorted(item.prompt for item in held) == sorted(item.prompt for item in items)
    assert all(not set(learnt) & set(part) for learnt, part in dealt)
    ((learnt, part),) = finetuning.folds(items, 1, seed=0)
    assert (len(learnt), len(part)) == (8, 3)


def test_finetune_measures_before_and_after(setup, tmp_path):
    task = tmp_path / "task.jsonl"
    rows = [
        {"query": f"Tom has {n}", "choices": ["balls", "dogs"], "gold": n % 2} for n in range(8)
    ]
    task.write_text("\n".join(map(json.dumps, rows)))
    asked = with_settings(setup, finetune_task=str(task), train_steps=3)
    found = finetuning.run(asked).to_json()
    before = measure_profile(setup.model, setup.corpus)
    assert [row["items scored"] for row in found["tables"]["runs"]] == [4, 4]
    for row in found["tables"]["runs"]:
        name = "without residual"
        assert row[f"{name} before"] == pytest.approx(before.mean(name), rel=1e-6)
        assert row[f"{name} change"] == row[f"{name} after"] - row[f"{name} before"] != 0
    changes = [row["without residual change"] for row in found["tables"]["runs"]]
    assert found["headline"]["without_residual_change"] == pytest.approx(sum(changes) / 2)
    by_block = [row["without residual change"] for row in found["tables"]["blocks"]]
    assert sum(by_block) / 2 == pytest.approx(sum(changes) / 2)
    (panel,) = check_figures(finetuning.STUDY, found)
    assert "task.jsonl" in panel.reading
    task.write_text(json.dumps(rows[0]))
    with pytest.raises(BadStudy, match="at least 2 items for 2 runs, got 1"):
        finetuning.run(asked)


def test_architectures_are_trained_and_compared(setup):
    asked = with_settings(setup, train_steps=2, finetune_runs=1)
    found = architecture.run(asked).to_json()
    every = [(what, name) for what, variants in VARIANTS.items() for name in variants]
    rows = found["tables"]["variants"]
    assert [(row["varies"], row["variant"]) for row in rows] == every
    for row in rows:
        assert row["gain"] == pytest.approx(row["agreement map"] - row["agreement identity"])
    split = {(row["varies"], row["variant"]): row["parameters"] for row in rows}
    assert split["attention", "full"] == split["attention", "local"]
    (panel,) = check_figures(architecture.STUDY, found)
    assert len(panel.figures) == 4
    assert json.dumps(found)


def test_a_masked_model_is_told_why_not(data_folder):
    setup = Setup(
        lj.load(data_folder / "tiny-bert"), TEXT, Settings(train_steps=2, finetune_task="x")
    )
    assert "not causal" in architecture.cannot_run(setup)
    assert "not causal" in finetuning.cannot_run(setup)
