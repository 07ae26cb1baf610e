"""Penalties: the formulas written out, exact gradients, and padding that changes nothing."""

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


def made(levels=4, shape=(2, 5), d=6, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, d, dtype=torch.float64, generator=draw) for _ in range(levels)]


def test_the_formulas_written_out():
    states = made()
    rows = [state.reshape(-1, 6) for state in states]
    by_hand = dict.fromkeys(PENALTIES, 0.0)
    for level in (1, 2, 3):
        for x, y in zip(rows[level - 1].tolist(), rows[level].tolist(), strict=True):
            dot = sum(a * b for a, b in zip(x, y, strict=True))
            cos = dot / (math.hypot(*x) * math.hypot(*y))
            by_hand["cosine"] += (1 - cos) / 10
            by_hand["mse"] += math.dist(x, y) ** 2 / 10
            by_hand["jump"] += level / 3 * math.acos(cos) / math.pi / 10
    for name, penalty in PENALTIES.items():
        assert float(penalty(states)) == pytest.approx(by_hand[name], rel=1e-12)


@EACH
@pytest.mark.parametrize("levels", [None, [3], [1, 3]])
def test_gradients_are_finite_differences(name, levels):
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    states = [state.requires_grad_() for state in made()]
    # check_grad moves every coordinate of every state, in float64.
    assert torch.autograd.gradcheck(lambda *s: PENALTIES[name](s, mask, levels), states)


@EACH
def test_equal_states_cost_nothing_and_have_a_finite_gradient(name):
    one = made(1)[0]
    states = [one.clone().requires_grad_() for _ in range(3)]
    total = PENALTIES[name](states)
    total.backward()
    assert float(total.detach()) == pytest.approx(0, abs=1e-12)
    assert all(bool(state.grad.isfinite().all()) for state in states)


@EACH
def test_padding_changes_nothing_whatever_it_holds(name):
    states, mask = made(), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    spoilt = [state.clone() for state in states]
    for state in spoilt:
        state[0, 3:] = torch.nan
        state.requires_grad_()
    total = PENALTIES[name](spoilt, mask)
    total.backward()
    kept = [torch.cat([state[0, :3], state[1]]) for state in states]
    assert float(total.detach()) == pytest.approx(float(PENALTIES[name](kept)), rel=1e-12)
    assert all(bool((state.grad[0, 3:] == 0).all()) for state in spoilt)
    assert all(bool(state.grad.isfinite().all()) for state in spoilt)


def test_levels_add_up_and_jump_weighs_them_by_depth():
    states = made()
    for penalty in (cosine, mse, jump):
        parts = [penalty(states, levels=[level]) for level in (1, 2, 3)]
        assert float(sum(parts)) == pytest.approx(float(penalty(states)), rel=1e-12)
    turn = [state.clone() for state in states]
    turn[3] = turn[2].roll(1, -1)
    turn[1] = turn[0].roll(1, -1)
    first, last = (float(jump(turn, levels=[level])) for level in (1, 3))
    angle = float(jump([turn[0], turn[1]])), float(jump([turn[2], turn[3]]))
    assert (first, last) == pytest.approx((angle[0] / 3, angle[1]), rel=1e-12)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"states": made(1)}, "two or more"),
        ({"states": made(), "mask": torch.ones(2, 4)}, "shape"),
        ({"states": made(), "mask": torch.zeros(2, 5)}, "no position"),
        ({"states": made(), "levels": [0]}, "1 to 3"),
        ({"states": made(), "levels": [4]}, "1 to 3"),
        ({"states": made(), "levels": []}, "1 to 3"),
    ],
)
def test_bad_input_says_what_was_wanted(given, said):
    with pytest.raises(BadTraining, match=said):
        cosine(**given)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "albert", "falcon"])
def test_levels_are_those_that_are_captured(family):
    """Twice in a row, as a training loop runs them: the second pass's, and not the first's."""
    hf = tiny_model(family)
    ids = torch.randint(3, 61, (2, 2, 7))
    with LevelStates(hf) as levels:
        hf(input_ids=ids[0])
        hf(input_ids=ids[1])
        seen = levels.states
    model = lj.Model.wrap(hf)
    for row in range(2):
        (found,) = lj.capture_states(model, [lj.batch_from_ids(ids[1, row].tolist())], range(4))
        for level in range(4):
            assert torch.allclose(seen[level][row], found[level], atol=1e-10)
    assert seen[0].requires_grad


def test_a_models_gradient_is_that_of_loss_and_penalty():
    """Finite differences through a whole model: three weights of three kinds."""
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
            place = int(weight.grad.abs().argmax())
            kept, step = weight.flatten()[place].clone(), 1e-6
            weight.view(-1)[place] = kept + step
            above = loss()
            weight.view(-1)[place] = kept - step
            below = loss()
            weight.view(-1)[place] = kept
            slope = float(above - below) / (2 * step)
            assert slope == pytest.approx(float(weight.grad.flatten()[place]), rel=1e-5)


def test_levels_before_a_pass_are_refused():
    with (
        LevelStates(tiny_model("gpt2")) as levels,
        pytest.raises(BadTraining, match="run the model"),
    ):
        levels.states  # noqa: B018
