"""Early-exit generation: verified text, exit levels, caches, sampling, Hugging Face's interfaces."""

from __future__ import annotations

import pytest
import torch
from helpers import fitted_gpt2, greedy_generation
from helpers.greedy_generation import GREEDY, PROMPT, theirs, unpadded
from helpers.tiny_models import tiny_model
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import layerjump as lj
from layerjump.errors import BadExit, BadJumps
from layerjump.generation.exit_rules import Fixed, SoftmaxGap
from layerjump.lens.evaluate import evaluate_lenses
from layerjump.lens.lens import Lens

model, jumps = fitted_gpt2.model, greedy_generation.jumps  # fixtures


@pytest.fixture(scope="module")
def stories(real_folder):
    return lj.load(real_folder("stories15M"))


class Listener(BaseStreamer):
    def __init__(self):
        self.got, self.ended = [], 0

    def put(self, value):
        self.got.append(value)

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("rule", ["gap:0.3", "agree:2", "entropy:3.5", "fixed:2", "maxprob:0.3"])
def test_verified_text_is_the_full_models(model, jumps, rule):
    prompts = [PROMPT, "The dog", "Tom and Mia went to the park. They saw a big"]
    end = model.hf.generation_config.eos_token_id
    for some in (prompts[:1], prompts):
        made = lj.generate(model, jumps, some, exit=rule, verify=True, max_draft_tokens=5, **GREEDY)
        assert made.ids == unpadded(theirs(model, some), end)
        # In a batch all rows go as deep as the deepest, so some rules make no drafts.
        assert len(some) > 1 or made.counts.drafts > 0


def test_stories_verified_and_never(stories):
    prompts = [PROMPT, "Tom had a red ball. One day", "The sun"]
    jumps = lj.fit(stories, lj.load_text("pydoc", limit=120), tokens=3_000)
    wanted = unpadded(theirs(stories, prompts), stories.hf.generation_config.eos_token_id)
    for rule, verify in (("never", False), ("gap:0.5", True), ("fixed:3", True)):
        made = lj.generate(stories, jumps, prompts, exit=rule, verify=verify, **GREEDY)
        assert made.ids == wanted or made.counts.near_ties


def test_generation_exits_where_a_replay_does(model, jumps):
    """The `early_exit` study replays exits from the readings of all levels; generation exits at the same levels."""
    rule = SoftmaxGap(0.35, 12.0)
    made = lj.generate(model, jumps, PROMPT, exit=rule, **GREEDY)
    prompt = model.tokenization.generation_inputs([PROMPT])["input_ids"][0].tolist()
    batch = lj.batch_from_ids([*prompt, *made.ids[0]][:-1])
    readings = evaluate_lenses(model, {"jumps": Lens(model, jumps)}, [batch])
    replayed = rule.replay(readings.confidence[0], readings.position)[len(prompt) - 1 :]
    assert made.exit_levels[0] == replayed.tolist()
    assert len(set(made.exit_levels[0])) > 1
    tops = readings.top[0, :, len(prompt) - 1 :].gather(0, replayed[None])[0]
    assert made.ids[0] == tops.tolist()


@pytest.mark.parametrize("verify", [False, True])
def test_it_is_a_custom_generation_function(model, jumps, verify):
    inputs = model.tokenization.generation_inputs([PROMPT])
    custom_generate = lj.early_exit(jumps, "gap:0.4", verify=verify)
    found = model.hf.generate(**inputs, custom_generate=custom_generate, **GREEDY)
    same = lj.generate(model, jumps, PROMPT, exit="gap:0.4", verify=verify, **GREEDY)
    assert found[0, inputs["input_ids"].shape[1] :].tolist() == same.ids[0]
    assert custom_generate.result.exit_levels == same.exit_levels
    assert same.text[0] == model.tokenizer.decode(same.ids[0], skip_special_tokens=True)


def test_processors_and_stopping_criteria_apply(model, jumps):
    class NoRepeat(LogitsProcessor):
        def __call__(self, ids, scores):
            return scores.scatter(1, ids[:, -3:], -torch.inf)

    class Enough(StoppingCriteria):
        def __call__(self, ids, scores, **given):
            return torch.full((len(ids),), ids.shape[1] >= 20)

    settings = {"logits_processor": [NoRepeat()], "stopping_criteria": [Enough()]}
    settings |= {"repetition_penalty": 1.3}
    wanted = theirs(model, [PROMPT], **settings).tolist()
    made = lj.generate(model, jumps, PROMPT, exit="gap:0.2", verify=True, **GREEDY, **settings)
    assert made.ids == wanted


def test_the_streamer_gets_final_tokens_only(model, jumps):
    listener = Listener()
    made = lj.generate(model, jumps, PROMPT, exit="fixed:1", verify=True, streamer=listener, **GREEDY)
    prompt, *rest = listener.got
    assert prompt.tolist() == model.tokenization.generation_inputs([PROMPT])["input_ids"].tolist()
    assert [int(token) for token in rest] == made.ids[0]
    assert made.counts.rollbacks > 0
    assert listener.ended == 1


@pytest.mark.parametrize("verify", [False, True])
def test_a_streamer_may_receive_exit_levels(model, jumps, verify):
    class LevelListener(Listener):
        def put_exit_levels(self, levels):
            self.got.append(levels)

    listener = LevelListener()
    prompts = [PROMPT, "Tom had"]
    made = lj.generate(model, jumps, prompts, exit="gap:0.3", verify=verify, streamer=listener, **GREEDY)
    _, *rest = listener.got
    for row in (0, 1):
        told = [(int(ids[row]), levels[row]) for levels, ids in zip(rest[::2], rest[1::2], strict=True)]
        ours = list(zip(made.ids[row], made.exit_levels[row], strict=True))
        assert told[: len(ours)] == ours
    assert len(set(made.exit_levels[0])) > 1


def test_sampling_without_early_exit_draws_what_hugging_face_draws(model, jumps):
    torch.manual_seed(5)
    wanted = theirs(model, [PROMPT], do_sample=True, temperature=0.7, top_k=20)
    torch.manual_seed(5)
    made = lj.generate(model, jumps, PROMPT, max_new_tokens=24, do_sample=True, temperature=0.7, top_k=20)
    assert made.ids == unpadded(wanted, model.hf.generation_config.eos_token_id)


def test_verified_sampling_follows_the_full_models_distribution():
    """A chi-square test of pairs of sampled tokens against their exact probabilities."""
    hf = tiny_model("gpt2", vocab_size=7, eos_token_id=None, bos_token_id=None, pad_token_id=None)
    model = lj.Model.wrap(hf)
    rows, prompt = 4_000, torch.tensor([[3, 1, 4]])
    torch.manual_seed(0)
    made = lj.generate(
        model,
        None,
        {"input_ids": prompt.expand(rows, -1), "attention_mask": torch.ones(rows, 3).long()},
        exit=Fixed(2),
        verify=True,
        max_new_tokens=2,
        do_sample=True,
        temperature=3.0,
        top_k=0,
    )
    assert 0.2 < made.agreement < 0.98
    with torch.no_grad():
        first = (hf(prompt).logits[0, -1] / 3).softmax(-1)
        longer = torch.cat([prompt.expand(7, -1), torch.arange(7)[:, None]], 1)
        second = (hf(longer).logits[:, -1] / 3).softmax(-1)
    wanted = (first[:, None] * second).reshape(-1) * rows
    found = torch.zeros(49).index_add(0, torch.tensor([7 * a + b for a, b in made.ids]), torch.ones(rows))
    enough = wanted > 5
    statistic = ((found - wanted)[enough] ** 2 / wanted[enough]).sum()
    # 99.9 % of a chi-square of 48 is 84; unverified drafts are far beyond it.
    assert int(enough.sum()) > 20
    assert float(statistic) < 84


@pytest.mark.parametrize("cache", ["jump", "copy"])
def test_predicted_and_copied_caches(model, jumps, cache):
    never = lj.generate(model, jumps, PROMPT, exit="never", cache=cache, **GREEDY)
    assert never.ids == unpadded(theirs(model, [PROMPT]), model.hf.generation_config.eos_token_id)
    made = lj.generate(model, jumps, [PROMPT, "The dog"], exit="fixed:2", cache=cache, **GREEDY)
    first = lj.generate(model, jumps, [PROMPT, "The dog"], exit="fixed:2", **GREEDY)
    # The first token follows the prompt alone, whose keys and values are the model's own.
    assert [row[0] for row in made.ids] == [row[0] for row in first.ids]
    assert made.counts.filled_blocks > 0
    with pytest.raises(BadExit, match="verify needs"):
        lj.generate(model, jumps, PROMPT, exit="fixed:2", cache=cache, verify=True)


def test_the_jump_cache_needs_its_jumps(model, study_text):
    few = lj.fit(model, study_text, tokens=2_000)
    with pytest.raises(BadJumps, match="pairs='all'"):
        lj.generate(model, few, PROMPT, exit="fixed:2", cache="jump", **GREEDY)
