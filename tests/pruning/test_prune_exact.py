"""Pruning is exact where algebra says so, in every family."""

from __future__ import annotations

import pytest
import torch
from helpers.story_text import numbers
from helpers.tiny_models import CASES, silent_gpt2, tiny_model, wrapped

import layerjump as lj
from layerjump.errors import BadModel
from layerjump.jumps.moments import Moments
from layerjump.models.model import Model, capture_states
from layerjump.models.self_check import sample, self_check
from layerjump.pruning.drop_blocks import cannot_drop, without_blocks
from layerjump.pruning.fit_replacements import FFN_OUT, PAIRS, RESIDUAL, TARGET, fold_rows, solve_fold
from layerjump.pruning.output_weights import cannot_fold, folded_output
from layerjump.pruning.rotate_stream import can_scale, cannot_rotate, transform_stream


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(filter(None, case)))
def model(request: pytest.FixtureRequest) -> Model:
    return wrapped(tiny_model(*request.param))


def prunable(model: Model) -> Model:
    if cannot_drop(model):
        with pytest.raises(BadModel, match="pass"):
            without_blocks(model, [2])
        pytest.skip("no block can be dropped")
    return model


def logits(model: Model, batch) -> torch.Tensor:
    with torch.no_grad():
        solved = model.hf(batch.input_ids, attention_mask=batch.attention_mask).logits
    return solved[batch.row, batch.position]


def test_a_shorter_model_passes_the_self_check(model):
    shorter = without_blocks(prunable(model), [2])
    assert shorter.n_blocks == model.n_blocks - 1
    assert [check.name for check in self_check(shorter) if not check.passed] == []
    assert model.n_blocks == len(model.structure.blocks)  # the model itself is as it was


def test_a_scaled_stream_gives_the_same_logits(model):
    """Levels from 1 on are doubled: block 1 writes twice as much to a stream that starts doubled."""
    prunable(model)
    if cannot_fold(model) or not can_scale(model):
        pytest.skip("no scale to change")
    copy = without_blocks(model, [])
    for module in copy.hf.modules():  # the ε of a norm is not scaled
        for name in ("eps", "variance_epsilon"):
            if hasattr(module, name):
                setattr(module, name, 0.0)
    before = logits(copy, sample(copy))
    handle = copy.structure.blocks[0].register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))
    transform_stream(copy, 0, None, 2.0)
    assert torch.allclose(logits(copy, sample(copy)), before, rtol=0, atol=1e-4)
    handle.remove()


def test_a_rotated_stream_gives_the_same_logits(model):
    """Up to float32 rounding: these norms compute in float32 in a model of any dtype."""
    prunable(model)
    if cannot_rotate(model):
        pytest.skip(cannot_rotate(model))
    copy = without_blocks(model, [])
    before = logits(copy, sample(copy))
    rotation, _ = torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64))
    transform_stream(copy, 1, rotation)
    plain = copy.structure.blocks[0].register_forward_hook(lambda module, args, out: out @ rotation.T)
    assert torch.allclose(logits(copy, sample(copy)), before, rtol=0, atol=1e-4)
    plain.remove()
    assert not torch.allclose(logits(copy, sample(copy)), before, atol=1e-2)
    assert torch.equal(logits(model, sample(model)), before)


def test_a_folded_map_maps_the_feed_forward_output(model):
    prunable(model)
    if cannot_fold(model):
        pytest.skip(cannot_fold(model))
    copy, batch = without_blocks(model, []), sample(model)
    weight, shift = torch.randn(32, 32, dtype=torch.float64), torch.randn(32, dtype=torch.float64)
    _, weights, _ = folded_output(copy, 2)
    biased = weights.bias is not None
    weights.fold(weight, shift if biased else None)
    if not biased:
        with pytest.raises(BadModel, match="no bias"):
            weights.fold(torch.eye(32, dtype=torch.float64), shift)
    (before,) = capture_states(model, [batch], ["2.ffn.out", 2])
    (after,) = capture_states(copy, [batch], ["2.ffn.out", 2])
    expected = before["2.ffn.out"] @ weight.T + (shift if biased else 0)
    assert torch.allclose(after["2.ffn.out"], expected, rtol=0, atol=1e-10)
    assert torch.allclose(after[2] - before[2], expected - before["2.ffn.out"], atol=1e-10)


@pytest.mark.parametrize("block", [1, 2, 3])
def test_an_exactly_affine_block_is_replaced_exactly(block):
    """Including the first and the last block if they are not protected."""
    model = wrapped(silent_gpt2(), words=True)
    others = [b for b in (1, 2, 3) if b != block]
    pruned = lj.prune(model, numbers(60), drop=1, method="linear", criterion="linearity", protect=others)
    assert pruned.dropped == (block,)
    batch = sample(model)
    assert torch.allclose(logits(pruned.model, batch), logits(model, batch), rtol=0, atol=1e-8)
    assert pruned.loss.ratio == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("method", ["replaceme", "fold"])
def test_a_fold_is_exact_where_a_block_adds_a_constant(method):
    model = wrapped(silent_gpt2(), words=True)
    pruned = lj.prune(model, numbers(60), drop=1, method=method, criterion="deepest")
    assert pruned.dropped == (2,)
    batch = sample(model)
    assert torch.allclose(logits(pruned.model, batch), logits(model, batch), rtol=0, atol=1e-7)


def folded(target, added, stream, **settings):
    sums = Moments(PAIRS, reservoir=0)
    for part in range(0, len(target), 50):
        some = (state[part : part + 50] for state in (added, stream, target))
        sums.add(fold_rows(*some, bias=settings["bias"], weighted=True))
    return solve_fold(sums, **settings)


def test_the_solver_recovers_scale_map_and_rotation():
    """For h with a y + A m equal to a rotated h, the closed form has zero error."""
    torch.manual_seed(2)
    m, y = torch.randn(400, 6, dtype=torch.float64), torch.randn(400, 6, dtype=torch.float64)
    weight, shift = torch.randn(6, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    h = 1.7 * (y + m @ weight.T + shift)
    solved = folded(h, m, y, bias=True, fit_scale=True, fit_rotation=False)
    assert solved.scale == pytest.approx(1 / 1.7)
    assert torch.allclose(solved.weight, weight)
    assert torch.allclose(solved.bias, shift)
    rotation, _ = torch.linalg.qr(torch.eye(6).double() + 0.2 * torch.randn(6, 6, dtype=torch.float64))
    rotation = rotation * rotation.diagonal().sign()
    rotated = folded(h @ rotation, m, y, bias=True, fit_scale=True, fit_rotation=True)
    mapped = y + m @ rotated.weight.T + rotated.bias
    expected_states = rotated.scale * (h @ rotation) @ rotated.rotation.T
    assert (mapped - expected_states).norm() < 0.05 * expected_states.norm()
    plain = folded(h @ rotation, m, y, bias=True, fit_scale=True, fit_rotation=False)
    off = y + m @ plain.weight.T + plain.bias - plain.scale * (h @ rotation)
    assert (mapped - expected_states).norm() < 0.5 * off.norm()


def test_the_moments_pair_all_three_states():
    sums = [str(site) for pair in PAIRS for site in pair]
    assert set(sums) == {str(FFN_OUT), str(RESIDUAL), str(TARGET)}
