"""Edge cases of generation: unsupported settings, the last position, interruption, long texts."""

from __future__ import annotations

import _thread
import signal
import threading

import pytest
import torch
from helpers import fitted_gpt2, greedy_generation
from helpers.cli import refused
from helpers.greedy_generation import PROMPT, theirs
from helpers.tiny_models import tiny_model
from transformers import StaticCache, StoppingCriteria

import layerjump as lj
from layerjump.errors import BadExit, BadText, WrongModel

model, jumps = fitted_gpt2.model, greedy_generation.jumps  # fixtures

OUT_OF_RANGE = [("max_new_tokens", 0), ("temperature", 0.0), ("temperature", float("nan")), ("top_p", 2.0)]


def test_unsupported_settings_are_refused_in_one_line(model, jumps):
    cases = [
        ({"num_beams": 2}, "num_beams=2"),
        ({"output_scores": True, "return_dict_in_generate": True}, "returns tokens alone"),
        ({"exit": "fixed:4"}, "levels 0 to 3"),
        ({"exit": "sometimes"}, "expects never"),
        ({"cache": "none"}, "exact, jump, copy"),
        ({"max_draft_tokens": 0}, "1 or more"),
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "static"}, "cache_implementation='static'; leave it out"),
        ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded'; leave it out"),
        (
            {"past_key_values": StaticCache(model.hf.config, max_cache_len=64)},
            "past_key_values of the type StaticCache",
        ),
    ]
    for settings, message in cases:
        with pytest.raises(BadExit, match=message) as found:
            lj.generate(model, jumps, PROMPT, max_new_tokens=3, **settings)
        assert "\n" not in str(found.value)
    with pytest.raises(BadText, match="at least one token"):
        lj.generate(model, jumps, "")
    with pytest.raises(BadText, match="shorten it"):
        lj.generate(model, jumps, "dog " * 2_000)
    with pytest.raises(BadExit, match="at least one"):
        lj.generate(model, jumps, [])
    other = lj.Model.wrap(tiny_model("gpt2", num_hidden_layers=4, hidden_size=64))
    with pytest.raises(WrongModel):
        lj.generate(other, jumps, {"input_ids": torch.tensor([[3, 4]])})


def test_an_encoder_cannot_generate(data_folder):
    with pytest.raises(BadExit, match="masked model"):
        lj.generate(lj.load(data_folder / "tiny-bert"), None, "A dog")


def test_generation_up_to_the_last_position_and_an_end_token_in_the_prompt(model, jumps):
    end = model.hf.generation_config.eos_token_id
    limit = model.max_positions
    ids = torch.randint(5, 200, (1, 6))
    ids[0, 2] = end
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    settings = {"max_length": limit, "min_length": limit, "do_sample": False, "pad_token_id": end}
    wanted = model.hf.generate(**inputs, **settings)[0, 6:].tolist()
    for rule, verify in (("never", False), ("fixed:3", True)):
        made = lj.generate(model, jumps, inputs, exit=rule, verify=verify, **settings)
        assert made.ids[0] == wanted
        assert len(made.ids[0]) == limit - 6


@pytest.fixture
def interruptible():
    """A process started in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_generation_leaves_the_model_intact(model, jumps):
    wanted = theirs(model, [PROMPT])
    modules = dict(model.hf.named_modules())

    class Stopper(StoppingCriteria):
        def __call__(self, ids, scores, **given):
            if ids.shape[1] > 20:
                threading.Thread(target=_thread.interrupt_main).start()
            return torch.zeros(len(ids), dtype=torch.bool)

    with pytest.raises(KeyboardInterrupt):
        lj.generate(model, jumps, PROMPT, exit="gap:0.4", stopping_criteria=[Stopper()], max_new_tokens=100)
    assert dict(model.hf.named_modules()) == modules
    assert torch.equal(theirs(model, [PROMPT]), wanted)


def test_long_generation():
    model = lj.Model.wrap(tiny_model("llama", max_position_embeddings=2_100))
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3).long()}
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = model.hf.generate(**inputs, **settings, max_new_tokens=2_000)[0, 3:].tolist()
    made = lj.generate(model, None, inputs, **settings, max_new_tokens=2_000)
    assert made.ids[0] == wanted
    drafted = lj.generate(model, None, inputs, exit="gap:0.1", verify=True, **settings, max_new_tokens=300)
    assert drafted.ids[0] == wanted[:300]
    assert drafted.counts.drafts > 0


def test_text_continues_where_the_prompt_ends(real_folder):
    model = lj.load(real_folder("stories15M"))  # its tokenizer drops a blank that comes first
    made = lj.generate(model, None, "Once upon a time,", exit="never", max_new_tokens=4)
    assert made.text[0].startswith(" there was")


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_a_setting_out_of_range_is_named(data_folder, name, value):
    model = lj.load(data_folder / "tiny-gpt2")
    with pytest.raises(BadExit, match=f"{name} must be"):
        lj.generate(model, None, "A dog", **{"do_sample": True, name: value})


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_the_command_line_checks_settings_before_loading(monkeypatch, capsys, name, value):
    option = "--" + name.replace("_", "-")
    message = refused(monkeypatch, capsys, "generate", "no-such-model", "a", option, str(value))
    assert f"{option} must be" in message


def test_generation_past_a_table_of_positions_is_refused(data_folder):
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
