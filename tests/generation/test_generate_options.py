"""Settings of generation that cannot be had are one line, whoever asks: a program, Hugging Face, the command line."""

import pytest
import torch
from helpers.cli import refused

import layerjump as lj
from layerjump.errors import BadExit

OUT_OF_RANGE = [
    ("max_new_tokens", 0),
    ("temperature", 0.0),
    ("temperature", float("nan")),
    ("top_p", 2.0),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_a_setting_out_of_range_is_named(data_folder, name, value):
    model = lj.load(data_folder / "tiny-gpt2")
    with pytest.raises(BadExit, match=f"{name} must be"):
        lj.generate(model, None, "A dog", **{"do_sample": True, name: value})


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_the_command_line_names_it_before_it_loads(monkeypatch, capsys, name, value):
    option = "--" + name.replace("_", "-")
    said = refused(monkeypatch, capsys, "generate", "no-such-model", "a", option, str(value))
    assert f"{option} must be" in said


def test_a_table_of_positions_has_an_end(data_folder):
    model = lj.load(data_folder / "tiny-gpt2")
    ids = torch.full((1, 28), 40)
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    made = lj.generate(model, None, {"input_ids": ids}, max_new_tokens=100, **settings)
    assert len(made.ids[0]) == 100
    with pytest.raises(BadExit, match="128 positions, and the prompt takes 28"):
        lj.generate(model, None, {"input_ids": ids}, max_new_tokens=101, **settings)
    custom = lj.early_exit(None, "never")
    with pytest.raises(BadExit, match="128 positions"):
        model.hf.generate(ids, custom_generate=custom, max_new_tokens=101, **settings)
