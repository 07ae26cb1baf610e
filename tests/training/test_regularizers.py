"""Penalties equal their formulas, have exact gradients, and ignore padding."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.tiny_models import tiny_model
from torch.nn.functional import cross_entropy

import layerjump as lj
from layerjump.errors import BadTraining
from layerjump.training.regularizers import PENALTIES, cosine, jump, mse
from layerjump.training.trainer import LevelStates

EACH = pytest.mark.parametrize("name", PENALTIES)


def random_states(levels=4, shape=(2, 5), d=6, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, d, dtype=torch.float64, generator=draw) for _ in range(levels)]


def test_penalties_equal_their_formulas():
    states = random_states()
    rows = [state.reshape(-1, 6) for state in states]
    expected = dict.fromkeys(PENALTIES, 0.0)
    for level in (1, 2, 3):
        for x, y in zip(rows[level - 1].tolist(), rows[level].tolist(), strict=True):
            dot = sum(a * b for a, b in zip(x, y, strict=True))
            cos = dot / (math.hypot(*x) * math.hypot(*y))
            expected["cosine"] += (1 - cos) / 10
            expected["mse"] += math.dist(x, y) ** 2 / 10
            expected["jump"] += level / 3 * math.acos(cos) / math.pi / 10
    for name, penalty in PENALTIES.items():
        assert float(penalty(states)) == pytest.approx(expected[name], rel=1e-12)


@EACH
@pytest.mark.parametrize("levels", [None, [3], [1, 3]])
def test_gradients_equal_finite_differences(name, levels):
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    states = [state.requires_grad_() for state in random_states()]
    # gradcheck perturbs every coordinate of every state, in float64.
    assert torch.autograd.gradcheck(lambda *s: PENALTIES[name](s, mask, levels), states)


@EACH
def test_equal_states_have_zero_penalty_and_a_finite_gradient(name):
    one = random_states(1)[0]
    states = [one.clone().requires_grad_() for _ in range(3)]
    total = PENALTIES[name](states)
    total.backward()
    assert float(total.detach()) == pytest.approx(0, abs=1e-12)
    assert all(bool(state.grad.isfinite().all()) for state in states)


@EACH
def test_padding_is_ignored_even_if_it_is_nan(name):
    states, mask = random_states(), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    padded = [state.clone() for state in states]
    for state in padded:
        state[0, 3:] = torch.nan
        state.requires_grad_()
    total = PENALTIES[name](padded, mask)
    total.backward()
    value = [torch.cat([state[0, :3], state[1]]) for state in states]
    assert float(total.detach()) == pytest.approx(float(PENALTIES[name](value)), rel=1e-12)
    assert all(bool((state.grad[0, 3:] == 0).all()) for state in padded)
    assert all(bool(state.grad.isfinite().all()) for state in padded)


def test_levels_add_up_and_jump_weights_them_by_depth():
    states = random_states()
    for penalty in (cosine, mse, jump):
        parts = [penalty(states, levels=[level]) for level in (1, 2, 3)]
        assert float(sum(parts)) == pytest.approx(float(penalty(states)), rel=1e-12)
    rolled = [state.clone() for state in states]
    rolled[3] = rolled[2].roll(1, -1)
    rolled[1] = rolled[0].roll(1, -1)
    first, last = (float(jump(rolled, levels=[level])) for level in (1, 3))
    angle = float(jump([rolled[0], rolled[1]])), float(jump([rolled[2], rolled[3]]))
    assert (first, last) == pytest.approx((angle[0] / 3, angle[1]), rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"states": random_states(1)}, "two or more"),
        ({"states": random_states(), "mask": torch.ones(2, 4)}, "shape"),
        ({"states": random_states(), "mask": torch.zeros(2, 5)}, "no position"),
        ({"states": random_states(), "levels": [0]}, "1 to 3"),
        ({"states": random_states(), "levels": [4]}, "1 to 3"),
        ({"states": random_states(), "levels": []}, "1 to 3"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(BadTraining, match=message):
        cosine(**arguments)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "albert", "falcon"])
def test_level_states_equal_captured_states(family):
    """After two passes, as in a training loop, the states are those of the second."""
    hf = tiny_model(family)
    ids = torch.randint(3, 61, (2, 2, 7))
    with LevelStates(hf) as levels:
        hf(input_ids=ids[0])
        hf(input_ids=ids[1])
        states = levels.states
    model = lj.Model.wrap(hf)
    for row in range(2):
        (captured,) = lj.capture_states(model, [lj.batch_from_ids(ids[1, row].tolist())], range(4))
        for level in range(4):
            assert torch.allclose(states[level][row], captured[level], atol=1e-10)
    assert states[0].requires_grad


def test_the_gradient_of_a_model_is_that_of_loss_and_penalty():
    """Compared with finite differences of three weights."""
    hf = tiny_model("gpt2")
    ids = torch.randint(3, 61, (2, 9))

    def loss():
        with LevelStates(hf) as levels:
            logits = hf(input_ids=ids).logits[:, :-1]  # its own loss is in float32
        return cross_entropy(logits.mT, ids[:, 1:]) + 0.5 * cosine(levels.states)

    loss().backward()
    with torch.no_grad():
        for name in ("transformer.wte.weight", "transformer.h.1.mlp.c_fc.weight", "lm_head.weight"):
            weight = hf.get_parameter(name)
            index = int(weight.grad.abs().argmax())
            value, step = weight.flatten()[index].clone(), 1e-6
            weight.view(-1)[index] = value + step
            above = loss()
            weight.view(-1)[index] = value - step
            below = loss()
            weight.view(-1)[index] = value
            slope = float(above - below) / (2 * step)
            assert slope == pytest.approx(float(weight.grad.flatten()[index]), rel=1e-5)


def test_level_states_before_a_forward_pass_are_refused():
    with LevelStates(tiny_model("gpt2")) as levels, pytest.raises(BadTraining, match="run the model"):
        levels.states  # noqa: B018
