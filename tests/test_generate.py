"""Early-exit generation: rules, caches, sampling, Hugging Face's own doors, edges."""

from __future__ import annotations

import _thread
import signal
import threading
from itertools import product

import pytest
import torch
from tiny import tiny_model
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import layerjump as lj
from layerjump.decode.blocks import HuggingFaceBlocks
from layerjump.decode.lean import LeanLlama, blocks_of, with_lean_head
from layerjump.decode.result import Counts
from layerjump.decode.rules import Agree, Entropy, Fixed, Look, MaxProb, Never, SoftmaxGap, parse
from layerjump.decode.runner import Runner
from layerjump.errors import BadExit, BadJumps, BadText, WrongModel
from layerjump.lens.lens import Lens
from layerjump.lens.readings import read_levels

GREEDY = {"do_sample": False, "max_new_tokens": 24}
PROMPT = "Once upon a time, there was a little girl named Lily."


@pytest.fixture(scope="module")
def model(data_folder):
    return lj.load(data_folder / "tiny-gpt2")


@pytest.fixture(scope="module")
def jumps(model, study_text):
    return lj.fit(model, study_text, tokens=4_000, pairs="all")


@pytest.fixture(scope="module")
def stories(real_folder):
    return lj.load(real_folder("stories15M"))


def theirs(model, prompts, **settings):
    inputs = model.tokens.generation_inputs(prompts)
    found = model.hf.generate(**inputs, pad_token_id=model.tokens.pad, **(GREEDY | settings))
    return found[:, inputs["input_ids"].shape[1] :]


def unpadded(ids, end):
    rows = ids.tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


class Listener(BaseStreamer):
    def __init__(self):
        self.got, self.ended = [], 0

    def put(self, value):
        self.got.append(value)

    def end(self):
        self.ended += 1


def look(logits, earlier=(), level=2):
    logits = torch.as_tensor(logits, dtype=torch.float64)
    state = torch.zeros(len(logits), 4)
    return Look(level, state, torch.full((len(logits),), 50), lambda level, states: logits, earlier)


def test_rules_say_what_their_names_say():
    logits = torch.tensor([[0.9, 0.05, 0.05], [0.5, 0.4, 0.1]], dtype=torch.float64).log()
    assert look(logits).gap.tolist() == pytest.approx([0.85, 0.1])
    assert MaxProb(0.6).stops(look(logits)).tolist() == [True, False]
    assert Entropy(0.5).stops(look(logits)).tolist() == [True, False]
    assert SoftmaxGap(0.5, 10).stops(look(logits)).tolist() == [True, False]
    assert Never().stops(look(logits)).tolist() == [False, False]
    tops = torch.tensor([0, 0]), torch.tensor([0, 1])
    assert Agree(2).stops(look(logits, tops)).tolist() == [True, False]
    assert Agree(3).stops(look(logits, tops)).tolist() == [True, False]
    assert Agree(4).stops(look(logits, tops)).tolist() == [False, False]
    assert Agree(1).stops(look(logits)).tolist() == [True, True]


def test_a_rule_that_does_not_ask_makes_no_vocabulary_product():
    seen = look([[1.0, 2.0]])
    Fixed(2).stops(seen)
    assert not seen.predicted


def test_rules_have_short_names():
    assert parse("never") == Never()
    assert parse("fixed:3") == Fixed(3)
    assert parse("maxprob:0.8@2,1") == MaxProb(0.8, at=(1, 2))
    assert parse("agree:2") == Agree(2)
    gap = parse("gap:0.7@3")
    assert gap.at == (3,)
    assert gap.threshold(torch.tensor([1, 90])).tolist() == pytest.approx([0.7, 0.7])
    for wrong in ("gap", "gap:x", "fixed:1@2", "nothing:1", "never:1", "gap:0.5@a"):
        with pytest.raises(BadExit, match="give never"):
            parse(wrong)


@pytest.mark.parametrize("rule", ["gap:0.3", "agree:2", "entropy:3.5", "fixed:2", "maxprob:0.3"])
def test_verified_text_of_a_trained_model_is_its_own(model, jumps, rule):
    prompts = [PROMPT, "The dog", "Tom and Mia went to the park. They saw a big"]
    end = model.hf.generation_config.eos_token_id
    for some in (prompts[:1], prompts):
        made = lj.generate(model, jumps, some, exit=rule, verify=True, unverified=5, **GREEDY)
        assert made.ids == unpadded(theirs(model, some), end)
        # In a batch one row that goes deep takes all along, so some rules leave nothing to draft.
        assert len(some) > 1 or made.counts.drafts > 0


def test_stories_verified_and_never(stories):
    prompts = [PROMPT, "Tom had a red ball. One day", "The sun"]
    jumps = lj.fit(stories, lj.read("pydoc", limit=120), tokens=3_000)
    wanted = unpadded(theirs(stories, prompts), stories.hf.generation_config.eos_token_id)
    for rule, verify in (("never", False), ("gap:0.5", True), ("fixed:3", True)):
        made = lj.generate(stories, jumps, prompts, exit=rule, verify=verify, **GREEDY)
        assert made.ids == wanted or made.counts.near_ties


def test_real_generation_uses_the_levels_that_a_replay_says(model, jumps):
    """The `exits` study reads every level and says where a token would have left; here it really leaves."""
    rule = SoftmaxGap(0.35, 12.0)
    made = lj.generate(model, jumps, PROMPT, exit=rule, **GREEDY)
    prompt = model.tokens.generation_inputs([PROMPT])["input_ids"][0].tolist()
    batch = lj.one_batch([*prompt, *made.ids[0]][:-1])
    readings = read_levels(model, {"jumps": Lens(model, jumps)}, [batch])
    replayed = rule.replay(readings.confidence[0], readings.position)[len(prompt) - 1 :]
    assert made.levels[0] == replayed.tolist()
    assert len(set(made.levels[0])) > 1
    tops = readings.top[0, :, len(prompt) - 1 :].gather(0, replayed[None])[0]
    assert made.ids[0] == tops.tolist()


@pytest.mark.parametrize("verify", [False, True])
def test_it_is_a_custom_generation_function(model, jumps, verify):
    inputs = model.tokens.generation_inputs([PROMPT])
    how = lj.early_exit(jumps, "gap:0.4", verify=verify)
    found = model.hf.generate(**inputs, custom_generate=how, **GREEDY)
    same = lj.generate(model, jumps, PROMPT, exit="gap:0.4", verify=verify, **GREEDY)
    assert found[0, inputs["input_ids"].shape[1] :].tolist() == same.ids[0]
    assert how.result.levels == same.levels
    assert same.text[0] == model.tokenizer.decode(same.ids[0], skip_special_tokens=True)


def test_generation_settings_work_as_users_know_them(model, jumps):
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


def test_the_streamer_gets_known_tokens_only(model, jumps):
    listener = Listener()
    made = lj.generate(
        model, jumps, PROMPT, exit="fixed:1", verify=True, streamer=listener, **GREEDY
    )
    prompt, *rest = listener.got
    assert prompt.tolist() == model.tokens.generation_inputs([PROMPT])["input_ids"].tolist()
    assert [int(token) for token in rest] == made.ids[0]
    assert made.counts.rollbacks > 0
    assert listener.ended == 1


@pytest.mark.parametrize("verify", [False, True])
def test_a_streamer_may_hear_the_levels_with_the_tokens(model, jumps, verify):
    class Leveller(Listener):
        def left(self, levels):
            self.got.append(levels)

    listener = Leveller()
    prompts = [PROMPT, "Tom had"]
    made = lj.generate(
        model, jumps, prompts, exit="gap:0.3", verify=verify, streamer=listener, **GREEDY
    )
    _, *rest = listener.got
    for row in (0, 1):
        told = [
            (int(ids[row]), levels[row]) for levels, ids in zip(rest[::2], rest[1::2], strict=True)
        ]
        ours = list(zip(made.ids[row], made.levels[row], strict=True))
        assert told[: len(ours)] == ours
    assert len(set(made.levels[0])) > 1


def test_sampling_never_draws_what_hugging_face_draws(model, jumps):
    torch.manual_seed(5)
    wanted = theirs(model, [PROMPT], do_sample=True, temperature=0.7, top_k=20)
    torch.manual_seed(5)
    made = lj.generate(
        model, jumps, PROMPT, max_new_tokens=24, do_sample=True, temperature=0.7, top_k=20
    )
    assert made.ids == unpadded(wanted, model.hf.generation_config.eos_token_id)


def test_verified_sampling_draws_from_the_full_model():
    """Pairs of tokens drawn with drafts, against their exact probabilities: a chi-square test."""
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
    found = torch.zeros(49).index_add(
        0, torch.tensor([7 * a + b for a, b in made.ids]), torch.ones(rows)
    )
    enough = wanted > 5
    statistic = ((found - wanted)[enough] ** 2 / wanted[enough]).sum()
    # 99.9 % of a chi-square of 48 is 84; drafts alone, unverified, are far beyond it.
    assert int(enough.sum()) > 20
    assert float(statistic) < 84


@pytest.mark.parametrize("cache", ["jump", "copy"])
def test_caches_that_are_not_computed(model, jumps, cache):
    never = lj.generate(model, jumps, PROMPT, exit="never", cache=cache, **GREEDY)
    assert never.ids == unpadded(theirs(model, [PROMPT]), model.hf.generation_config.eos_token_id)
    made = lj.generate(model, jumps, [PROMPT, "The dog"], exit="fixed:2", cache=cache, **GREEDY)
    first = lj.generate(model, jumps, [PROMPT, "The dog"], exit="fixed:2", **GREEDY)
    # The first token has nothing but the prompt behind it, whose keys and values are the model's own.
    assert [row[0] for row in made.ids] == [row[0] for row in first.ids]
    assert made.counts.filled > 0
    with pytest.raises(BadExit, match="verify needs"):
        lj.generate(model, jumps, PROMPT, exit="fixed:2", cache=cache, verify=True)


def test_the_jump_cache_needs_its_jumps(model, study_text):
    few = lj.fit(model, study_text, tokens=2_000)
    with pytest.raises(BadJumps, match="pairs all"):
        lj.generate(model, few, PROMPT, exit="fixed:2", cache="jump", **GREEDY)


def test_lean_blocks_and_head_are_the_same_as_hugging_faces():
    hf = tiny_model("llama", dtype=torch.float32)
    model = lj.Model.wrap(hf)
    assert isinstance(blocks_of(model), LeanLlama)
    ids = torch.randint(3, 61, (2, 29))
    padded = torch.tensor([[0] * 3 + [1] * 26, [1] * 29])
    # A prompt, short or long, one token, several: with and without a mask.
    for mask, lengths in product((None, padded), ((5, 6, 29), (22, 23, 29))):
        whole = torch.ones_like(ids) if mask is None else mask
        position = (whole.cumsum(-1) - 1).clamp_min(0)
        found = []
        for blocks in (LeanLlama(model), HuggingFaceBlocks(model)):
            runner = Runner(blocks, hf.config, mask, position, Counts())
            with torch.no_grad():
                for length in lengths:
                    states = runner.feed(ids[:, :length])
                    for block in range(1, 4):
                        states = runner.up(block)
                found.append((states, *runner.cache.held(2)))
        for one, other in zip(*found, strict=True):
            assert torch.allclose(one[1], other[1], rtol=1e-4, atol=1e-5)
            assert torch.allclose(one[0, ..., -3:, :], other[0, ..., -3:, :], rtol=1e-4, atol=1e-5)
    states = torch.randn(1, 3, 32)
    for rows in (states, states[:, :1], torch.randn(2, 20, 32)):
        assert torch.allclose(
            with_lean_head(model).logits(rows), model.logits(rows), rtol=1e-4, atol=1e-5
        )


def test_what_is_not_a_plain_llama_is_run_by_hugging_face():
    for family, variant in (("llama", "biased"), ("mistral", ""), ("gpt2", "")):
        model = lj.Model.wrap(tiny_model(family, variant, dtype=torch.float32))
        assert isinstance(blocks_of(model), HuggingFaceBlocks)
    assert isinstance(blocks_of(lj.Model.wrap(tiny_model("llama"))), HuggingFaceBlocks)
    hooked = lj.Model.wrap(tiny_model("llama", dtype=torch.float32))
    handle = hooked.anatomy.blocks[1].mlp.register_forward_hook(lambda *_: None)
    assert isinstance(blocks_of(hooked), HuggingFaceBlocks)
    handle.remove()
    assert isinstance(blocks_of(hooked), LeanLlama)


def test_a_changed_head_is_noticed():
    model = lj.Model.wrap(tiny_model("llama", dtype=torch.float32))
    state = torch.randn(1, 32)
    before = with_lean_head(model).logits(state)
    with torch.no_grad():
        model.anatomy.head.weight.mul_(2)
    assert torch.allclose(with_lean_head(model).logits(state), 2 * before, rtol=1e-5)


def test_what_cannot_be_done_is_one_line(model, jumps):
    cases = [
        ({"num_beams": 2}, "num_beams is 2"),
        ({"output_scores": True, "return_dict_in_generate": True}, "ask for the tokens alone"),
        ({"exit": "fixed:4"}, "levels 0 to 3"),
        ({"exit": "sometimes"}, "give never"),
        ({"cache": "none"}, "exact, jump, copy"),
        ({"unverified": 0}, "1 or more"),
        ({"use_cache": False}, "use_cache is off"),
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
    with pytest.raises(ValueError, match="max_new_tokens"):  # Hugging Face's own
        lj.generate(model, jumps, PROMPT, max_new_tokens=0)
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
