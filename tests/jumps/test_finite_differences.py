"""Least squares on differences: the Jacobian for small noise, refused where it says nothing."""

import pytest
import torch

import layerjump as lj
from layerjump.errors import BadEstimator, BadModel, TextTooShort
from layerjump.jumps.maps import to_affine


@pytest.fixture(scope="module")
def model(data_folder):
    return lj.load(data_folder / "tiny-gpt2")


@pytest.fixture(scope="module")
def text():
    return lj.load_text("pydoc", limit=400)


def matrix(jumps, pair):
    return to_affine(jumps[pair]).weight.double()


def test_small_noise_measures_the_derivative_of_the_own_position(model, text):
    """The mean derivative of the last block at a position, by autograd."""
    fitted = lj.fit_finite_differences(model, text, noise=0.01, levels=[3], tokens=20_000)
    jacobian = own_jacobian(model, text)
    difference = matrix(fitted, (3, 4)) - jacobian
    # d² numbers from 20,000 positions, and derivatives that differ from one to the next.
    assert difference.norm() / jacobian.norm() < 0.2
    large = lj.fit_finite_differences(model, text, noise=3.0, levels=[3], tokens=20_000)
    assert (matrix(large, (3, 4)) - jacobian).norm() > 1.5 * difference.norm()


def own_jacobian(model, text, n=60):
    """The mean of ∂h_4(t) / ∂h_3(t) over positions of the text, by autograd."""
    total, count = torch.zeros(model.d_model, model.d_model, dtype=torch.float64), 0
    for document in text.documents[:n]:
        ids = model.tokenization.encode([document])[0][:24]
        if len(ids) < 8:
            continue
        (states,) = lj.capture_states(model, [lj.batch_from_ids(ids)], [3])
        whole = states[3]
        at = len(ids) - 1

        def last_block(state, whole=whole, at=at):
            rows = torch.cat([whole[:at], state[None]])[None]
            output = model.structure.blocks[3](rows)
            return (output[0] if isinstance(output, tuple) else output)[0, at]

        total += torch.autograd.functional.jacobian(last_block, whole[at]).double()
        count += 1
    return total / count


def test_seed_and_settings_are_recorded_and_repeat(model, text):
    first, second = (lj.fit_finite_differences(model, text, levels=[2], tokens=3_000, seed=1) for _ in range(2))
    assert torch.equal(matrix(first, (2, 4)), matrix(second, (2, 4)))
    assert first.provenance.settings["noise"] == 0.1
    assert first.provenance.estimator == "differences"
    assert lj.Lens(model, first)("Once upon a time").levels == ("2", "4")


@pytest.mark.parametrize("noise", [0.0, -1.0, float("nan"), float("inf")])
def test_noise_without_a_size_is_refused(model, text, noise):
    with pytest.raises(BadEstimator, match="expected noise above 0"):
        lj.fit_finite_differences(model, text, noise=noise)


def test_levels_and_models_without_such_a_lens_are_refused(model, text, data_folder):
    with pytest.raises(BadModel, match="expected levels from 0 to 3"):
        lj.fit_finite_differences(model, text, levels=[4])
    with pytest.raises(BadModel, match="expected a causal model"):
        lj.fit_finite_differences(lj.load(data_folder / "tiny-bert"), text)


def test_too_little_text_is_refused(model, text):
    with pytest.raises(TextTooShort, match="more positions than the width"):
        lj.fit_finite_differences(model, text, tokens=60, max_length=16, skip_first=14)
