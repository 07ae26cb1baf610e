"""A run that is decided on."""

import pytest
import torch

import layerjump as lj
from layerjump.errors import BadText
from layerjump.jumps.collect import plan_run


@pytest.mark.parametrize("tokens", [0, -5])
def test_no_tokens_at_all_are_refused(tokens, data_folder, study_text):
    with pytest.raises(BadText, match=f"tokens of 1 or more, .* got {tokens}"):
        lj.collect_moments(lj.load(data_folder / "tiny-gpt2"), study_text, tokens=tokens)


def test_products_are_rough_for_calibrated_alone(data_folder, study_text):
    """Its penalty is far above float32's rounding; `affine` of both features has none, and keeps float64."""
    model = lj.load(data_folder / "tiny-gpt2")
    settings = {"estimator": "calibrated", "tokens": 2_000}
    float32_products = plan_run(model, study_text, **settings)
    exact = plan_run(
        model, study_text, estimator="affine", pairs="to-final", features="both", tokens=2_000
    )
    single = plan_run(model, study_text, **settings, features="rms")
    found = [one.moments["fit"].products for one in (float32_products, exact, single)]
    assert found == [torch.float32, torch.float64, torch.float64]
