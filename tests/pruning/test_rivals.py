"""Rival replacements of benchmarks/prune_rivals.py: their formulas, on models for which the result is known."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from helpers.story_text import stories

import layerjump as lj
from layerjump.models.model import capture_states
from layerjump.pruning.prune import prepare_calibration
from layerjump.pruning.select import blocks_in_spans

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from generative_probe import questions, score
from prune_rivals import compensated_selection, hadamard_matrix, with_compensation, with_linear_patch


@pytest.fixture(scope="module")
def gpt2(data_folder):
    model = lj.load(data_folder / "tiny-gpt2")
    return model, prepare_calibration(model, stories(100), tokens=1_500, split="60/20/20", seed=0)


@pytest.mark.parametrize("width", [8, 12, 80, 112, 288, 576])
def test_a_hadamard_matrix_is_orthogonal_with_equal_magnitudes(width):
    matrix = hadamard_matrix(width)
    assert torch.allclose(matrix @ matrix.T, torch.eye(width, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(matrix.abs(), torch.full_like(matrix, width**-0.5))


def test_both_replacements_bring_magnitudes_to_those_after_the_span(gpt2):
    model, calibration = gpt2
    matrix = hadamard_matrix(model.d_model)
    patched = with_linear_patch(model, [(1, 2)], calibration.fit)
    scaled = with_compensation(model, [(1, 2)], calibration.fit)

    def magnitudes(model, level, transform):
        rows = [states[level].double() for states in capture_states(model, calibration.fit, [level])]
        return (torch.cat(rows) @ transform).abs()

    # The map is attached after block 1, so block 2 reads its result.
    site = "2.ln1.in"
    ours, target = magnitudes(patched, site, matrix), magnitudes(model, 2, matrix)
    assert torch.allclose(ours.mean(0), target.mean(0), rtol=1e-4)
    identity = torch.eye(model.d_model, dtype=torch.float64)
    ours, target = magnitudes(scaled, site, identity), magnitudes(model, 2, identity)
    before = magnitudes(model, 1, identity)
    factor = (target.sum(-1) / before.sum(-1)).mean()
    assert torch.allclose(ours, factor * before, rtol=1e-3, atol=1e-4)


def test_the_iteration_drops_the_least_influential_block_first(gpt2):
    model, calibration = gpt2
    spans = compensated_selection(model, calibration, 2)
    assert len(blocks_in_spans(spans)) == 2
    assert 1 not in blocks_in_spans(spans)


def test_the_probes_answers_are_right_and_scored(gpt2):
    asked = questions(5)
    assert asked == questions(5)
    assert {question.kind for question in asked} == {"arithmetic", "brackets", "copying", "retrieval"}
    for question in asked:
        assert question.answer not in question.wrong
        assert len(set(question.wrong)) == 3
        if question.kind == "arithmetic":
            left, right = question.prompt.splitlines()[-1].removesuffix(" =").split(" + ")
            assert int(left) + int(right) == int(question.answer)
        if question.kind == "brackets":
            text = (question.prompt.splitlines()[-1] + question.answer).replace(" ", "")
            while (shorter := text.replace("()", "").replace("[]", "").replace("{}", "")) != text:
                text = shorter
            assert text == ""
        if question.kind == "retrieval":
            name = question.prompt.split(" So ")[1].split()[0]
            assert f"{name} has the{question.answer}." in question.prompt
    (only,) = score(gpt2[0], asked[:5]).items()
    assert only[0] == "arithmetic"
    assert 0 <= only[1].accuracy <= 1
    # The loss of the first answer, by hand.
    model, question = gpt2[0], asked[0]
    ids = model.tokenization.wrap(model.tokenization.encode([question.prompt + question.answer])[0])
    prompt = model.tokenization.wrap(model.tokenization.encode([question.prompt])[0])
    with torch.no_grad():
        log_probs = model.hf(torch.tensor([ids])).logits[0].log_softmax(-1)
    losses = [-float(log_probs[place - 1, ids[place]]) for place in range(len(prompt), len(ids))]
    assert score(model, [question])["arithmetic"].loss == pytest.approx(sum(losses) / len(losses), rel=1e-4)
