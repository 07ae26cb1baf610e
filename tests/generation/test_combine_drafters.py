"""Drafters: what they propose, when a combination asks and stops, and that drafts never change the text."""

from __future__ import annotations

import time

import pytest
import torch
from helpers import fitted_gpt2, greedy_generation
from helpers.greedy_generation import GREEDY, PROMPT, theirs, unpadded
from helpers.tiny_models import tiny_model
from transformers import MaxLengthCriteria, StoppingCriteriaList, StopStringCriteria

import layerjump as lj
from layerjump.errors import BadExit
from layerjump.generation.block_runner import BlockRunner, prompt_positions
from layerjump.generation.combine_drafters import FREE, Acceptance, DraftConfig, Drafting, StepCosts, expected_progress
from layerjump.generation.decoding_loop import Decoder, Sequences
from layerjump.generation.drafters import DraftContext, HeadJump, Lookup, Proposal, Recycled
from layerjump.generation.exit_rules import ExitConfig, Never
from layerjump.generation.packed_llama import choose_blocks
from layerjump.jumps.maps import Affine, to_module
from layerjump.models.sites import FINAL

model, jumps = fitted_gpt2.model, greedy_generation.jumps  # fixtures


def context(*tokens: int, drafts: int = 0) -> DraftContext:
    return DraftContext([list(tokens)], [len(tokens) - drafts])


def test_lookup_proposes_what_followed_the_longest_match():
    drafter = Lookup()
    assert drafter.propose(context(1, 2, 3), [0]) == {}
    # 2 was last followed by 9, but 1 2 by 3.
    assert drafter.propose(context(1, 2, 3, 4, 2, 9, 1, 2), [0])[0] == Proposal(3, 1)
    # Drafts extend the match.
    assert drafter.propose(context(1, 2, 3, 4, 2, 9, 1, 2, 3, drafts=1), [0])[0] == Proposal(4, 2)


def test_recycled_proposes_the_models_own_predictions():
    drafter = Recycled(torch.tensor([-1, 4, -1, 2, -1]))
    assert drafter.propose(context(0), [0]) == {}
    assert drafter.propose(context(1), [0])[0].token == 4
    drafter.observe([2, 1, 3], [0, 1])  # after 1 the model predicted 0, after 3 it predicted 1
    assert drafter.propose(context(2, 1), [0])[0] == Proposal(0, 2)
    assert drafter.propose(context(4, 3), [0])[0] == Proposal(1, 1)


class Constant:
    """Proposes one token, with one kind of evidence, and counts its calls."""

    def __init__(self, name: str, token: int, seconds: float = 0.0) -> None:
        self.name, self.token, self.seconds, self.calls, self.sites = name, token, seconds, 0, frozenset()

    def propose(self, context, rows):
        self.calls += 1
        time.sleep(self.seconds)
        return {row: Proposal(self.token, 0) for row in rows}


def n_drafted(drafting: Drafting, truth: int) -> int:
    """Draft as many columns as pay, then learn that all right answers were `truth`."""
    drafting.begin_step()
    chance, columns, tokens = 1.0, 0, []
    while columns < drafting.max_tokens:
        choices = drafting.choose(context(7), columns, {0: chance}, columns + 1)
        if not choices:
            break
        tokens.append(choices[0].proposal.token)
        chance, columns = choices[0].chance, columns + 1
    right = next((i for i, token in enumerate(tokens) if token != truth), columns)
    drafting.learn([[truth] * 9], [0], [right + 1], [])
    return columns


def test_drafts_grow_where_they_are_right_and_cease_where_not():
    costs = StepCosts(((1, 1.0), (8, 1.7)))
    right = Drafting([Constant("a", 5)], costs, max_tokens=8, priors={"a": {0: 0.3}})
    lengths = [n_drafted(right, truth=5) for _ in range(20)]
    assert lengths[0] in (1, 2)
    assert lengths[-1] == 8
    wrong = Drafting([Constant("a", 5)], costs, max_tokens=8, priors={"a": {0: 0.3}})
    lengths = [n_drafted(wrong, truth=4) for _ in range(40)]
    assert lengths[0] >= 1
    assert sum(lengths[-20:]) == 0
    # The text changes: proposals that were not drafted still count.
    assert max(n_drafted(wrong, truth=5) for _ in range(40)) >= 4


def test_a_dear_drafter_is_asked_only_where_it_pays():
    cheap, dear = Constant("cheap", 5), Constant("dear", 6, seconds=0.004)
    costs = StepCosts(((1, 0.02), (8, 0.034)))
    drafting = Drafting([cheap, dear], costs, max_tokens=1, priors={"cheap": {0: 0.9}, "dear": {0: 0.3, -1: 0.3}})
    for _ in range(33):
        n_drafted(drafting, truth=5)
    assert cheap.calls == 33
    assert 2 <= dear.calls <= 4


def test_acceptance_is_a_running_share():
    acceptance = Acceptance({"a": {1: 0.5}})
    assert acceptance.estimate("a", 1) == 0.5
    for _ in range(60):
        acceptance.record("a", 1, True)
    assert acceptance.estimate("a", 1) > 0.9
    for _ in range(60):
        acceptance.record("a", 1, False)
    assert acceptance.estimate("a", 1) < 0.05


def test_progress_of_a_batch_waits_for_its_slowest_row():
    assert expected_progress([0.4]) == 0.4
    # The mean of the larger of two geometric waiting times with p = 1/2 is 8/3.
    assert expected_progress([0.5, 0.5]) == pytest.approx(3 / 8, rel=1e-2)
    assert expected_progress([0.3] * 8) < 0.2


def test_a_batch_gets_no_drafts_where_they_would_slow_it_down():
    drafting = Drafting([Constant("a", 5)], StepCosts(((1, 1.0), (2, 1.3))), max_tokens=2, priors={"a": {0: 0.4}})
    drafting.begin_step()
    eight = DraftContext([[7]] * 8, [1] * 8)
    assert drafting.choose(eight, 0, dict.fromkeys(range(8), 1.0), 1) == {}
    assert len(drafting.choose(eight, 0, {0: 1.0}, 1)) == 1


@pytest.mark.parametrize("drafts", ["lookup", "recycled,lookup", ["exit", "lookup"]])
def test_drafted_text_is_the_models(model, jumps, drafts):
    prompts = [PROMPT, "The dog", "Tom and Mia saw a big dog. Tom and Mia saw a big"]
    wanted = unpadded(theirs(model, prompts), model.hf.generation_config.eos_token_id)
    for some in (slice(0, 1), slice(2, 3), slice(0, 3)):
        made = lj.generate(model, jumps, prompts[some], exit="gap:0.4", verify=True, drafts=drafts, **GREEDY)
        assert made.ids == wanted[some]


@pytest.fixture(scope="module")
def draft_jumps(model, study_text):
    """A draft head of two depths, one of which reads a level, and a splice."""
    pairs = "final@-1+3@-1+embedding:final,final@-2+3@-2+embedding@-1+embedding:final,1+3@-1:3"
    return lj.fit(model, study_text, tokens=8_000, estimator="ridge", pairs=pairs)


@pytest.mark.parametrize("drafts", ["head", "splice", "lookup,recycled,head,splice"])
def test_text_drafted_by_jumps_is_the_models(model, draft_jumps, drafts):
    prompts = [PROMPT, "The dog", "Tom and Mia saw a big dog. Tom and Mia saw a big"]
    wanted = unpadded(theirs(model, prompts), model.hf.generation_config.eos_token_id)
    config = free(*drafts.split(","))
    for some in (slice(0, 1), slice(2, 3), slice(0, 3)):
        made = lj.generate(model, draft_jumps, prompts[some], verify=True, drafts=config, **GREEDY)
        assert made.ids == wanted[some]
        assert made.counts.accepted > 0 or (drafts == "splice" and len(made.ids) > 1)  # which drafts for one row


def test_a_chained_head_drafts_beyond_its_depth(model, study_text):
    jumps = lj.fit(model, study_text, tokens=8_000, estimator="ridge", sources="final@-1+embedding", target="final")
    made = lj.generate(model, jumps, PROMPT, verify=True, drafts=free("head"), **GREEDY)
    assert len(made.counts.drafters["head"].drafted) > 1
    assert made.ids == unpadded(theirs(model, [PROMPT]), model.hf.generation_config.eos_token_id)


def test_the_cache_after_rejected_drafts_is_that_of_a_full_pass(model, draft_jumps):
    """With a drafter that is nearly always wrong, a splice, and a head: keys and values are those of the tokens."""
    ids = model.tokenization.generation_inputs([PROMPT])["input_ids"]
    for drafter in ("splice", "head", "constant"):
        runner = BlockRunner(model, choose_blocks(model), None, prompt_positions(model, ids, None))
        at_length = MaxLengthCriteria(ids.shape[1] + 20)
        sequences = Sequences(ids, StoppingCriteriaList([at_length]), pad=0, eos_tokens=frozenset(), streamer=None)
        decoder = Decoder(model, draft_jumps, ExitConfig(Never()), runner, sequences, [], do_sample=False)
        if drafter == "constant":
            drafters = [Constant("constant", 5)]
        else:
            drafters = free(drafter).make_drafters(model, draft_jumps, runner)
        with torch.no_grad():
            decoder.decode_verified(Drafting(drafters, FREE, max_tokens=4), ids.shape[1] + 20)
            assert decoder.counts.rollbacks > 0
            fresh = BlockRunner(model, choose_blocks(model), None, prompt_positions(model, ids, None))
            fresh.extend(sequences.ids[:, : runner.length])
            fresh.run_all()
        for layer, expected in zip(runner.cache.layers, fresh.cache.layers, strict=True):
            for ours, full in zip(layer.read(), expected.read(), strict=True):
                assert ours.shape == full.shape
                assert torch.allclose(ours, full, atol=1e-4)


def test_text_that_repeats_takes_fewer_steps(model):
    made = lj.generate(model, None, PROMPT, verify=True, drafts=free("lookup"), min_new_tokens=80, max_new_tokens=80)
    assert made.counts.steps < 80
    accepted = sum(name == "lookup" for name in made.drafters[0])
    assert accepted == made.counts.accepted == sum(made.counts.drafters["lookup"].accepted) > 0
    assert made.counts.steps + accepted == 80


def free(*names, **settings) -> DraftConfig:
    return DraftConfig(names, costs=FREE, **settings)


class Listener:
    def __init__(self):
        self.got, self.drafters, self.rejected = [], [], []

    def put_drafters(self, drafters):
        self.drafters.append(drafters[0])

    def put_rejected(self, rejected):
        self.rejected.append(rejected[0])

    def put(self, ids):
        self.got.append(ids)

    def end(self):
        self.got.append(None)


def test_stop_strings_and_streamers_see_verified_tokens_alone(model, jumps):
    listener = Listener()
    stop = StopStringCriteria(model.tokenizer, ["big", "dog", "day"])
    settings = {"stopping_criteria": [stop], "max_new_tokens": 60, "do_sample": False}
    prompt = "Tom saw a big dog. Tom saw a"
    inputs = model.tokenization.generation_inputs([prompt])
    wanted = model.hf.generate(**inputs, pad_token_id=model.tokenization.pad, **settings)[0].tolist()
    drafts = free("lookup", "recycled")
    made = lj.generate(model, jumps, prompt, verify=True, drafts=drafts, streamer=listener, **settings)
    _, *tokens, end = listener.got
    assert end is None
    assert [int(token) for token in tokens] == made.ids[0] == wanted[inputs["input_ids"].shape[1] :]
    assert listener.drafters == made.drafters[0]


def test_streamers_may_receive_rejected_drafts(model):
    listener = Listener()
    made = lj.generate(model, None, PROMPT, verify=True, drafts=free("lookup"), streamer=listener, **GREEDY)
    n_rejected = sum(draft is not None for draft in listener.rejected)
    assert n_rejected == made.counts.drafts - made.counts.accepted > 0
    for token, drafter, draft in zip(made.ids[0], made.drafters[0], listener.rejected, strict=True):
        assert draft is None or (draft.token != token and draft.drafter == "lookup" and drafter is None)


@pytest.mark.parametrize("drafter", ["lookup", "recycled", "head"])
def test_sampling_with_drafts_follows_the_full_models_distribution(drafter):
    """A chi-square test of pairs of sampled tokens against their exact probabilities."""
    hf = tiny_model("gpt2", vocab_size=7, eos_token_id=None, bos_token_id=None, pad_token_id=None)
    model = lj.Model.wrap(hf)
    rows, prompt = 2_500, torch.tensor([[3, 1, 3, 1]])
    width = hf.config.hidden_size
    head = to_module(Affine.of(torch.randn(width, 2 * width, generator=torch.Generator().manual_seed(0))))
    config = free(drafter, head=(HeadJump(head, (FINAL,), 1),), candidates=torch.tensor([1, 2, 3, 4, 5, 6, 0]))
    torch.manual_seed(0)
    made = lj.generate(
        model,
        None,
        {"input_ids": prompt.expand(rows, -1), "attention_mask": torch.ones(rows, 4).long()},
        verify=True,
        drafts=config,
        max_new_tokens=3,
        do_sample=True,
        temperature=3.0,
        top_k=0,
    )
    assert 0 < made.agreement < 0.98
    with torch.no_grad():
        first = (hf(prompt).logits[0, -1] / 3).softmax(-1)
        longer = torch.cat([prompt.expand(7, -1), torch.arange(7)[:, None]], 1)
        second = (hf(longer).logits[:, -1] / 3).softmax(-1)
    wanted = (first[:, None] * second).reshape(-1) * rows
    found = torch.zeros(49).index_add(0, torch.tensor([7 * a + b for a, b, _ in made.ids]), torch.ones(rows))
    enough = wanted > 5
    # 99.9 % of a chi-square of 48 is 84.
    assert int(enough.sum()) > 20
    assert float(((found - wanted)[enough] ** 2 / wanted[enough]).sum()) < 84


def test_bad_drafts_are_refused_in_one_line(model, jumps):
    cases = [
        ({"drafts": "guess"}, "one or more of lookup, recycled"),
        ({"drafts": ""}, "one or more of"),
        ({"drafts": "head"}, "needs a jump final@-1"),
        ({"drafts": "splice"}, "needs a jump from an early and a late level"),
        ({"drafts": "splice,exit", "exit": "gap:0.5"}, "splice or exit, got both"),
        ({"drafts": "exit"}, "needs an exit rule"),
        ({"drafts": "lookup", "max_draft_tokens": 0}, "1 or more"),
        ({"drafts": "lookup", "verify": False}, "drafts need verify"),
    ]
    for settings, message in cases:
        with pytest.raises(BadExit, match=message) as refused:
            lj.generate(model, jumps, PROMPT, **{"verify": True, "max_new_tokens": 3} | settings)
        assert "\n" not in str(refused.value)
