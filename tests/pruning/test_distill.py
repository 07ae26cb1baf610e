"""Distillation: only what should be trained is, the loss falls, and a stopped run ends like one that was not."""

from __future__ import annotations

import pytest
import torch

import layerjump as lj
from layerjump.errors import BadArtifact, BadPruning
from layerjump.pruning.distill import DistillationModule, distill
from layerjump.pruning.prune import drop_and_replace, prepare_calibration


@pytest.fixture(scope="module")
def given(data_folder):
    model = lj.load(data_folder / "tiny-gpt2")
    text = lj.load_text("pydoc", limit=120)
    return model, prepare_calibration(model, text, tokens=4_000, split="80/10/10", seed=0)


def loss_of(pruned, calibration, kl=0.0) -> float:
    trainee = DistillationModule(pruned, kl_weight=kl, train_all_weights=False)
    with torch.no_grad():
        found = [float(trainee(batch=batch)["loss"]) for batch in calibration.fit]
    trainee.finish()
    return sum(found) / len(found)


@pytest.mark.parametrize("method", ["linear", "fold"])
def test_the_stand_ins_alone_are_trained(given, method, tmp_path):
    model, calibration = given
    made = drop_and_replace(model, [(2, 3)], method, calibration)
    before, kept = loss_of(made, calibration), {}
    for name, tensor in made.model.hf.state_dict().items():
        kept[name] = tensor.clone()
    done = distill(made, calibration, tmp_path, steps=12, learning_rate=3e-4, kl_weight=0.0)
    assert loss_of(done, calibration) < before
    changed = {n for n, t in done.model.hf.state_dict().items() if not torch.equal(t, kept[n])}
    folded = {"transformer.h.1.mlp.c_proj.weight", "transformer.h.1.mlp.c_proj.bias"}
    assert changed == (folded if method == "fold" else set())
    assert done.distillation.steps == 12
    assert done.loss.ratio > 0


def test_the_loss_is_the_states_error_over_their_size(given):
    """Written out for one batch, with a scaled frame among the levels."""
    model, calibration = given
    made = drop_and_replace(model, [(1, 2)], "fold", calibration)
    batch = calibration.fit[0]
    (ours,) = lj.capture_states(made.model, [batch], [1, 2, 3])
    (theirs,) = lj.capture_states(model, [batch], [2, 3, 4])
    errors = []
    for here, there in ((1, 2), (2, 3), (3, 4)):
        wanted = made.transforms[0].scale * theirs[there]
        error = (ours[here] - wanted).square().sum(-1) / wanted.square().sum(-1)
        errors.append(float(error.mean()))
    trainee = DistillationModule(made, kl_weight=0.0, train_all_weights=False)
    with torch.no_grad():
        assert float(trainee(batch=batch)["loss"]) == pytest.approx(sum(errors) / 3, rel=1e-4)
        more = DistillationModule(made, kl_weight=2.0, train_all_weights=False)
        assert float(more(batch=batch)["loss"]) > float(trainee(batch=batch)["loss"])


def test_a_stopped_run_goes_on_and_ends_the_same(given, tmp_path):
    model, calibration = given
    whole = drop_and_replace(model, [(2, 3)], "linear", calibration)
    distill(whole, calibration, tmp_path / "whole", steps=8)
    parts = drop_and_replace(model, [(2, 3)], "linear", calibration)
    trainer_folder = tmp_path / "parts"
    first = drop_and_replace(model, [(2, 3)], "linear", calibration)
    distill(first, calibration, trainer_folder, steps=8)
    # As if it had been stopped after step 6.
    (trainer_folder / "checkpoint-8").rename(tmp_path / "away")
    assert (trainer_folder / "checkpoint-6").is_dir()
    with pytest.raises(BadArtifact, match="other settings"):
        distill(parts, calibration, trainer_folder, steps=9)
    distill(parts, calibration, trainer_folder, steps=8)
    ours, theirs = parts.jumps.state_dict(), whole.jumps.state_dict()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)


def test_nothing_to_train_is_refused(given, tmp_path):
    model, calibration = given
    made = drop_and_replace(model, [(2, 3)], "remove", calibration)
    with pytest.raises(BadPruning, match="no replacement"):
        distill(made, calibration, tmp_path, steps=2)
    with pytest.raises(BadPruning, match="1 or more"):
        distill(made, calibration, tmp_path, steps=0)
    done = distill(made, calibration, tmp_path, steps=2, train_all_weights=True)
    assert done.distillation.trained == "every weight"
