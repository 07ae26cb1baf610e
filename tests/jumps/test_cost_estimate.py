"""Estimates before a run: what large models take on paper, and what a run says and refuses."""

import runpy
from pathlib import Path

import psutil
import pytest
import torch
from helpers import fitted_gpt2
from helpers.small_llama import save_small_llama
from helpers.story_text import stories

import layerjump as lj
from layerjump.errors import TooLarge
from layerjump.jumps.collect_moments import plan_run
from layerjump.jumps.cost_estimate import ModelSize, Speed, estimate_cost, format_duration, measure_speed

ROOT = Path(__file__).resolve().parents[2]
model = fitted_gpt2.model  # fixture


def test_the_table_of_large_models_is_what_the_script_prints():
    table = runpy.run_path(str(ROOT / "benchmarks/cost_table.py"))["markdown"]()
    assert table in (ROOT / "docs/scale.md").read_text(encoding="utf-8"), "run: python benchmarks/cost_table.py"


def test_sums_on_paper_are_the_sums_of_a_run(model, study_text):
    run = plan_run(model, study_text, estimator="mat", pairs="all", tokens=5_000)
    cost = estimate_cost(ModelSize.of(model), run.moments["fit"], run.batches)
    moments = run.run()
    splits = [split for split in moments.splits.values() if split.n]
    held = sum(total.nbytes for split in splits for total in (*split.sums.gram.values(), *split.sums.cross.values()))
    held += sum(rows.nbytes for split in splits for rows in split.reservoir.states.values())
    assert cost.sums_bytes == held


def test_processes_on_one_host_hold_the_sums_together(model, study_text, monkeypatch):
    cost = plan_run(model, study_text, tokens=5_000).cost
    assert cost.host_bytes(1) == cost.bytes
    assert cost.bytes < cost.host_bytes(4) < 4 * cost.bytes
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert "in 4 processes" in str(cost)


def test_time_follows_from_arithmetic_and_speed(model, study_text):
    run = plan_run(model, study_text, tokens=5_000)
    moments = run.moments["fit"]
    fast, slow = (estimate_cost(model, moments, run.batches, speed=Speed(v, v, v)) for v in (2e9, 1e9))
    assert slow.seconds == pytest.approx(2 * fast.seconds)
    measured = measure_speed(model, torch.float64)
    assert min(measured.model, measured.products, measured.solve) > 1e6
    assert "; about " in str(run.cost)
    assert [format_duration(seconds) for seconds in (0.2, 75, 600, 9000)] == ["1 s", "75 s", "10 min", "2.5 h"]


@pytest.fixture
def little_memory(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000})())


def test_long_runs_are_refused_before_they_start(little_memory, tmp_path):
    loaded = lj.load(save_small_llama(tmp_path))
    with pytest.raises(TooLarge, match="this run needs .* for copies"):
        lj.prune(loaded, stories(60), drop=1)
    with pytest.raises(TooLarge, match="states and probes"):
        lj.calibrate(loaded, None, stories(400), target=0.5, confidence=0.5)
    from layerjump.studies.runner import run_studies, select_studies
    from layerjump.studies.setup import Setup

    with pytest.raises(TooLarge, match="the sums and maps of all studies"):
        run_studies(Setup(loaded, stories(60)), select_studies("r2,submodules"), tmp_path / "study")
