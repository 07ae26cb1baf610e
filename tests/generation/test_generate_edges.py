"""Generation at its edges: what cannot be done, the last position, a stop in the middle, long texts."""

from __future__ import annotations

import _thread
import signal
import threading

import pytest
import torch
from helpers import fitted_gpt2, greedy_generation
from helpers.greedy_generation import PROMPT, theirs
from helpers.tiny_models import tiny_model
from transformers import StoppingCriteria

import layerjump as lj
from layerjump.errors import BadExit, BadText, WrongModel

model, jumps = fitted_gpt2.model, greedy_generation.jumps  # fixtures


def test_what_cannot_be_done_is_one_line(model, jumps):
    cases = [
        ({"num_beams": 2}, "num_beams=2"),
        ({"output_scores": True, "return_dict_in_generate": True}, "returns tokens alone"),
        ({"exit": "fixed:4"}, "levels 0 to 3"),
        ({"exit": "sometimes"}, "expects never"),
        ({"cache": "none"}, "exact, jump, copy"),
        ({"max_draft_tokens": 0}, "1 or more"),
        ({"use_cache": False}, "use_cache=False"),
    ]
    for settings, message in cases:
        with pytest.raises(BadExit, match=message) as found:
            lj.generate(model, jumps, PROMPT, max_new_tokens=3, **settings)
        assert "\n" not in str(found.value)
    with pytest.raises(BadText, match="no tokens"):
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


def test_up_to_the_last_position_and_an_end_inside_the_prompt(model, jumps):
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
def heeding_ctrl_c():
    """A run that was started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeding_ctrl_c")
def test_stopping_in_the_middle_leaves_the_model_usable(model, jumps):
    wanted = theirs(model, [PROMPT])
    modules = dict(model.hf.named_modules())

    class Stopper(StoppingCriteria):
        def __call__(self, ids, scores, **given):
            if ids.shape[1] > 20:
                threading.Thread(target=_thread.interrupt_main).start()
            return torch.zeros(len(ids), dtype=torch.bool)

    with pytest.raises(KeyboardInterrupt):
        lj.generate(
            model, jumps, PROMPT, exit="gap:0.4", stopping_criteria=[Stopper()], max_new_tokens=100
        )
    assert dict(model.hf.named_modules()) == modules
    assert torch.equal(theirs(model, [PROMPT]), wanted)


def test_a_long_run():
    model = lj.Model.wrap(tiny_model("llama", max_position_embeddings=2_100))
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3).long()}
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = model.hf.generate(**inputs, **settings, max_new_tokens=2_000)[0, 3:].tolist()
    made = lj.generate(model, None, inputs, **settings, max_new_tokens=2_000)
    assert made.ids[0] == wanted
    drafted = lj.generate(
        model, None, inputs, exit="gap:0.1", verify=True, **settings, max_new_tokens=300
    )
    assert drafted.ids[0] == wanted[:300]
    assert drafted.counts.drafts > 0


def test_text_goes_on_where_the_prompt_ends(real_folder):
    model = lj.load(real_folder("stories15M"))  # its tokenizer drops a blank that comes first
    made = lj.generate(model, None, "Once upon a time,", exit="never", max_new_tokens=4)
    assert made.text[0].startswith(" there was")
