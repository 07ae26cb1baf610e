"""Refitted output projections: the regression itself, the choice by validation loss, resuming, and refusals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing

import pytest
import torch
from helpers.story_text import numbers, stories
from helpers.tiny_models import CASES, tiny_model, wrapped
from transformers import AutoModelForCausalLM

import layerjump as lj
from layerjump.data.batches import make_batches
from layerjump.data.positions import ALL_POSITIONS
from layerjump.errors import BadPruning
from layerjump.metrics.token_loss import token_losses
from layerjump.models.model import capture_states
from layerjump.models.self_check import sample
from layerjump.models.small_models import list_architectures, small_model
from layerjump.pruning.block_pass import BlockPass
from layerjump.pruning.checkpoint import PruningRecord
from layerjump.pruning.distill import distill
from layerjump.pruning.drop_blocks import cannot_drop, without_blocks
from layerjump.pruning.prune import drop_and_replace, prepare_calibration
from layerjump.pruning.refit_projections import cannot_refit, collect_sums, find_projections, solve_change

SPANS = [(1, 2)]
CALIBRATION = {"tokens": 3_000, "split": "70/15/15", "seed": 0}


@pytest.fixture(scope="module")
def gpt2(data_folder):
    model = lj.load(data_folder / "tiny-gpt2")
    return model, prepare_calibration(model, stories(200), **CALIBRATION)


@pytest.fixture(scope="module")
def fold(gpt2):
    return drop_and_replace(gpt2[0], SPANS, "fold", gpt2[1])


@pytest.fixture(scope="module")
def refitted(gpt2, tmp_path_factory):
    """A refitted model, and the folder with its finished blocks."""
    folder = tmp_path_factory.mktemp("work")
    return drop_and_replace(gpt2[0], SPANS, "refit", gpt2[1], work_folder=folder), folder


def weights_of(pruned) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in pruned.model.hf.state_dict().items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(filter(None, case)))
def test_a_change_of_a_projection_is_recovered_in_every_family(case, tmp_path):
    """The target is the state of a copy with one projection changed: gain, taps and bias must all be right."""
    model = wrapped(tiny_model(*case), words=True)
    if cannot_drop(model) or cannot_refit(model):
        pytest.skip(cannot_drop(model) or cannot_refit(model))
    batches = make_batches(numbers(80), model.tokenization, ALL_POSITIONS)
    projections = list(find_projections(model, 2))
    assert projections
    for number, projection in enumerate(projections):
        changed = without_blocks(model, [])
        twin = list(find_projections(changed, 2))[number]
        noise = [0.1 * torch.randn(p.shape, dtype=p.dtype) for p in (twin.weight, twin.bias) if p is not None]
        with torch.no_grad():
            for parameter, change in zip((twin.weight, twin.bias), noise, strict=False):
                parameter.add_(change)
        with closing(BlockPass(model, batches, tmp_path, "one")) as one:
            one.advance(1)
            states = capture_states(changed, batches, [projection.site])
            sums = collect_sums(projection, one, (state[projection.site] for state in states))
        weight, bias = solve_change(*sums, 1e-12, n_inputs=projection.weight.shape[1])
        inputs = sums[0][: weight.shape[1], : weight.shape[1]]
        error = (weight - noise[0]) @ inputs  # inputs may span fewer dimensions than the weight has
        assert float(error.norm()) < 1e-4 * float((noise[0] @ inputs).norm())
        assert len(bias) == (0 if projection.bias is None else model.d_model)


def test_the_first_projection_is_a_ridge_regression_to_the_level_after_the_span(gpt2, fold, refitted):
    """By hand, from the states of the folded model and of the original one."""
    model, calibration = gpt2
    step = refitted[0].refitted[0]
    assert (step.block, step.part) == (1, "ffn")
    layer, inputs = fold.model.structure.blocks[0].mlp.c_proj, []
    handle = layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    rows = []
    try:
        for batch in calibration.fit:
            inputs.clear()
            (shorter,) = capture_states(fold.model, [batch], [1])
            (original,) = capture_states(model, [batch], [2])
            target = fold.transforms[0].scale * original[2].double()
            x = inputs[0][batch.row, batch.position].double()
            weight = target.norm(dim=-1, keepdim=True) ** -0.5
            x = torch.cat([x, torch.ones_like(x[:, :1])], -1)
            rows.append((weight * x, weight * (target - shorter[1].double())))
    finally:
        handle.remove()
    x, error = (torch.cat(parts) for parts in zip(*rows, strict=True))
    gram = x.T @ x
    penalty = torch.full((len(gram),), step.strength * float(gram.diagonal()[:-1].mean()), dtype=torch.float64)
    penalty[-1] = 0
    change = torch.linalg.solve(gram + penalty.diag(), x.T @ error)
    ours = refitted[0].model.structure.blocks[0].mlp.c_proj
    assert torch.allclose(ours.weight.double(), layer.weight + change[:-1], rtol=0, atol=1e-4)
    assert torch.allclose(ours.bias.double(), layer.bias + change[-1], rtol=0, atol=1e-4)


def test_the_validation_loss_falls_with_every_step_and_starts_at_that_of_fold(gpt2, fold, refitted):
    _, calibration = gpt2
    pruned, _ = refitted
    losses = [token_losses(fold.model, calibration.validation).mean, *(step.loss for step in pruned.refitted)]
    for before, after, step in zip(losses, losses[1:], pruned.refitted, strict=False):
        assert after < before if step.strength is not None else after == before
    assert token_losses(pruned.model, calibration.validation).mean == pytest.approx(losses[-1], abs=1e-5)
    assert token_losses(pruned.model, calibration.test).mean < token_losses(fold.model, calibration.test).mean
    assert [(step.block, step.part) for step in pruned.refitted][:3] == [(1, "ffn"), (2, "attn"), (2, "ffn")]


def test_a_run_continues_after_its_last_finished_block_to_the_same_bytes(gpt2, refitted, tmp_path):
    model, calibration = gpt2
    pruned, folder = refitted
    files = sorted(folder.glob("refit-*/block-*.safetensors"))
    assert [file.stem for file in files] == ["block-1", "block-2", "block-3"]
    partial = tmp_path / files[0].parent.name
    partial.mkdir()
    os.link(files[0], partial / files[0].name)
    again = drop_and_replace(model, SPANS, "refit", calibration, work_folder=tmp_path)
    assert again.refitted == pruned.refitted
    expected = weights_of(pruned)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(again).items())


KILLED = """
import sys
sys.path.insert(0, "tests")
import layerjump as lj
from helpers.story_text import stories
lj.prune(lj.load(sys.argv[1]), stories(200), drop=1, method="refit", criterion="deepest", protect=[1, 3, 4],
         tokens=3_000, split="70/15/15", work_folder=sys.argv[2])
"""


def test_a_killed_run_leaves_whole_blocks(gpt2, refitted, data_folder, tmp_path):
    """Killed after its first block, and continued in another process."""
    command = [sys.executable, "-c", KILLED, str(data_folder / "tiny-gpt2"), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while not list(tmp_path.glob("refit-*/block-1.safetensors")) and process.poll() is None:
                time.sleep(0.02)
        finally:
            process.send_signal(signal.SIGKILL)
    assert list(tmp_path.glob("refit-*/block-1.safetensors"))
    again = drop_and_replace(gpt2[0], SPANS, "refit", gpt2[1], work_folder=tmp_path)
    expected = weights_of(refitted[0])
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(again).items())


def test_a_saved_model_has_the_logits_in_memory_and_names_its_steps(refitted, tmp_path):
    pruned, _ = refitted
    pruned.save(tmp_path / "model")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.equal(saved(ids).logits, pruned.model.hf(ids).logits)
    record = PruningRecord.load(tmp_path / "model")
    assert tuple(record.refitted) == pruned.refitted
    assert record.method == "refit"
    assert "Refitted output projections" in (tmp_path / "model" / "README.md").read_text()


def test_distillation_trains_the_refitted_projections(gpt2, tmp_path):
    model, calibration = gpt2
    pruned = drop_and_replace(model, [(2, 3)], "refit", calibration)
    before = weights_of(pruned)
    distilled = distill(pruned, calibration, tmp_path, steps=2)
    changed = {name.rpartition(".")[0] for name, w in weights_of(distilled).items() if not torch.equal(w, before[name])}
    part = {"attn": "attn", "ffn": "mlp"}
    steps = [step for step in pruned.refitted if step.strength is not None]
    assert {f"transformer.h.{step.block - 1}.{part[step.part]}.c_proj" for step in steps} <= changed


def test_two_spans_and_a_rotated_stream(real_folder):
    """Each span's targets are levels after it, in the coordinates of the pruned model's stream."""
    model = lj.load(real_folder("stories260K"))
    text = real_folder("stories260K").parents[1] / "text/tinystories/tinystories_train_sample.txt"
    calibration = prepare_calibration(model, lj.load_text(text, limit=100), tokens=8_000, split="80/10/10", seed=0)
    losses = {
        method: token_losses(drop_and_replace(model, [(1, 2), (3, 4)], method, calibration).model, calibration.test)
        for method in ("rotation", "rotation-refit")
    }
    assert losses["rotation-refit"].mean < losses["rotation"].mean - 0.1


def test_a_model_without_foldable_outputs_starts_from_nothing(gpt2):
    """The first block is dropped, so there is no block to fold a map into."""
    model, calibration = gpt2
    removed = drop_and_replace(model, [(0, 1)], "remove", calibration)
    refitted = drop_and_replace(model, [(0, 1)], "refit", calibration)
    assert refitted.transforms == ()
    losses = [token_losses(pruned.model, calibration.validation).mean for pruned in (removed, refitted)]
    assert losses[1] < losses[0]


def test_tied_projections_are_refused():
    model = wrapped(tiny_model("llama"), words=True)
    blocks = model.structure.blocks
    blocks[2].mlp.down_proj.weight = blocks[1].mlp.down_proj.weight
    with pytest.raises(BadPruning, match="shared with another module"):
        lj.prune(model, numbers(60), drop=1, method="refit")


@pytest.mark.parametrize(("family", "reason"), [("gemma2", "a norm follows"), ("bert", "a norm follows")])
def test_projections_before_a_norm_are_refused(family, reason):
    model = wrapped(tiny_model(family), words=family != "bert")
    assert reason in cannot_refit(model)


@pytest.mark.parametrize("name", ["qwen2_moe", "granitemoehybrid", "mamba2", "cohere", "granite"])
def test_a_change_is_recovered_in_experts_hybrids_and_parallel_blocks(name, tmp_path):
    """Factors of what is added, mixers, and attention beside experts, which stay as they are."""
    model = small_model({str(each): each for each in list_architectures()}[f"causal:{name}"])
    assert cannot_refit(model) is None
    batches = [sample(model, rows=32)]
    projections = list(find_projections(model, 2))
    assert projections
    for number, projection in enumerate(projections):
        changed = without_blocks(model, [])
        twin = list(find_projections(changed, 2))[number]
        change = 0.1 * torch.randn(twin.weight.shape)
        with torch.no_grad():
            twin.weight.add_(change)
        with closing(BlockPass(model, batches, tmp_path, "one")) as one:
            one.advance(1)
            states = capture_states(changed, batches, [projection.site])
            gram, cross = collect_sums(projection, one, (state[projection.site] for state in states))
        weight, _ = solve_change(gram, cross, 1e-5, n_inputs=change.shape[1])
        inputs = gram[: change.shape[1], : change.shape[1]]
        expected = change.double() @ inputs
        assert float((weight @ inputs - expected).norm()) < 1e-2 * float(expected.norm())


def test_sums_that_rounding_made_indefinite_have_no_solution():
    gram = torch.diag(torch.tensor([1.0, 1.0, -0.1], dtype=torch.float64))
    cross = torch.ones(3, 2, dtype=torch.float64)
    assert solve_change(gram, cross, 1e-4, n_inputs=3)[0].isnan().all()
    assert solve_change(gram, cross, 1.0, n_inputs=3)[0].isfinite().all()
