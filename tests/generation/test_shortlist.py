"""Early levels read with a shortlist: the same as the full vocabulary if it holds all tokens, restricted if not."""

import pytest
import torch
from helpers import fitted_gpt2
from helpers.story_text import stories

import layerjump as lj
from layerjump import io
from layerjump.data.batches import make_batches
from layerjump.data.positions import Positions
from layerjump.errors import BadArtifact, BadExit
from layerjump.evaluation.model_variants import TeacherForcedExit
from layerjump.generation.calibration import calibration_file, dataset
from layerjump.generation.calibration.calibrate import calibrate
from layerjump.generation.calibration.dataset import build_calibration_set, build_shortlist
from layerjump.generation.calibration.measure_costs import measure_costs
from layerjump.generation.calibration.result import Costs
from layerjump.generation.calibration.rule_search import Replay
from layerjump.generation.exit_rules import ExitConfig, Fixed, MaxProb, Shortlist
from layerjump.models.model import capture_states

model, jumps = fitted_gpt2.model, fitted_gpt2.jumps  # fixtures

COSTS = Costs(block=1.0, queued_token=0.1, unembedding=1.0, probe=0.01, shortlist_unembedding=0.1)
SETTINGS = {"do_sample": False, "max_new_tokens": 20, "min_new_tokens": 20}
PROMPTS = ["One day, Tom", "The cat saw a big dog and"]


@pytest.fixture(scope="module")
def few(model):
    """The tokens of some stories, without every third."""
    ids = sorted({token for ids in model.tokenization.encode(stories(20).documents) for token in ids})
    return torch.tensor([token for index, token in enumerate(ids) if index % 3])


def test_a_shortlist_of_all_tokens_changes_nothing(model, jumps):
    everything = ExitConfig(Fixed(2), Shortlist(torch.arange(model.structure.vocab_size)))
    for verify in (False, True):
        plain = lj.generate(model, jumps, PROMPTS, exit=Fixed(2), verify=verify, **SETTINGS)
        short = lj.generate(model, jumps, PROMPTS, exit=everything, verify=verify, **SETTINGS)
        assert short.ids == plain.ids
        assert short.exit_levels == plain.exit_levels
        assert plain.counts.shortlist_unembeddings == 0
        assert short.counts.shortlist_unembeddings > 0
        assert short.counts.unembeddings + short.counts.shortlist_unembeddings == plain.counts.unembeddings


def test_an_early_exit_gives_the_top_token_of_the_shortlist(model, jumps, few):
    made = lj.generate(model, jumps, "One day, Tom", exit=ExitConfig(Fixed(2), Shortlist(few)), **SETTINGS)
    assert set(made.ids[0]) <= set(few.tolist())
    inputs = model.tokenization.generation_inputs(["One day, Tom"])["input_ids"]
    state = model.hf(inputs, output_hidden_states=True).hidden_states[2][:, -1]
    logits = lj.Lens(model, jumps).logits(2, state)[0]
    assert made.ids[0][0] == few[logits[few].argmax()]
    assert logits.argmax() not in few or made.ids[0][0] == logits.argmax()


def test_verified_text_does_not_depend_on_the_shortlist(model, jumps, few):
    rule = ExitConfig(Fixed(2), Shortlist(few))
    made = lj.generate(model, jumps, PROMPTS, exit=rule, verify=True, **SETTINGS)
    assert made.ids == lj.generate(model, None, PROMPTS, **SETTINGS).ids
    assert made.counts.drafts > made.counts.accepted > 0


def test_a_processor_may_forbid_the_whole_shortlist(model, jumps, few):
    others = [t for t in range(model.structure.vocab_size) if t not in set(few.tolist())]
    made = lj.generate(
        model,
        jumps,
        "One day, Tom",
        exit=ExitConfig(Fixed(2), Shortlist(few)),
        prefix_allowed_tokens_fn=lambda row, ids: others,
        **SETTINGS,
    )
    assert set(made.ids[0]) <= set(others)


def test_the_calibration_set_is_read_with_the_shortlist(model, jumps, few):
    text = stories(60, seed=3)
    read = {
        name: build_calibration_set(
            model, jumps, make_batches(text, model.tokenization, Positions("sample", 4)), (1, 2), among
        )
        for name, among in (
            ("full", None),
            ("all", Shortlist(torch.arange(model.structure.vocab_size))),
            ("few", Shortlist(few)),
        )
    }
    assert torch.equal(read["full"].correct, read["all"].correct)
    torch.testing.assert_close(read["full"].gap, read["all"].gap)
    assert (read["few"].gap >= read["full"].gap - 1e-5).float().mean() > 0.6
    assert read["few"].correct.sum() < read["full"].correct.sum()


def test_teacher_forced_exits_use_the_shortlist(model, jumps, few):
    """The shortlist decides the exit level; the logits there are of the full vocabulary."""
    (batch, *_) = make_batches(stories(6, seed=7), model.tokenization, Positions("all"))
    found = next(iter(capture_states(model, [batch], range(model.n_blocks + 1))))
    rule = ExitConfig(MaxProb(0.3, levels=(1, 2)), Shortlist(few))
    short = lj.Lens(rule.shortlist.restrict(model), jumps)
    lens, where = lj.Lens(model, jumps), {}
    for rows, logits in TeacherForcedExit(model, jumps, rule).read(found.at, batch.position):
        for row, each in zip(rows.tolist(), logits, strict=True):
            where[row] = each
    for row in range(len(batch.position)):
        sure = (level for level in (1, 2) if short.logits(level, found[level][row : row + 1]).softmax(-1).max() >= 0.3)
        level = next(sure, model.n_blocks)
        wanted = lens.logits(level, found[level][row : row + 1])[0]
        torch.testing.assert_close(where[row], wanted, rtol=1e-4, atol=1e-4)


def test_a_shortlist_holds_the_most_frequent_tokens(model, monkeypatch):
    text = stories(50, seed=5)
    assert build_shortlist(model, text, range(50)) is None  # the vocabulary is too small for one
    monkeypatch.setattr(dataset, "SHORTLIST_LENGTH", 40)
    found = build_shortlist(model, text, range(30)).tokens
    count = torch.zeros(model.structure.vocab_size)
    for ids in model.tokenization.encode(text.documents[:30]):
        count += torch.bincount(torch.tensor(ids), minlength=len(count))
    assert len(found) == 40
    assert found.tolist() == sorted(found.tolist())
    left_out = count.clone()
    left_out[found] = 0
    assert count[found].min() >= left_out.max()


def test_a_calibration_uses_saves_and_loads_a_shortlist(model, jumps, tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "SHORTLIST_LENGTH", 60)
    text = stories(500, seed=2, name="other")
    found = calibrate(model, jumps, text, target=0.9, costs=COSTS, draft_documents=0)
    assert found.report.shortlist_tokens == 60
    assert len(found.exit.shortlist.tokens) == 60
    path = calibration_file.save_calibration(found, tmp_path)
    again = calibration_file.load_calibration(tmp_path, model=model)
    assert torch.equal(again.exit.shortlist.tokens, found.exit.shortlist.tokens)
    for verify, name in ((False, "exit"), (True, "verified_exit")):
        texts = [
            lj.generate(model, jumps, PROMPTS, exit=getattr(each, name), verify=verify, **SETTINGS)
            for each in (found, again)
        ]
        assert texts[0].ids == texts[1].ids
    tensors, metadata = io.read_tensors(path)
    for wrong in (torch.tensor([5, 3]), torch.tensor([-1, 3]), torch.tensor([0.5, 1.0])):
        io.write_tensors(path, dict(tensors) | {"shortlist": wrong}, metadata)
        with pytest.raises(BadArtifact, match="shortlist"):
            calibration_file.load_calibration(tmp_path)


def test_a_shortlist_of_other_tokens_is_refused(model, jumps):
    wrong = ExitConfig(Fixed(1), Shortlist(torch.tensor([0, model.structure.vocab_size])))
    with pytest.raises(BadExit, match="shortlist of 2 tokens"):
        lj.generate(model, jumps, "One day", exit=wrong)


def test_shortlist_unembeddings_have_their_own_cost(model, jumps, few):
    left, heads, gates = torch.tensor([1, 4]), torch.tensor([2, 2]), torch.tensor([0, 0])
    # Two shortlist unembeddings; one of them and the full unembedding.
    tokens = [Replay(left[i : i + 1], left[i : i + 1] > 0, heads[i : i + 1], gates[i : i + 1]) for i in range(2)]
    assert [token.cost(COSTS, 4) for token in tokens] == pytest.approx([1 + 3 * 0.1 + 0.2, 4 + 1 + 0.1])
    assert measure_costs(model, jumps).shortlist_unembedding is None
    assert measure_costs(model, jumps, Shortlist(few)).shortlist_unembedding > 0
