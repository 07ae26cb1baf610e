"""A run that is decided on."""

import pytest
import torch

import layerjump as lj
from layerjump.errors import BadText
from layerjump.jumps.collect import plan
from layerjump.jumps.fit import plan_settings


@pytest.mark.parametrize("tokens", [0, -5])
def test_no_tokens_at_all_are_refused(tokens, data_folder, study_text):
    with pytest.raises(BadText, match=f"tokens given is {tokens}"):
        lj.collect(lj.load(data_folder / "tiny-gpt2"), study_text, tokens=tokens)


def test_products_are_rough_for_calibrated_alone(data_folder, study_text):
    """Its penalty is far above float32's rounding; `affine` of both features has none, and keeps float64."""
    model = lj.load(data_folder / "tiny-gpt2")
    settings = {**plan_settings("calibrated"), "tokens": 2_000}
    rough = plan(model, study_text, **settings)
    exact = plan(model, study_text, **plan_settings("affine"), reads="both", tokens=2_000)
    single = plan(model, study_text, **settings | {"reads": "rms"})
    found = [one.moments["fit"].products for one in (rough, exact, single)]
    assert found == [torch.float32, torch.float64, torch.float64]
