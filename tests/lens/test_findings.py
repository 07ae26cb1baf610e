"""Findings of a prompt: every sentence is checked against the numbers of the trajectory, by hand."""

import json
import re

import pytest
import torch
from helpers.cli import run

import layerjump as lj

TEXTS = [
    "Once upon a time, there was a little girl named",
    "Tom and Lily went to the park. They saw a big",
    'The dog said, "I am',
    "One day, a boy found a ball. He was very",
]
CELL = re.compile(r"position (\d+) \((.*?)\)(?=[ ,.])")


@pytest.fixture(scope="module")
def lenses(data_folder):
    model = lj.load(data_folder / "tiny-gpt2")
    jumps = lj.fit(model, lj.load_text("pydoc", limit=150))
    return [lj.Lens(model), lj.Lens(model, jumps)]


@pytest.fixture(scope="module")
def trajectories(lenses):
    return [trajectory for lens in lenses for trajectory in lens(TEXTS)]


def findings(trajectories, kind):
    pairs = [(t, finding) for t in trajectories for finding in t.findings() if finding.kind == kind]
    assert pairs, f"no prompt has a finding of kind {kind}"
    return pairs


def top_texts(trajectory, row):
    """The top token at each level of one position."""
    return trajectory.decode(trajectory.top[:, row, 0].tolist())


def test_every_prompt_says_where_its_answer_is_decided(trajectories):
    pairs = findings(trajectories, "decided")
    assert len(pairs) == len(trajectories)
    for trajectory, finding in pairs:
        answer, tops = trajectory.decode([int(trajectory.model_top[-1])])[0], top_texts(trajectory, -1)
        level = int(finding.level)
        assert finding.position == len(trajectory.prompt.ids) - 1
        assert set(tops[level:]) == {answer}
        assert level == 0 or tops[level - 1] != answer
        assert f"The answer {answer!r}" in finding.sentence
        if level == 0:
            assert "from level 0 on" in finding.sentence
        elif level == 4:
            assert "only at the last level" in finding.sentence
            assert ("go back" in finding.sentence) == (answer in tops[:4])
        else:
            assert f"at level {level} of 4" in finding.sentence


def test_growth_is_the_largest_step_of_the_answers_probability(trajectories):
    for trajectory, finding in findings(trajectories, "growth"):
        answer = int(trajectory.model_top[-1])
        p = [float(trajectory.distribution(level)[answer]) for level in range(5)]
        steps = [after - before for before, after in zip(p, p[1:], strict=False)]
        level = int(finding.level)
        assert steps[level - 1] == pytest.approx(max(steps), abs=1e-5)
        assert max(steps) >= 0.1
        assert finding.sentence.endswith(
            f"from level {level - 1} to level {level}: from {p[level - 1]:.2f} to {p[level]:.2f}."
        )


def test_a_dropped_token_leads_where_it_is_said_to(trajectories):
    for trajectory, finding in findings(trajectories, "dropped"):
        tops = top_texts(trajectory, finding.position)
        token, start, end, peak = re.search(
            r", (.*) leads at levels (\d) to (\d) with a probability of up to (.*) and is", finding.sentence
        ).groups()
        start, end = int(start), int(end)
        assert {repr(text) for text in tops[start : end + 1]} == {token}
        assert repr(tops[end + 1]) != token
        assert repr(tops[-1]) != token
        assert finding.sentence.endswith(f"the model says {tops[-1]!r}.")
        highest = max(float(trajectory.distribution(level, finding.position).max()) for level in range(start, end + 1))
        assert peak == f"{highest:.2f}"


def test_undecided_positions_change_at_the_last_level(trajectories):
    for trajectory, finding in findings(trajectories, "undecided"):
        first = trajectory.first_fitted_position
        late = [p for p in trajectory.positions[first:] if len(set(top_texts(trajectory, p)[-2:])) == 2]
        assert finding.sentence.startswith(f"{len(late)} of {len(trajectory.positions) - first} positions")
        named = [(int(position), text) for position, text in CELL.findall(finding.sentence)]
        assert named == [(p, repr(trajectory.tokens[p])) for p in late[:4]]
        assert ("more" in finding.sentence) == (len(late) > 4)


def test_the_earliest_is_decided_before_all_others(trajectories):
    for trajectory, finding in findings(trajectories, "early"):
        settled = trajectory.settled_level[trajectory.first_fitted_position : -1]
        assert int(finding.level) == int(settled.min())
        assert set(top_texts(trajectory, finding.position)[int(finding.level) :]) == {
            top_texts(trajectory, finding.position)[-1]
        }
        same = int((settled == settled.min()).sum()) - 1
        assert (f"{same} other position" in finding.sentence) == (same > 0)


def test_an_unsure_model(trajectories):
    for trajectory, finding in findings(trajectories, "unsure"):
        best = trajectory.distribution(4).topk(2)
        assert best.values[0] < 0.3
        first, second = trajectory.decode(best.indices.tolist())
        p, q = best.values.tolist()
        assert finding.sentence.endswith(f"{first!r} has a probability of {p:.2f}, {second!r} of {q:.2f}.")


def test_a_long_state_at_position_0(lenses):
    """The state is made longer by hand at one level; without that there is none of the kind."""
    lens = lenses[0]
    assert "sink" not in {finding.kind for finding in lens(TEXTS[0]).findings()}
    hook = lens.model.hf.transformer.h[1].register_forward_hook(
        lambda module, args, output: torch.cat([output[:, :1] * 200, output[:, 1:]], 1)
    )
    try:
        trajectory = lens(TEXTS[0])
    finally:
        hook.remove()
    (finding,) = [finding for finding in trajectory.findings() if finding.kind == "sink"]
    norms = torch.stack([states.norm(dim=-1) for states in trajectory.states.states])
    ratios = norms[:, 0] / norms[:, 1:].median(1).values
    assert int(finding.level) == int(ratios.argmax())
    assert f"is {float(ratios.max()):.0f} times as long" in finding.sentence


def test_part_of_a_trajectory_has_findings_too(lenses, data_folder):
    assert lenses[0](TEXTS[0], levels=[2]).findings() is not None
    kinds = {finding.kind for finding in lenses[0]("Once", k=1).findings()}
    assert kinds <= {"decided", "growth", "dropped"}
    bert = lj.load(data_folder / "tiny-bert")
    (finding, *_) = lj.Lens(bert)(f"The dog {bert.tokenizer.mask_token} home.").findings()
    assert finding.kind == "decided"


def test_the_command_prints_them(lenses, data_folder):
    command = ("lens", str(data_folder / "tiny-gpt2"), TEXTS[0], "--lenses", "identity")
    expected = lenses[0](TEXTS[0]).findings()
    printed = " ".join(run(*command).stdout.split())
    assert all(" ".join(f"• {finding.sentence}".split()) in printed for finding in expected)
    (saved,) = json.loads(run(*command, "--json").stdout)
    assert [finding["sentence"] for finding in saved["findings"]] == [finding.sentence for finding in expected]
