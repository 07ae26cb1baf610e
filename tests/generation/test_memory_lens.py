"""A lens with memory: levels read together with the final state of the position before, in every use of exit rules."""

from __future__ import annotations

import pytest
import torch
from helpers import fitted_gpt2
from helpers.greedy_generation import GREEDY, PROMPT, theirs, unpadded
from helpers.story_text import stories

import layerjump as lj
from layerjump.data.batches import make_batches
from layerjump.data.positions import Positions
from layerjump.errors import BadEstimator, BadJumps
from layerjump.generation.calibration.dataset import build_calibration_set
from layerjump.lens.evaluate import evaluate_lenses
from layerjump.studies import early_exit, examples
from layerjump.studies.setup import Setup, make_settings

model = fitted_gpt2.model  # fixture


@pytest.fixture(scope="module")
def memory(model):
    return lj.fit(model, stories(300), estimator="ridge", tokens=8_000, pairs="to-final+final@-1")


@torch.no_grad()
def logits_by_hand(model, jumps, text, level, more=()):
    """Of every position but the first, from one plain pass over a text and more tokens."""
    ids = torch.tensor([[*model.tokenization.wrap(model.tokenization.encode([text])[0]), *more]])
    output = model.hf(ids, output_hidden_states=True)
    final = output.hidden_states[-1][0]  # of a GPT-2, after the final norm
    joined = torch.cat([output.hidden_states[level][0, 1:], final[:-1]], -1)
    return model.structure.decode(jumps[f"{level}+final@-1", "final"](joined))


def test_a_trajectory_reads_the_position_before(model, memory):
    trajectory = lj.Lens(model, memory)(PROMPT)
    assert trajectory.levels == ("0", "1", "2", "3", "4")
    for level in (1, 3):
        expected = logits_by_hand(model, memory, PROMPT, level)
        assert torch.equal(trajectory.top[level, 1:, 0], expected.argmax(-1))
        assert torch.allclose(trajectory.distribution(level, -1), expected[-1].softmax(-1), atol=1e-5)


def test_a_replay_and_a_calibration_set_read_it_too(model, memory):
    text = stories(30, seed=3)
    batches = list(make_batches(text, model.tokenization, Positions("sample", 4), seed=0))
    scores = evaluate_lenses(model, {"identity": lj.Lens(model), "memory": lj.Lens(model, memory)}, batches)
    examples_read = build_calibration_set(model, memory, batches, (1, 2))
    assert torch.equal(examples_read.correct, scores.hits(1)[1, 1:3])
    for index, (document, position) in enumerate(zip(scores.document.tolist(), scores.position.tolist(), strict=True)):
        if index % 10 == 0:
            expected = logits_by_hand(model, memory, text.documents[document], 2)[position - 1]
            assert int(scores.top[1, 2, index]) == int(expected.argmax())


def test_memory_helps_early_levels(model, memory):
    plain = lj.fit(model, stories(300), estimator="ridge", tokens=8_000, pairs="to-final")
    batches = list(make_batches(stories(60, seed=3), model.tokenization, Positions("sample", 8), seed=0))
    scores = evaluate_lenses(model, {"plain": lj.Lens(model, plain), "memory": lj.Lens(model, memory)}, batches)
    without, with_memory = scores.kl[:, 1].mean(-1).tolist()
    assert with_memory < without


def test_a_token_exits_as_the_lens_predicts(model, memory):
    """The second token: the first is the full model's, because nothing precedes the pass that reads the prompt."""
    first = theirs(model, [PROMPT], max_new_tokens=1)[0].tolist()
    for level in (1, 2):
        expected = int(logits_by_hand(model, memory, PROMPT, level, first)[-1].argmax())
        made = lj.generate(model, memory, PROMPT, exit=f"fixed:{level}", max_new_tokens=2, do_sample=False)
        assert made.ids == [[*first, expected]]
        assert made.exit_levels == [[model.n_blocks, level]]
    alone = lj.generate(model, memory, PROMPT, exit="gap:0.3", **GREEDY)
    assert alone.blocks_saved > 0
    together = lj.generate(model, memory, [PROMPT, PROMPT], exit="gap:0.3", **GREEDY)
    assert together.ids == [alone.ids[0]] * 2


def test_verified_text_is_the_models(model, memory):
    prompts = [PROMPT, "The dog", "Once"]
    wanted = unpadded(theirs(model, prompts), model.hf.generation_config.eos_token_id)
    for some in (slice(0, 1), slice(0, 3)):
        made = lj.generate(model, memory, prompts[some], exit="gap:0.1", verify=True, **GREEDY)
        assert made.ids == wanted[some]
    assert lj.generate(model, memory, PROMPT, exit="gap:0.1", verify=True, **GREEDY).counts.accepted > 0


def test_a_study_compares_lenses_with_and_without_memory(model):
    settings = make_settings(tokens=6_000, estimators=("mat", "ridge+final@-1"), n_test_positions=60)
    setup = Setup(model, stories(200), settings)
    saved = early_exit.run(setup).headline.blocks_saved
    assert {"dynamic_identity_at_0.95", "dynamic_mat_at_0.95", "dynamic_ridge+final@-1_at_0.95"} <= saved.keys()
    assert {"identity", "mat", "ridge+final@-1"} == examples.run(setup).tables.examples[0].tokens.keys()
    with pytest.raises(BadEstimator, match="put another first"):
        make_settings(estimators=("mat+final@-1",))


def test_what_cannot_read_several_states_says_so(model, memory):
    lens = lj.Lens(model, memory)
    with pytest.raises(BadJumps, match="read 2\\+final@-1 side by side"):
        lens.logits(2, torch.zeros(1, model.d_model))
    two_back = lj.fit(model, stories(100), estimator="ridge", tokens=4_000, pairs="to-final+final@-2")
    with pytest.raises(BadJumps, match="can read final@-1 besides a level"):
        lj.generate(model, two_back, PROMPT, exit="fixed:2", max_new_tokens=2)
