"""Fits in less memory than all sums take: the same jumps, from states on disk, states in memory, or several passes."""

import resource
import subprocess
import sys
import time

import pytest
import torch
from helpers import fitted_gpt2
from helpers.comparisons import same_bytes

import layerjump as lj
from layerjump.errors import BadArtifact, LayerjumpError, TooLarge
from layerjump.jumps.collect_moments import plan_run
from layerjump.jumps.cost_estimate import MemoryPlan, parse_memory, plan_memory
from layerjump.jumps.fit import fit_planned
from layerjump.jumps.spill_states import StateStore
from layerjump.models.sites import Site

model = fitted_gpt2.model  # fixture
CASES = [
    ("mat", "all", {}),
    ("affine", "submodules", {}),
    ("ridge", "all", {}),
    ("orthogonal", "adjacent", {}),
    ("low-rank", "to-last", {"rank": 8}),
    ("ojfa", "to-last", {}),
    ("identity", "all", {}),
    ("calibrated", None, {}),
]


@pytest.mark.parametrize(("estimator", "pairs", "settings"), CASES, ids=[case[0] for case in CASES])
def test_spilled_jumps_have_the_same_bytes(estimator, pairs, settings, model, study_text, tmp_path):
    options = {"estimator": estimator, "pairs": pairs, "tokens": 5_000, **settings}
    lj.fit(model, study_text, **options).save_pretrained(tmp_path / "whole")
    lj.fit(model, study_text, spill=tmp_path / "states", **options).save_pretrained(tmp_path / "spilled")
    assert same_bytes(tmp_path / "whole", tmp_path / "spilled")
    assert not (tmp_path / "states").exists()


@pytest.mark.parametrize("estimator", ["mat", "calibrated"])
def test_held_out_states_instead_of_sums_give_the_same_bytes(estimator, model, study_text, tmp_path):
    run = plan_run(model, study_text, estimator=estimator, tokens=5_000)
    pairs = (tuple(run.moments["fit"].pairs),)
    for storage in ("sums", "held-out states"):
        run = plan_run(model, study_text, estimator=estimator, tokens=5_000)
        fit_planned(run, MemoryPlan(storage, run.cost, pairs), estimator).save_pretrained(tmp_path / storage)
    assert same_bytes(tmp_path / "sums", tmp_path / "held-out states")


def test_targets_in_groups_give_the_same_bytes(model, study_text, tmp_path):
    for targets in (None, 1, 3):
        run = plan_run(model, study_text, estimator="mat", pairs="all", tokens=5_000)
        plan = MemoryPlan("spill", run.cost, (tuple(run.moments["fit"].pairs),), targets, tmp_path / "states")
        fit_planned(run, plan, "mat").save_pretrained(tmp_path / str(targets))
    assert same_bytes(*(tmp_path / name for name in ("None", "1", "3")))


def test_several_passes_give_the_same_jumps(model, study_text, tmp_path):
    run = plan_run(model, study_text, estimator="mat", pairs="all", tokens=5_000)
    pairs = run.moments["fit"].pairs
    passes = tuple(tuple(pair for pair in pairs if pair[0].index % 2 == part) for part in (0, 1))
    whole = fit_planned(run, MemoryPlan("sums", run.cost, (tuple(pairs),)), "mat")
    run = plan_run(model, study_text, estimator="mat", pairs="all", tokens=5_000)
    parts = fit_planned(run, MemoryPlan("sums", run.cost, passes), "mat")
    assert list(parts) == list(whole)
    assert all(torch.equal(parts[pair].weight, whole[pair].weight) for pair in whole)


def test_the_plan_takes_what_fits(model, study_text, tmp_path):
    run = plan_run(model, study_text, estimator="mat", pairs="all", tokens=5_000)

    def planned(memory, **options):
        return plan_memory(model, run.moments["fit"], run.batches, "mat", memory=memory, **options)

    in_memory = planned(None)
    assert (in_memory.storage, len(in_memory.passes)) == ("sums", 1)
    all_sums = in_memory.cost.bytes
    spilled = planned(all_sums, spill=tmp_path)
    assert spilled.storage == "spill"
    assert spilled.cost.bytes < all_sums
    assert planned(all_sums - 1, spill_if_needed=tmp_path).storage != "sums"
    tight = planned(spilled.cost.bytes, spill_if_needed=tmp_path)
    assert (tight.storage, tight.cost.disk_bytes > 0) == ("spill", True)
    with pytest.raises(TooLarge, match="spill"):
        planned(1000)


def test_a_run_says_which_plan_it_takes(model, study_text, caplog):
    with caplog.at_level("INFO", logger="layerjump"):
        needed = plan_run(model, study_text, estimator="mat", pairs="all", tokens=5_000).cost.bytes
        lj.fit(model, study_text, pairs="all", tokens=5_000, memory=needed - 1)
    assert "sums of the fit split and states of the others in memory" in caplog.text


def test_several_passes_where_held_out_states_are_many(model):
    """Without a folder for states; the test split is so long that its states take more than its sums."""
    run = plan_run(model, "pydoc", estimator="mat", pairs="all", positions="all", tokens=60_000, split="50/0/50")
    needed = run.cost.bytes
    plan = plan_memory(model, run.moments["fit"], run.batches, "mat", memory=needed - 1)
    assert plan.storage == "sums"
    assert len(plan.passes) > 1
    assert sorted(pair for part in plan.passes for pair in part) == sorted(run.moments["fit"].pairs)
    assert "passes over the text" in str(plan)


@pytest.mark.parametrize(
    ("memory", "amount"), [("48GB", 48e9), ("1.5 TB", 1.5e12), (7, 7), ("200m", 2e8), (None, None)]
)
def test_amounts_of_memory(memory, amount):
    assert parse_memory(memory) == amount


@pytest.mark.parametrize("memory", ["much", "0GB", 0, "-1GB", "12 apples"])
def test_other_amounts_are_refused(memory):
    with pytest.raises(LayerjumpError, match="such as 48GB"):
        parse_memory(memory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("on_disk", [True, False])
def test_states_come_back_as_they_were(dtype, on_disk, tmp_path):
    rows = {Site(0): torch.randn(10, 5).to(dtype), Site(1): torch.randn(10, 3).to(dtype)}
    store = StateStore([Site(0), Site(1)], 10, tmp_path / "x.states" if on_disk else None)
    for part in (slice(0, 4), slice(4, 10)):
        store.append({site: states[part] for site, states in rows.items()})
    for site, states in rows.items():
        assert torch.equal(store.read(site, 2, 7), states[2:7])
    store.close()
    assert list(tmp_path.iterdir()) == []


COMMAND = ["--pairs", "all", "--positions", "all", "--tokens", "30000"]


def command(data_folder, *options):
    return [sys.executable, "-m", "layerjump", "fit", str(data_folder / "tiny-gpt2"), *COMMAND, *map(str, options)]


def test_a_killed_run_starts_over_cleanly(data_folder, tmp_path):
    subprocess.run(command(data_folder, "-o", tmp_path / "whole"), capture_output=True, check=True)
    spilled = command(data_folder, "-o", tmp_path / "spilled", "--spill", tmp_path / "states")
    process = subprocess.Popen(spilled, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "states" / "fit.states").is_file():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert (tmp_path / "states" / "fit.states").is_file()
    done = subprocess.run(spilled, capture_output=True, text=True, check=True)
    assert "removed the states of an unfinished run" in done.stderr
    assert same_bytes(tmp_path / "whole", tmp_path / "spilled")
    assert list((tmp_path / "states").glob("*.states")) == []


def test_a_full_disk_is_one_line(data_folder, tmp_path):
    spilled = command(data_folder, "-o", tmp_path / "spilled", "--spill", tmp_path / "states")
    limit = (500_000, 500_000)
    done = subprocess.run(
        spilled,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "states cannot be written: it is larger than this system lets a file be" in done.stderr
    assert list(tmp_path.rglob("*.states")) == []


def test_a_folder_that_another_run_uses_is_refused(model, study_text, tmp_path):
    from layerjump.jumps.spill_states import spill_folder

    with spill_folder(tmp_path / "states"), pytest.raises(BadArtifact, match="another run is writing"):
        lj.fit(model, study_text, tokens=5_000, spill=tmp_path / "states")


def test_spilling_and_saved_sums_exclude_each_other(data_folder, tmp_path):
    spilled = command(data_folder, "-o", tmp_path / "a", "--spill", tmp_path / "b", "--save-moments")
    done = subprocess.run(spilled, capture_output=True, text=True, check=False)
    assert done.stderr.strip().splitlines()[-1].startswith("error: --memory and --spill plan the run of one process")
