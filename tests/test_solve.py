import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import error, noisy, random, sums
from sklearn.linear_model import LinearRegression

from layerjump.errors import BadEstimator, BadMoments
from layerjump.fit.solve import ESTIMATORS, solve
from layerjump.fit.sums import Source, Target

CLOSE = {"rtol": 1e-8, "atol": 1e-8}
# Every row of the table, with the settings it cannot do without.
SETTINGS = {"ridge": {"strength": 1e-3}, "low-rank": {"rank": 2}}


def fit(name, x, y, **extra):
    source, targets = sums(x, y)
    return solve(name, source, targets, **{**SETTINGS.get(name, {}), **extra})[0]


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
        assert error(lambda v, w=turned: (v - x.mean(0)) @ w.mT + y.mean(0), x, y) > error(
            found, x, y
        )


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
@given(
    dx=st.integers(1, 12), dy=st.integers(1, 12), extra=st.integers(1, 30), seed=st.integers(0, 99)
)
def test_affine_is_lstsq_with_a_column_of_ones(dx, dy, extra, seed):
    x, y = random(dx + 1 + extra, dx, seed=seed), random(dx + 1 + extra, dy, seed=seed + 100)
    ones = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    wanted = torch.linalg.lstsq(ones, y).solution
    torch.testing.assert_close(fit("affine", x, y)(x), ones @ wanted, rtol=1e-6, atol=1e-6)


def test_a_large_mean_costs_no_precision():
    x, y = noisy(300, 10, 10)
    far = x + 1e5
    torch.testing.assert_close(
        fit("affine", far, y)(far), fit("affine", x, y)(x), rtol=1e-6, atol=0
    )


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


@pytest.mark.parametrize("name", ESTIMATORS)
def test_rows_given_twice_change_nothing(name):
    x, y = noisy(60, 6, 6)
    once, twice = fit(name, x, y), fit(name, torch.cat([x, x]), torch.cat([y, y]))
    torch.testing.assert_close(once(x), twice(x), **CLOSE)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_jumps_that_share_a_factorisation_equal_those_solved_alone(name):
    x, y = noisy(70, 6, 6)
    source, targets = sums(x, y, 2 * y + x, random(70, 6, seed=5))
    together = solve(name, source, targets, **SETTINGS.get(name, {}))
    for target, shared in zip(targets, together, strict=True):
        alone = solve(name, source, [target], **SETTINGS.get(name, {}))[0]
        assert torch.equal(alone.weight, shared.weight)
        assert alone.bias is shared.bias is None or torch.equal(alone.bias, shared.bias)


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"identity", "mat"}))
def test_maps_with_an_intercept_pass_through_the_means(name):
    x, y = noisy(70, 6, 6)
    torch.testing.assert_close(fit(name, x, y)(x.mean(0)), y.mean(0), **CLOSE)


def test_more_freedom_never_fits_worse():
    x, y = noisy(70, 6, 6)
    order = ["identity", "mean-shift", "orthogonal", "affine"]
    errors = [error(fit(name, x, y), x, y) for name in order]
    assert errors == sorted(errors, reverse=True)
    assert error(fit("mat", x, y), x, y) >= errors[-1]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_map_applies_as_its_weight_and_bias_say(name):
    x, y = noisy(40, 6, 6)
    found = fit(name, x, y)
    bias = torch.zeros(6).double() if found.bias is None else found.bias
    torch.testing.assert_close(found(x), x @ found.weight.mT + bias, **CLOSE)
    assert found(x.reshape(4, 10, 6)).shape == (4, 10, 6)
    assert all(factor.is_contiguous() for factor in found.factors)


def test_parameters_are_counted_in_the_form_they_are_stored():
    x, y = noisy(40, 6, 6)
    counts = {name: fit(name, x, y).n_parameters for name in ESTIMATORS}
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


# ---- hard sums -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mat", "affine"])
@pytest.mark.parametrize("n", [1, 2, 7, 20])
def test_fewer_rows_than_coordinates_are_interpolated(name, n):
    x, y = random(n, 20) + 1, random(n, 5, seed=1)
    torch.testing.assert_close(fit(name, x, y)(x), y, rtol=1e-7, atol=1e-7)


def test_the_least_norm_solution_is_the_one_lstsq_finds_in_divided_coordinates():
    x, y = random(9, 20) * torch.logspace(0, 4, 20).double(), random(9, 5, seed=1)
    scale = x.square().sum(0).sqrt()
    wanted = torch.linalg.lstsq(x / scale, y, driver="gelsd").solution.mT / scale
    torch.testing.assert_close(fit("mat", x, y).weight, wanted, rtol=1e-6, atol=1e-12)


def test_a_constant_coordinate_is_ignored_by_affine_and_is_mats_intercept():
    x, y = noisy(90, 5, 4)
    with_constant = torch.cat([x, torch.full((90, 1), 1e3 / 3).double()], 1)
    plain = fit("affine", x, y)
    beside = fit("affine", with_constant, y)
    assert torch.equal(beside.weight[:, -1], torch.zeros(4).double())
    torch.testing.assert_close(beside.weight[:, :-1], plain.weight, **CLOSE)
    torch.testing.assert_close(fit("mat", with_constant, y)(with_constant), plain(x), **CLOSE)


def test_a_coordinate_that_is_always_zero_gets_no_weight():
    x, y = noisy(90, 5, 4)
    x[:, 2] = 0
    assert torch.equal(fit("mat", x, y).weight[:, 2], torch.zeros(4).double())


@pytest.mark.parametrize("name", ["mat", "affine", "low-rank", "n-njtc"])
@pytest.mark.parametrize("huge", [1e4, 1e8])
def test_a_huge_coordinate_does_not_spoil_the_small_ones(name, huge):
    x, y = noisy(200, 8, 6)
    scaled = x.clone()
    scaled[:, 3] *= huge
    torch.testing.assert_close(fit(name, scaled, y)(scaled), fit(name, x, y)(x), **CLOSE)


def test_a_nearly_singular_source_falls_back_without_large_weights():
    x, y = noisy(200, 6, 6)
    twin = x[:, :1] * (1 + 1e-9 * random(200, 1, seed=3))
    weight = fit("affine", torch.cat([x, twin], 1), y).weight
    assert weight.abs().max() < 100


def test_products_formed_in_float32_are_solved_to_their_own_precision():
    # Float32 keeps 7 digits: singular directions of these sums are noise of 1e-7, of either sign.
    x, y = noisy(400, 6, 6)
    x = torch.cat([x, x @ random(6, 6, seed=7)], 1)
    source, (target,) = sums(x, y)
    xc, yc = (x - x.mean(0)).float(), (y - y.mean(0)).float()
    rough = Source(400, source.mean, (xc.mT @ xc).double())
    rough_target = Target(target.mean, (xc.mT @ yc).double(), target.spread)
    found = solve("affine", rough, [rough_target])[0]
    wanted = solve("affine", source, [target])[0]
    torch.testing.assert_close(found(x), wanted(x), rtol=1e-3, atol=1e-3)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(ESTIMATORS)),
    n=st.integers(1, 20),
    rank=st.integers(0, 6),
    exponent=st.integers(-12, 12),
    offset=st.sampled_from([0.0, 1.0, 1e6]),
    seed=st.integers(0, 50),
)
def test_maps_are_finite_and_fit_no_worse_than_the_mean(name, n, rank, exponent, offset, seed):
    x = random(n, rank, seed=seed) @ random(rank, 6, seed=seed + 1)
    x = x * 10.0 ** torch.linspace(0, exponent, 6).double() + offset
    y = random(n, 6, seed=seed + 2)
    found = fit(name, x, y)
    assert torch.isfinite(found.weight).all()
    assert torch.isfinite(found(x)).all()
    if name in ("affine", "ridge", "low-rank", "n-njtc"):
        assert error(found, x, y) <= (y - y.mean(0)).square().sum() * (1 + 1e-6) + 1e-6


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, row in ESTIMATORS.items() if row.square])
def test_square_estimators_refuse_other_shapes(name):
    x, y = noisy(30, 5, 4)
    with pytest.raises(BadMoments, match="5 coordinates and the target 4"):
        fit(name, x, y)


@pytest.mark.parametrize("name", [name for name, row in ESTIMATORS.items() if not row.square])
@pytest.mark.parametrize(("dx", "dy"), [(5, 3), (3, 5)])
def test_the_others_map_between_any_widths(name, dx, dy):
    x, y = noisy(30, dx, dy)
    assert fit(name, x, y)(x).shape == y.shape


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_sums_that_are_not_finite_are_refused(bad):
    source, targets = sums(*noisy(30, 5, 4))
    source.scatter[1, 2] = bad
    with pytest.raises(BadMoments, match="source's scatter holds NaN or infinite"):
        solve("affine", source, targets)


def test_empty_sums_are_refused():
    source, targets = sums(*noisy(30, 5, 4))
    with pytest.raises(BadMoments, match="0 rows"):
        solve("affine", Source(0, source.mean, source.scatter), targets)


def test_an_unknown_estimator_is_refused_and_the_known_ones_are_named():
    with pytest.raises(BadEstimator, match="no estimator 'ols'. Known: identity, mean-shift, mat"):
        solve("ols", *sums(*noisy(30, 5, 4)))


def test_a_setting_the_estimator_does_not_have_is_refused():
    with pytest.raises(BadEstimator, match="affine has no setting 'rank'"):
        solve("affine", *sums(*noisy(30, 5, 4)), rank=3)


def test_a_setting_it_cannot_do_without_is_asked_for():
    with pytest.raises(BadEstimator, match="low-rank wants a rank"):
        solve("low-rank", *sums(*noisy(30, 5, 4)))
    with pytest.raises(BadEstimator, match="a strength or"):
        solve("ridge", *sums(*noisy(30, 5, 4)))
