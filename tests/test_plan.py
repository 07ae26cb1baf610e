"""A run that is decided on."""

import pytest

import layerjump as lj
from layerjump.errors import BadText


@pytest.mark.parametrize("tokens", [0, -5])
def test_no_tokens_at_all_are_refused(tokens, data_folder, study_text):
    with pytest.raises(BadText, match=f"tokens given is {tokens}"):
        lj.collect(lj.load(data_folder / "tiny-gpt2"), study_text, tokens=tokens)
