"""Maps from sums: known answers are found, other solvers agree, and fits relate as the mathematics says."""

import pytest
import torch
from helpers.regression_data import BY_SOURCE, CLOSE, SETTINGS, error, fit, noisy, random, sums
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression

from layerjump.jumps.estimators.registry import solve

# ---- the answer is known -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mat", "affine"])
def test_a_solution_built_from_an_svd_is_found(name):
    # Orthonormal columns, orthogonal to ones: noise in other columns cannot move the solution.
    q, _ = torch.linalg.qr(torch.cat([torch.ones(50, 1), random(50, 14)], 1).double())
    u, noise = q[:, 1:9], q[:, 9:]
    x = u * torch.logspace(0, 3, 8).double() @ torch.linalg.qr(random(8, 8, seed=1))[0]
    weight = random(6, 8, seed=2)
    found = fit(name, x, x @ weight.mT + 7 * noise @ random(6, 6, seed=3))
    torch.testing.assert_close(found.weight, weight, **CLOSE)


@pytest.mark.parametrize("name", ["affine", "ridge"])
def test_exactly_affine_rows_are_recovered(name):
    x, y = noisy(200, 12, 9, noise=0.0)
    extra = {"strength": 0.0} if name == "ridge" else {}
    found = fit(name, x, y, **extra)
    torch.testing.assert_close(found.weight, random(9, 12, seed=102), **CLOSE)
    torch.testing.assert_close(found.bias, random(9, seed=103), **CLOSE)


def test_exactly_linear_rows_are_recovered_without_an_intercept():
    x = random(200, 12) + 3
    weight = random(9, 12, seed=2)
    found = fit("mat", x, x @ weight.mT)
    torch.testing.assert_close(found.weight, weight, **CLOSE)
    assert found.bias is None


def test_a_rotation_is_recovered_and_stays_orthogonal_in_noise():
    rotation = torch.linalg.qr(random(10, 10, seed=4))[0]
    x = random(100, 10) * torch.logspace(0, 2, 10).double() + 5
    found = fit("orthogonal", x, x @ rotation.mT - 2)
    torch.testing.assert_close(found.weight, rotation, **CLOSE)
    noisy_weight = fit("orthogonal", x, x @ rotation.mT + random(100, 10, seed=5)).weight
    torch.testing.assert_close(noisy_weight @ noisy_weight.mT, torch.eye(10).double(), **CLOSE)


def test_no_rotation_near_the_orthogonal_map_does_better():
    x, y = noisy(80, 6, 6)
    found = fit("orthogonal", x, y)
    for seed in range(20):
        skew = 1e-3 * random(6, 6, seed=seed)
        turned = torch.linalg.matrix_exp(skew - skew.mT) @ found.weight
        assert error(lambda v, w=turned: (v - x.mean(0)) @ w.mT + y.mean(0), x, y) > error(found, x, y)


def test_identity_and_mean_shift_move_nothing_and_the_mean():
    x, y = noisy(30, 5, 5)
    assert torch.equal(fit("identity", x, y)(x), x)
    assert torch.equal(fit("identity", x, y).weight, torch.eye(5).double())
    torch.testing.assert_close(fit("mean-shift", x, y)(x).mean(0), y.mean(0), **CLOSE)


# ---- the same as other solvers -------------------------------------------------------------------


@pytest.mark.parametrize(("name", "intercept"), [("mat", False), ("affine", True)])
@pytest.mark.parametrize("n_sinks", [0, 5])
def test_held_out_predictions_are_sklearns(name, intercept, n_sinks):
    x, y = noisy(900, 40, 30)
    # Attention sinks: a few nearly equal rows, hundreds of times the norm of the others.
    sink = 500 * x.norm(dim=1).median() * torch.nn.functional.normalize(random(40, seed=8), dim=0)
    x[:n_sinks] = sink + random(n_sinks, 40, seed=9)
    y[:n_sinks] = 100 * y[:n_sinks]
    found = fit(name, x, y)
    theirs = LinearRegression(fit_intercept=intercept).fit(x.numpy(), y.numpy())
    held, _ = noisy(200, 40, 30, seed=1)
    wanted = torch.from_numpy(theirs.predict(held.numpy()))
    assert (found(held) - wanted).norm() < 1e-6 * wanted.norm()


@settings(max_examples=25, deadline=None)
@given(dx=st.integers(1, 12), dy=st.integers(1, 12), extra=st.integers(1, 30), seed=st.integers(0, 99))
def test_affine_is_lstsq_with_a_column_of_ones(dx, dy, extra, seed):
    x, y = random(dx + 1 + extra, dx, seed=seed), random(dx + 1 + extra, dy, seed=seed + 100)
    ones = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    wanted = torch.linalg.lstsq(ones, y).solution
    torch.testing.assert_close(fit("affine", x, y)(x), ones @ wanted, rtol=1e-6, atol=1e-6)


def test_a_large_mean_costs_no_precision():
    x, y = noisy(300, 10, 10)
    far = x + 1e5
    torch.testing.assert_close(fit("affine", far, y)(far), fit("affine", x, y)(x), rtol=1e-6, atol=0)


# ---- first-order optimality ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mat", "affine", "ridge", "low-rank"])
def test_the_gradient_of_what_it_minimises_is_zero(name):
    x, y = noisy(120, 8, 7)
    source, _ = sums(x, y)
    found = fit(name, x, y)
    factors = [factor.clone().requires_grad_() for factor in found.factors]
    bias = torch.zeros(7).double() if found.bias is None else found.bias.clone().requires_grad_()
    weight = factors[0] if len(factors) == 1 else factors[0] @ factors[1]
    loss = (x @ weight.mT + bias - y).square().sum()
    if name == "ridge":
        loss = loss + found.strength * source.scatter.diagonal().mean() * weight.square().sum()
    loss.backward()
    loss = loss.detach()
    moved = factors if found.bias is None else [*factors, bias]
    assert max(float(tensor.grad.abs().max()) for tensor in moved) < 1e-9 * float(loss)


# ---- relations between fits ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mat", "affine"])
def test_doubled_inputs_halve_the_weights(name):
    x, y = noisy(60, 5, 4)
    once, twice = fit(name, x, y), fit(name, torch.cat([x, x], 1), y)
    torch.testing.assert_close(twice.weight, torch.cat([once.weight, once.weight], 1) / 2, **CLOSE)


@pytest.mark.parametrize("name", BY_SOURCE)
def test_rows_given_twice_change_nothing(name):
    x, y = noisy(60, 6, 6)
    once, twice = fit(name, x, y), fit(name, torch.cat([x, x]), torch.cat([y, y]))
    torch.testing.assert_close(once(x), twice(x), **CLOSE)


@pytest.mark.parametrize("name", BY_SOURCE)
def test_jumps_that_share_a_factorisation_equal_those_solved_alone(name):
    x, y = noisy(70, 6, 6)
    source, targets = sums(x, y, 2 * y + x, random(70, 6, seed=5))
    together = solve(name, source, targets, **SETTINGS.get(name, {}))
    for target, shared in zip(targets, together, strict=True):
        alone = solve(name, source, [target], **SETTINGS.get(name, {}))[0]
        assert torch.equal(alone.weight, shared.weight)
        assert alone.bias is shared.bias is None or torch.equal(alone.bias, shared.bias)


@pytest.mark.parametrize("name", sorted(set(BY_SOURCE) - {"identity", "mat"}))
def test_maps_with_an_intercept_pass_through_the_means(name):
    x, y = noisy(70, 6, 6)
    torch.testing.assert_close(fit(name, x, y)(x.mean(0)), y.mean(0), **CLOSE)


def test_more_freedom_never_fits_worse():
    x, y = noisy(70, 6, 6)
    order = ["identity", "mean-shift", "orthogonal", "affine"]
    errors = [error(fit(name, x, y), x, y) for name in order]
    assert errors == sorted(errors, reverse=True)
    assert error(fit("mat", x, y), x, y) >= errors[-1]


@pytest.mark.parametrize("name", BY_SOURCE)
def test_every_map_applies_as_its_weight_and_bias_say(name):
    x, y = noisy(40, 6, 6)
    found = fit(name, x, y)
    bias = torch.zeros(6).double() if found.bias is None else found.bias
    torch.testing.assert_close(found(x), x @ found.weight.mT + bias, **CLOSE)
    assert found(x.reshape(4, 10, 6)).shape == (4, 10, 6)
    assert all(factor.is_contiguous() for factor in found.factors)


def test_parameters_are_counted_in_the_form_they_are_stored():
    x, y = noisy(40, 6, 6)
    counts = {name: fit(name, x, y).n_parameters for name in BY_SOURCE}
    assert counts == {
        "identity": 0,
        "mean-shift": 6,
        "mat": 36,
        "affine": 42,
        "ridge": 42,
        "orthogonal": 42,
        "low-rank": 2 * 6 * 2 + 6,
        "n-njtc": 2 * 6 + 6,
    }
