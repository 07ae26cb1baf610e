"""The pass over text: exact against scikit-learn, whatever the processes, and whatever stops it."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score
from tiny import silent_gpt2, tiny_model

import layerjump as lj
from layerjump.errors import (
    BadArtifact,
    BadEstimator,
    BadMoments,
    LayerjumpError,
    TextTooShort,
    TooLarge,
    WrongModel,
)
from layerjump.fit.bill import Bill, site_width
from layerjump.fit.checkpoint import Checkpoint
from layerjump.fit.collect import plan
from layerjump.fit.collected import Collected, merge
from layerjump.fit.fit import solve_jumps
from layerjump.fit.pairs import parse_pairs
from layerjump.inputs.sites import Site


@pytest.fixture(scope="module")
def model(data_folder):
    return lj.load(data_folder / "tiny-gpt2")


@pytest.fixture(scope="module")
def text():
    return lj.read("pydoc", limit=300)


@pytest.fixture(scope="module")
def collected(model, text):
    return lj.collect(model, text, pairs="all", positions="all")


def kept(model, text, sites, documents, positions):
    """All states of some documents, as float64 arrays."""
    batches = lj.batches(text, model.tokens, positions, documents=documents)
    found = list(lj.states(model, batches, sites))
    return {site: torch.cat([states[site] for states in found]).double().numpy() for site in sites}


@pytest.mark.parametrize("skip_first", [0, 1])
@pytest.mark.parametrize("name", ["tiny-gpt2", "stories15M"])
def test_mat_equals_scikit_learn_on_the_same_states(name, skip_first, data_folder, real_folder):
    """Also with attention-sink rows (skip_first 0): predictions within 1e-4 of their standard deviation."""
    folder = real_folder(name) if name == "stories15M" else data_folder / name
    model, text = lj.load(folder), lj.read("pydoc")
    positions = lj.Positions("sample", 9, skip_first=skip_first, special=True)
    jumps = lj.fit(model, text, positions=positions, sizes="1000/0/100")
    parts = lj.split(len(text.documents), "1000/0/100")
    here, last = Site(1), Site(model.n_blocks)
    train = kept(model, text, [here, last], parts.fit, positions)
    test = kept(model, text, [here, last], parts.test, positions)
    # tol=0: by default scikit-learn 1.9 cuts off directions that are small beside the largest.
    theirs = LinearRegression(fit_intercept=False, tol=0).fit(train[here], train[last])
    expected = theirs.predict(test[here])
    ours = jumps[here, last].double()(torch.from_numpy(test[here])).numpy()
    assert np.abs(ours - expected).max() <= 1e-4 * expected.std()
    info = jumps.info[here, last]
    assert info.r2[0] == pytest.approx(r2_score(test[last], expected), abs=1e-6)
    weighted = r2_score(test[last], expected, multioutput="variance_weighted")
    assert info.r2[1] == pytest.approx(weighted, abs=1e-6)
    assert info.r2_identity[0] == pytest.approx(r2_score(test[last], test[here]), rel=1e-5)


def test_mat_beats_identity_at_every_level(model, collected):
    jumps = solve_jumps(collected, "mat")
    assert len(jumps) == 10
    for info in jumps.info.values():
        assert info.r2[0] > info.r2_identity[0]


def test_an_affine_model_is_recovered():
    """With attention and feed-forward silenced a block is the identity; between norms' inputs all is linear."""
    hf = silent_gpt2()
    model = lj.Model.wrap(hf, byte_tokenizer())
    jumps = lj.fit(
        model, lj.read("pydoc", limit=120), pairs="to-last", estimator="affine", max_length=32
    )
    for info in jumps.info.values():
        assert info.r2[0] == pytest.approx(1, abs=1e-8)
    states = torch.randn(5, 32, dtype=torch.float64)
    shift = sum(block.attn.c_proj.bias + block.mlp.c_proj.bias for block in hf.transformer.h)
    assert torch.allclose(jumps[0, 3].double()(states), states + shift, atol=1e-5)


def byte_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {chr(97 + i): i for i in range(26)} | {"[UNK]": 60}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


@pytest.mark.parametrize(
    "estimator",
    ["identity", "mean-shift", "mat", "affine", "ridge", "orthogonal", "n-njtc", "ojfa"],
)
def test_every_estimator_makes_jumps(collected, estimator):
    to_last = [(a, b) for a, b in collected.fit.pairs if b == Site(4)]
    assert len(to_last) == 4
    if estimator == "ojfa":
        with pytest.raises(BadEstimator, match="to-last"):
            solve_jumps(collected, "ojfa")
        return
    jumps = solve_jumps(collected, estimator)
    assert all(np.isfinite(info.r2).all() for info in jumps.info.values())


@pytest.mark.parametrize("how", ["pooled", "best-level"])
def test_one_jump_for_all(model, text, how):
    jumps = solve_jumps(lj.collect(model, text), "ojfa", rank=8, how=how)
    assert len({tuple(jumps[level, 4][0].weight.flatten()[:9].tolist()) for level in range(4)}) == 1
    assert all(info.rank == 8 for info in jumps.info.values())


def test_low_rank_in_the_unembeddings_metric_predicts_better(model, text):
    """At the same small rank, the metric's map has the smaller error in logits, on held-out text."""
    run = lj.collect(model, text, positions="all")
    plain = solve_jumps(run, "low-rank", rank=4)
    metric = solve_jumps(run, "low-rank", rank=4, metric="unembedding", model=model)
    parts = lj.split(len(text.documents))
    test = kept(model, text, [Site(1), Site(4)], parts.test, lj.Positions("all"))
    x, y = (torch.from_numpy(test[site]).float() for site in (Site(1), Site(4)))
    scale = model.hf.transformer.ln_f.weight * model.hf.lm_head.weight
    scale = scale - scale.mean(0)
    errors = [((jumps[1, 4](x) - y) @ scale.mT).square().sum() for jumps in (plain, metric)]
    assert errors[1] < errors[0]
    with pytest.raises(BadEstimator, match="unembedding"):
        solve_jumps(run, "low-rank", rank=4, metric="unembedding")


def test_sub_modules_are_paired_input_to_output_with_position_0(model, text):
    run = lj.collect(model, text, pairs="submodules", tokens=6000)
    assert len(run.fit.pairs) == 16
    assert run.about["skip_first"] == 0
    jumps = solve_jumps(run, "affine")
    assert jumps.info["1.attn.in", "1.attn.out"].lands == "site"
    assert jumps.info["2.ln1.in", "2.ln1.out"].r2[1] > 0.5


def test_pairs_are_parsed_and_bad_ones_named(model):
    anatomy = model.anatomy
    assert len(parse_pairs("all", anatomy)) == 10
    assert parse_pairs("adjacent", anatomy)[0] == (Site(0), Site(1))
    assert parse_pairs("0:4, 2.attn.in:final", anatomy)[1][0] == Site(2, "attn.in")
    for bad, message in [("0", "give to-last"), ("0:9", "levels 0 to 4"), ("3:3", "to itself")]:
        with pytest.raises(LayerjumpError, match=message):
            parse_pairs(bad, anatomy)


def test_all_pairs_sample_positions_by_themselves(model):
    run = plan(model, "pydoc", pairs="all")
    share = lj.Positions.parse(run.about["positions"]).amount
    assert share == 0.15
    assert run.batches["fit"].n_picks >= 44 * model.width
    few = plan(model, lj.read("pydoc", limit=60), pairs="all")
    assert lj.Positions.parse(few.about["positions"]).amount > 0.15
    assert few.batches["fit"].n_picks == pytest.approx(44 * model.width, rel=0.05)


def test_few_positions_are_warned_about(model, caplog):
    with caplog.at_level("WARNING", logger="layerjump"):
        plan(model, lj.read("pydoc", limit=60), positions="one")
    assert "inflated by 1 + d/(n−d−1)" in caplog.text


def test_the_bill_is_refused_when_memory_lacks(model, text):
    run = plan(model, text, pairs="all", positions="all")
    entries = 64 * 64 * (4 + 10) if model.width == 64 else model.width**2 * 14
    assert run.bill.sums_bytes == 3 * (8 * entries + 4 * 2000 * 5 * model.width)
    assert "positions; memory for sums" in str(run.bill)
    with pytest.raises(TooLarge, match="fewer pairs"):
        Bill(10**15, 0, 1, 1, 1, 1).require_memory()


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "gemma2", "albert"])
def test_widths_are_known_before_the_run(family):
    wrapped = lj.Model.wrap(tiny_model(family))
    from layerjump.inputs.check import sample

    (found,) = lj.states(wrapped, [sample(wrapped)], wrapped.anatomy.sites())
    for site in wrapped.anatomy.sites():
        assert site_width(wrapped, site) == found[site].shape[1], site


def test_text_shorter_than_asked_for(model):
    with pytest.raises(TextTooShort, match="asked for"):
        lj.collect(model, lj.read("pydoc", limit=50), tokens=10**7)


def test_bad_states_name_level_and_batch(model, text):
    hf = tiny_model("gpt2", dtype=torch.float32)
    wrapped = lj.Model.wrap(hf, byte_tokenizer())
    with torch.no_grad():
        hf.transformer.h[1].mlp.c_proj.bias[3] = float("nan")
    with pytest.raises(BadMoments, match=r"site 2 hold NaN .* in batch 0 of the test split"):
        lj.collect(wrapped, text, max_length=32)


# -- saved sums


def test_saved_sums_give_the_same_jumps(collected, tmp_path):
    collected.save(tmp_path / "m.safetensors")
    loaded = Collected.load(tmp_path / "m.safetensors")
    assert loaded.about == collected.about
    for name, total in collected.fit.sums.items():
        assert torch.equal(total, loaded.fit.sums[name])
    assert torch.equal(
        loaded.test.reservoir.states[Site(2)], collected.test.reservoir.states[Site(2)]
    )
    for folder, run in (("a", collected), ("b", loaded)):
        solve_jumps(run, "ridge").save_pretrained(tmp_path / folder)
    assert same_bytes(tmp_path / "a", tmp_path / "b")


def same_bytes(*folders: Path) -> bool:
    return len({(folder / "jumps.safetensors").read_bytes() for folder in folders}) == 1


def test_two_halves_merge_to_the_whole(model, text):
    """Documents of two runs add up to the run over both: the same maps to float tolerance."""
    half = [
        lj.Corpus(name, docs, "")
        for name, docs in (("a", text.documents[:150]), ("b", text.documents[150:]))
    ]
    whole = merge([lj.collect(model, corpus, sizes="100/0/0") for corpus in half])
    once = lj.collect(model, text, sizes="100/0/0")
    assert whole.fit.n == once.fit.n
    assert whole.about["text"] == "a + b"
    assert_same_predictions(solve_jumps(whole, "mat"), solve_jumps(once, "mat"), model, text)


def assert_same_predictions(ours, theirs, model, text) -> None:
    """Maps may differ where no state goes; what they make of real states may not."""
    assert set(ours) == set(theirs)
    sites = sorted({site for pair in ours for site in pair})
    states = kept(model, text, sites, range(50), lj.Positions("all"))
    for pair in ours:
        x = torch.from_numpy(states[pair[0]]).float()
        a, b = ours[pair](x), theirs[pair](x)
        assert (a - b).abs().max() < 1e-4 * b.std()


def test_what_cannot_be_merged_is_said(collected, model, text, data_folder):
    with pytest.raises(BadMoments, match="count it twice"):
        merge([collected, collected])
    other = lj.collect(lj.load(data_folder / "tiny-bert"), text, pairs="all", tokens=3000)
    with pytest.raises(WrongModel, match="different weights"):
        merge([collected, other])
    few = lj.collect(model, lj.read("pydoc", limit=80), pairs="to-last")
    with pytest.raises(BadMoments, match="same pairs"):
        merge([collected, few])


def test_damaged_and_foreign_files_are_named(collected, tmp_path):
    path = tmp_path / "m.safetensors"
    collected.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadArtifact):
        Collected.load(path)
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(BadArtifact):
        Collected.load(path)


# -- stopped and taken up again

RUN = """
import sys, layerjump as lj
from pathlib import Path
from layerjump.fit.checkpoint import Checkpoint
from layerjump.fit.collect import plan
from layerjump.fit.fit import solve_jumps
model, out, every = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
checkpoint = Checkpoint(out, every, resume=True)
run = plan(lj.load(model), "pydoc", pairs="all", positions="all", max_length=64)
out.mkdir(exist_ok=True)
(out / "began").touch()
solve_jumps(run.run(checkpoint=checkpoint), "affine").save_pretrained(out)
checkpoint.clear()
"""


def start(model, out, every=0.0):
    code = [sys.executable, "-c", RUN, str(model), str(out), str(every)]
    return subprocess.Popen(code, stderr=subprocess.PIPE, text=True)


def test_killed_at_twenty_random_moments_it_ends_byte_identical(data_folder, tmp_path):
    """Sums are saved after every batch, so kills hit the middle of batches and of saves alike."""
    folder, moments, kills = data_folder / "tiny-gpt2", random.Random(0), 0
    whole = start(folder, tmp_path / "whole")
    assert whole.wait() == 0, whole.stderr.read()
    finished = tmp_path / "killed-0"
    while kills < 20:
        process = start(folder, finished)
        # Its pid file says that the pass begins; before that there would be nothing to lose.
        while not (finished / "began").is_file() and process.poll() is None:
            time.sleep(0.01)
        (finished / "began").unlink(missing_ok=True)
        time.sleep(moments.uniform(0, 1.0))
        if process.poll() is None:
            process.kill()
            kills += 1
        if process.wait() == 0:  # it got to its end: begin another
            assert same_bytes(tmp_path / "whole", finished)
            finished = tmp_path / f"killed-{kills}"
    process = start(folder, finished)
    assert process.wait() == 0, process.stderr.read()
    assert same_bytes(tmp_path / "whole", finished)
    assert [path.name for path in finished.iterdir() if path.name.startswith("unfinished")] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_saves_and_says_how_to_go_on(number, data_folder, tmp_path):
    command = [
        sys.executable,
        "-m",
        "layerjump",
        "fit",
        str(data_folder / "tiny-gpt2"),
        "--pairs",
        "all",
    ]
    command += ["--positions", "all", "--save-every", "0", "-o"]
    subprocess.run([*command, str(tmp_path / "whole")], capture_output=True, check=True)
    folder = tmp_path / "stopped"
    process = subprocess.Popen(
        [*command, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not (
        folder / "unfinished-0-of-1.safetensors"
    ).is_file():  # it is in the middle of the pass
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert error.strip().splitlines()[-1].endswith("run the same command with --resume to go on")
    assert not (folder / "jumps.safetensors").exists()
    done = subprocess.run(
        [*command, str(folder), "--resume"], capture_output=True, text=True, check=True
    )
    assert "R²" in done.stdout
    assert same_bytes(tmp_path / "whole", folder)


def test_resuming_with_other_settings_is_refused(model, text, tmp_path):
    run = plan(model, text)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(Collected(run.moments, run.about), dict.fromkeys(run.batches, 0))
    again = plan(model, text, seed=1)
    with pytest.raises(BadArtifact, match="other settings .*seed 0 → 1"):
        again.run(checkpoint=Checkpoint(tmp_path, resume=True))


# -- several processes


def torchrun(n: int, *arguments: str) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(n),
        "--master-port",
        "0",
    ]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return subprocess.run(
        [*command, "-m", "layerjump", "fit", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("n", [2, 3])
def test_several_processes_give_the_same_jumps(n, model, data_folder, tmp_path):
    folder = str(data_folder / "tiny-gpt2")
    lj.fit(model, "pydoc", pairs="adjacent").save_pretrained(tmp_path / "one")
    done = torchrun(n, folder, "--pairs", "adjacent", "-o", str(tmp_path / "many"))
    assert done.returncode == 0, done.stderr
    one, many = (lj.Jumps.from_pretrained(tmp_path / name) for name in ("one", "many"))
    assert json.loads((tmp_path / "many" / "jumps.json").read_text())["provenance"]["n_fit"] > 0
    assert_same_predictions(many, one, model, lj.read("pydoc"))
    for pair in one:
        assert one.info[pair].r2 == pytest.approx(many.info[pair].r2, abs=1e-5)


def test_a_process_that_dies_ends_the_run_and_resume_completes_it(data_folder, tmp_path):
    settings = (
        str(data_folder / "tiny-gpt2"),
        "--pairs",
        "all",
        "--positions",
        "all",
        "--save-every",
        "0",
    )
    assert torchrun(2, *settings, "-o", str(tmp_path / "whole")).returncode == 0
    folder = tmp_path / "broken"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    run = subprocess.Popen(
        [*command, "-m", "layerjump", "fit", *settings, "-o", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    while len(list(folder.glob("unfinished-*-of-2.safetensors"))) < 2:
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.02)
    for child in psutil.Process(run.pid).children(recursive=True):
        if child.environ().get("RANK") == "1":
            child.kill()
    _, error = run.communicate(timeout=120)
    assert run.returncode != 0
    assert "--resume" in error
    assert not (folder / "jumps.json").exists()
    resumed = torchrun(2, *settings, "-o", str(folder), "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert same_bytes(tmp_path / "whole", folder)
    assert list(folder.glob("unfinished-*")) == []
