"""Kept jumps: fitted once for each model, whoever asks and however often."""

import os
from pathlib import Path

import pytest
import torch
from helpers.processes import end_of, start
from helpers.synthetic_jumps import same

import layerjump as lj
from layerjump.errors import BadArtifact, BadEstimator
from layerjump.jumps.default_jumps import cached_jumps, has_cached_jumps

FEW = {"tokens": 3_000}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERJUMP_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def model(data_folder):
    model = lj.load(data_folder / "tiny-gpt2")
    assert model.tokenization  # its first use runs the model, to measure whether it needs BOS
    return model


@pytest.fixture
def runs(model):
    """Grows by one whenever the model runs."""
    found = []
    handle = model.stack.register_forward_pre_hook(lambda *_: found.append(1))
    yield found
    handle.remove()


def test_the_second_use_loads_what_the_first_one_fitted(home, model, runs):
    assert not has_cached_jumps(model, ["mat"], **FEW)
    seen = []
    first = cached_jumps(model, ["mat"], progress=lambda *done: seen.append(done), **FEW)["mat"]
    passes = len(runs)
    assert passes == len(seen) > 0
    assert seen[-1][0] == seen[-1][1] > 2_000
    assert has_cached_jumps(model, ["mat"], **FEW)
    assert not has_cached_jumps(model, ["mat", "affine"], **FEW)
    assert same(cached_jumps(model, ["mat"], **FEW)["mat"], first)
    assert len(runs) == passes
    wanted = lj.fit(model, "pydoc", **FEW)
    for pair in wanted:
        torch.testing.assert_close(first[pair].weight, wanted[pair].weight)
    assert first.provenance.skip_first == 1
    assert list(home.rglob("*new*")) == []


def test_several_estimators_cost_one_pass(home, model, runs):
    found = cached_jumps(model, ["mat", "affine", "ridge"], **FEW)
    assert list(found) == ["mat", "affine", "ridge"]
    assert found["ridge"].info[2, 4].strength is not None  # chosen on the select split
    passes = len(runs)
    cached_jumps(model, ["ridge", "mat"], **FEW)
    assert len(runs) == passes
    cached_jumps(model, ["mat", "mean-shift"], **FEW)
    assert passes < len(runs) <= 2 * passes


def test_more_text_and_other_text_are_kept_apart(home, model, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("\n".join(f"Lily had {n} red balls and a dog named Max." for n in range(400)))
    settings = {"text": str(file), "tokens": 2_000}
    other = cached_jumps(model, **settings)["mat"]
    assert other.provenance.text != "pydoc"
    assert has_cached_jumps(model, **settings)
    assert not has_cached_jumps(model, **FEW)
    file.write_text(file.read_text().replace("Lily", "Tom"))
    assert not has_cached_jumps(model, **settings)


def test_other_weights_have_jumps_of_their_own(home, model, data_folder):
    cached_jumps(model, **FEW)
    changed = lj.load(data_folder / "tiny-gpt2")
    with torch.no_grad():
        changed.hf.transformer.h[1].mlp.c_fc.weight.mul_(1.5)
    assert not has_cached_jumps(changed, **FEW)


@pytest.mark.parametrize("damage", ["cut", "emptied", "mixed"])
def test_a_broken_folder_is_fitted_again(damage, home, model, runs):
    first = cached_jumps(model, **FEW)["mat"]
    (tensors,) = home.rglob("jumps.safetensors")
    if damage == "cut":
        tensors.write_bytes(tensors.read_bytes()[:-100])
    elif damage == "emptied":
        tensors.unlink()
    else:
        (tensors.parent / "jumps.json").write_text("{}")
    before = len(runs)
    again = cached_jumps(model, **FEW)["mat"]
    assert len(runs) > before
    assert same(first, again)
    done = len(runs)
    cached_jumps(model, **FEW)
    assert len(runs) == done


def test_two_processes_fit_once(home, model):
    def fit() -> None:
        passes = []
        model.stack.register_forward_pre_hook(lambda *_: passes.append(1))
        cached_jumps(model, **FEW)
        (home / f"passes-{os.getpid()}").write_text(str(len(passes)))

    children = [start(fit) for _ in range(3)]
    assert [end_of(child) for child in children] == [0, 0, 0]
    passes = sorted(int(path.read_text()) for path in home.glob("passes-*"))
    assert passes[:2] == [0, 0]
    assert passes[2] > 0


def test_a_masked_model_is_fitted_at_masks(home, data_folder):
    jumps = cached_jumps(lj.load(data_folder / "tiny-bert"), tokens=6_000)["mat"]
    assert jumps.provenance.positions == "15%"


def test_what_cannot_be_kept_is_said_before_anything_runs(home, model, runs):
    with pytest.raises(BadEstimator, match="unknown estimator 'magic'"):
        cached_jumps(model, ["mat", "magic"], **FEW)
    with pytest.raises(BadEstimator, match="low-rank needs a rank"):
        cached_jumps(model, ["low-rank"], **FEW)
    assert runs == []


def test_a_home_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, model):
    Path(tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("LAYERJUMP_HOME", str(tmp_path / "file"))
    with pytest.raises(BadArtifact, match="cannot be written"):
        cached_jumps(model, **FEW)
