"""Distillation trains the right weights, lowers the loss, and resumes to the same result."""

from __future__ import annotations

import pytest
import torch

import layerjump as lj
from layerjump.errors import BadArtifact, BadPruning
from layerjump.pruning.distill import DistillationModule, distill
from layerjump.pruning.prune import drop_and_replace, prepare_calibration


@pytest.fixture(scope="module")
def model_and_calibration(data_folder):
    model = lj.load(data_folder / "tiny-gpt2")
    text = lj.load_text("pydoc", limit=120)
    return model, prepare_calibration(model, text, tokens=4_000, split="80/10/10", seed=0)


def loss_of(pruned, calibration, kl=0.0) -> float:
    module = DistillationModule(pruned, kl_weight=kl, train_all_weights=False)
    with torch.no_grad():
        losses = [float(module(batch=batch)["loss"]) for batch in calibration.fit]
    module.finish()
    return sum(losses) / len(losses)


@pytest.mark.parametrize("method", ["linear", "fold"])
def test_only_the_replacements_are_trained(model_and_calibration, method, tmp_path):
    model, calibration = model_and_calibration
    pruned = drop_and_replace(model, [(2, 3)], method, calibration)
    before, weights = loss_of(pruned, calibration), {}
    for name, tensor in pruned.model.hf.state_dict().items():
        weights[name] = tensor.clone()
    distilled = distill(pruned, calibration, tmp_path, steps=12, learning_rate=3e-4, kl_weight=0.0)
    assert loss_of(distilled, calibration) < before
    changed = {n for n, t in distilled.model.hf.state_dict().items() if not torch.equal(t, weights[n])}
    folded = {"transformer.h.1.mlp.c_proj.weight", "transformer.h.1.mlp.c_proj.bias"}
    assert changed == (folded if method == "fold" else set())
    assert distilled.distillation.steps == 12
    assert distilled.loss.ratio > 0


def test_the_loss_is_the_relative_squared_error_of_states(model_and_calibration):
    """Computed by hand for one batch, with a scaled stream."""
    model, calibration = model_and_calibration
    pruned = drop_and_replace(model, [(1, 2)], "fold", calibration)
    batch = calibration.fit[0]
    (ours,) = lj.capture_states(pruned.model, [batch], [1, 2, 3])
    (theirs,) = lj.capture_states(model, [batch], [2, 3, 4])
    errors = []
    for here, there in ((1, 2), (2, 3), (3, 4)):
        target = pruned.transforms[0].scale * theirs[there]
        error = (ours[here] - target).square().sum(-1) / target.square().sum(-1)
        errors.append(float(error.mean()))
    module = DistillationModule(pruned, kl_weight=0.0, train_all_weights=False)
    with torch.no_grad():
        assert float(module(batch=batch)["loss"]) == pytest.approx(sum(errors) / 3, rel=1e-4)
        more = DistillationModule(pruned, kl_weight=2.0, train_all_weights=False)
        assert float(more(batch=batch)["loss"]) > float(module(batch=batch)["loss"])


def test_an_interrupted_run_resumes_to_the_same_result(model_and_calibration, tmp_path):
    model, calibration = model_and_calibration
    whole = drop_and_replace(model, [(2, 3)], "linear", calibration)
    distill(whole, calibration, tmp_path / "whole", steps=8)
    parts = drop_and_replace(model, [(2, 3)], "linear", calibration)
    trainer_folder = tmp_path / "parts"
    first = drop_and_replace(model, [(2, 3)], "linear", calibration)
    distill(first, calibration, trainer_folder, steps=8)
    # As if the run had stopped after step 6.
    (trainer_folder / "checkpoint-8").rename(tmp_path / "away")
    assert (trainer_folder / "checkpoint-6").is_dir()
    with pytest.raises(BadArtifact, match="other settings"):
        distill(parts, calibration, trainer_folder, steps=9)
    distill(parts, calibration, trainer_folder, steps=8)
    ours, theirs = parts.jumps.state_dict(), whole.jumps.state_dict()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)


def test_a_method_without_replacement_is_refused(model_and_calibration, tmp_path):
    model, calibration = model_and_calibration
    pruned = drop_and_replace(model, [(2, 3)], "remove", calibration)
    with pytest.raises(BadPruning, match="no replacement"):
        distill(pruned, calibration, tmp_path, steps=2)
    with pytest.raises(BadPruning, match="1 or more"):
        distill(pruned, calibration, tmp_path, steps=0)
    distilled = distill(pruned, calibration, tmp_path, steps=2, train_all_weights=True)
    assert distilled.distillation.trained == "every weight"
