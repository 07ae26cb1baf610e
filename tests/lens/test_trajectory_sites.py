"""Trajectories at any site and between any pair, tokens followed through them, and what cannot be read."""

import math

import pytest
import torch
from helpers import tokenizers, trajectory_inputs
from helpers.story_text import stories
from helpers.tiny_models import tiny_model
from helpers.trajectory_inputs import NUMBERS, STORY, made

import layerjump as lj
from layerjump.errors import BadJumps, BadModel, BadText
from layerjump.lens.trajectory import settled_level

gpt2, text, jumps = (
    trajectory_inputs.gpt2,
    trajectory_inputs.text,
    trajectory_inputs.jumps,
)  # fixtures


def test_sites_inside_blocks_are_read(gpt2, jumps):
    sites = ["0", "2.mid", "2.attn.out", 2, "final", 4]
    found = lj.Lens(gpt2)(STORY, levels=sites)
    assert found.levels == ("0", "2.mid", "2.attn.out", "2", "final", "4")
    batch = lj.batch_from_ids(found.prompt.ids)
    (at,) = lj.capture_states(gpt2, [batch], ["2.mid", "2.attn.out"])
    for place, site in ((1, "2.mid"), (2, "2.attn.out")):
        assert torch.equal(found.top[place, :, 0], gpt2.logits(at[site]).argmax(-1))
    assert torch.equal(found.top[4], found.top[5])
    mapped = lj.Lens(gpt2, jumps)(STORY, levels=["2.mid"])
    through = gpt2.logits(jumps["2.mid", 4](at["2.mid"].float()).double())
    assert torch.equal(mapped.top[0, :, 0], through.argmax(-1))
    with pytest.raises(BadJumps, match=r"fit with pairs='3\.mid:4'"):
        lj.Lens(gpt2, jumps)(STORY, levels=["3.mid"])


def test_any_pair_is_read_as_another_level(gpt2, jumps):
    lens = lj.Lens(gpt2, jumps)
    between = lens.at(1, 3)
    found = between(STORY, k=3)
    assert found.levels == ("1",)
    (at,) = lj.capture_states(gpt2, [lj.batch_from_ids(found.prompt.ids)], [1])
    mapped = jumps[3, 4](jumps[1, 3](at[1].float())).double()
    assert torch.equal(found.top[0], gpt2.logits(mapped).topk(3).indices)
    assert torch.equal(between.map_states(at[1]), jumps[1, 3](at[1].float()).double())
    assert torch.equal(lens.at(2, 4)(STORY).top, lens(STORY, levels=[2]).top)
    assert torch.equal(lj.Lens(gpt2).at(1, 3)(STORY).top, lj.Lens(gpt2)(STORY, levels=[1]).top)
    with pytest.raises(BadJumps, match="fit with pairs='2:3,3:4'"):
        lens.at(2, 3)(STORY)


def test_settled_level_is_where_the_answer_stays():
    top = torch.tensor([[7, 7, 1, 2], [7, 3, 1, 2], [7, 7, 7, 7], [7, 7, 7, 9]])
    assert settled_level(top, torch.tensor([7, 7, 7, 7])).tolist() == [0, 2, 2, -1]


def test_levels_without_the_last_may_never_decide(gpt2):
    found = lj.Lens(gpt2)(STORY, levels=[0])
    right = found.top[0, :, 0] == found.model_top
    assert found.settled_level.tolist() == [0 if fine else -1 for fine in right]
    assert None in found.to_dict()["decided_at"]


def test_any_token_is_followed_afterwards(gpt2):
    found = lj.Lens(gpt2)(STORY)
    later, asked = found.track(" ball"), lj.Lens(gpt2)(STORY, tokens=[" ball"]).tracked[0]
    assert (later.id, later.text) == (asked.id, " ball")
    assert torch.equal(later.rank, asked.rank)
    assert torch.equal(later.probability, asked.probability)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_of_any_precision_is_read(dtype, data_folder, gpt2, jumps):
    model = lj.load(data_folder / "tiny-gpt2", dtype=dtype)
    found, wanted = lj.Lens(model, jumps)(STORY), lj.Lens(gpt2, jumps)(STORY)
    assert (found.kl - wanted.kl).abs().mean() < (1e-3 if dtype == "float32" else 0.1)
    assert found.kl[-1].max() < 1e-5


def test_what_cannot_be_read_is_said_in_one_line(gpt2, jumps, data_folder):
    lens = lj.Lens(gpt2)
    longest = gpt2.tokenization.max_length
    for action, error, message in (
        (lambda: lens("ball " * 200), BadText, rf"reads at most {longest}; shorten"),
        (lambda: lens(""), BadText, "no tokens"),
        (lambda: lens("a", k=0), BadText, "1 or more, got 0"),
        (lambda: lens("a", levels=[]), BadText, "at least one"),
        (lambda: lens("a", levels=[9]), BadModel, "levels 0 to 4"),
        (lambda: lens("a", tokens=["once upon"]), BadText, r"makes \d of it \('.*'\)"),
        (lambda: lens("a", tokens=[99_999]), BadText, "vocabulary has 1,024"),
        (lambda: lens("a").distribution(2, 7), BadText, "was not read"),
        (lambda: lj.Lens(made("llama"), jumps), BadJumps, "4 blocks"),
    ):
        with pytest.raises(error, match=message) as caught:
            action()
        assert "\n" not in str(caught.value)


def test_an_encoder_decoder_is_refused():
    hf = tiny_model("t5", vocab_size=1007)
    model = lj.Model.wrap(hf, tokenizers.tokenizer("$A </s>", pad_token="[PAD]", eos_token="</s>"))
    with pytest.raises(BadModel, match="encoder–decoder"):
        lj.Lens(model)(NUMBERS)


def test_on_a_trained_model_the_map_reads_better_than_the_state_itself(gpt2):
    lens = lj.Lens(gpt2, lj.fit(gpt2, stories(200), split="100/0/0"))
    assert lens.fitted_from == 1
    plain, mapped = lj.Lens(gpt2)(STORY), lens(STORY)
    assert mapped.kl[1:-1, 1:].mean() < plain.kl[1:-1, 1:].mean() / 2
    assert mapped.entropy.max() <= math.log(gpt2.structure.vocab_size) + 1e-9
