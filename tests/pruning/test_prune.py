"""Pruning of trained models: the better stand-in has the lower loss, and what makes no sense is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import fitted_gpt2
from helpers.story_text import numbers
from helpers.tiny_models import tiny_model, wrapped

import layerjump as lj
from layerjump.data.batches import batch_from_ids, make_batches
from layerjump.data.corpus import Corpus
from layerjump.data.positions import Positions
from layerjump.errors import BadPruning, LayerjumpError, TextTooShort
from layerjump.metrics.token_loss import token_losses
from layerjump.models.activations import capture_states
from layerjump.models.model import Model
from layerjump.pruning import select
from layerjump.pruning.edit_model import without_blocks
from layerjump.pruning.prune import drop_and_replace, prepare_calibration
from layerjump.pruning.select import (
    blocks_in_spans,
    contiguous_spans,
    find_sink_blocks,
    parse_drop_count,
)

gpt2 = fitted_gpt2.model  # a fixture

EVERY = Positions("all", skip_first=0, special=True)


@pytest.fixture(scope="module")
def trained(real_folder) -> tuple[Model, Corpus]:
    stories = real_folder("stories15M").parents[1] / "text/tinystories/tinystories_train_sample.txt"
    return lj.load(real_folder("stories15M")), lj.load_text(stories, limit=60)


def test_on_a_trained_model_each_method_beats_the_one_before(trained):
    """On one cut; the order of the papers, and ours behind them."""
    model, text = trained
    calibration = prepare_calibration(model, text, tokens=4_000, split="80/5/15", seed=0)
    before = token_losses(model, calibration.test).mean
    found = {
        method: token_losses(
            drop_and_replace(model, [(2, 3)], method, calibration).model, calibration.test
        ).mean
        for method in ("remove", "replaceme", "fold", "rotation", "linear")
    }
    assert before < found["rotation"] < found["fold"] < found["replaceme"] < found["remove"]
    assert found["linear"] < found["replaceme"]


def test_by_loss_one_run_competes_with_blocks_found_greedily(trained):
    """Each with its own stand-ins, on select documents; here the two ways choose different blocks."""
    model, text = trained
    given = {"tokens": 4_000, "split": "80/5/15", "seed": 0}
    calibration = prepare_calibration(model, text, **given)
    ends = select.BlockSelector(model, calibration.fit, calibration.validation, (1, 6))
    one = replace(ends, contiguous=True)
    both = [tuple(contiguous_spans(way.select("loss", 2))) for way in (ends, one)]
    assert len(set(both)) == 2
    cost = {}
    for cuts in both:
        cost[cuts] = token_losses(
            drop_and_replace(model, cuts, "fold", calibration).model, calibration.validation
        ).mean
    found = lj.prune(model, text, drop=2, method="fold", protect=[1, 6], **given)
    assert found.spans == min(cost, key=cost.__getitem__)
    alone = lj.prune(model, text, drop=2, method="fold", protect=[1, 6], contiguous=True, **given)
    assert alone.spans == both[1]


def test_a_later_cut_is_fitted_on_the_pruned_models_states(trained):
    """Two cuts: the second one's source is what the first one leaves."""
    model, text = trained
    calibration = prepare_calibration(model, text, tokens=4_000, split="80/5/15", seed=0)
    made = drop_and_replace(model, [(1, 2), (3, 4)], "rotation", calibration)
    assert [transform.level for transform in made.transforms] == [1, 2]
    (batch,) = [calibration.test[0]]
    (ours,) = capture_states(made.model, [batch], [2])
    (theirs,) = capture_states(model, [batch], [4])
    transform = made.transforms[-1]
    wanted = transform.scale * theirs[4] @ transform.rotation.float().T
    error = (ours[2] - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(error.median()) < 0.6


@pytest.mark.parametrize("choice", select.CRITERIA)
def test_every_choice_keeps_the_ends(gpt2, study_text, choice):
    pruned = lj.prune(gpt2, study_text, drop=2, criterion=choice, method="remove", tokens=3_000)
    assert len(pruned.dropped) == 2
    assert not {1, gpt2.n_blocks} & set(pruned.dropped)
    assert pruned.model.n_blocks == 2
    assert pruned.loss.loss_after > 0


def test_by_loss_the_first_choice_is_the_least_loss(gpt2, study_text):
    calibration = prepare_calibration(gpt2, study_text, tokens=4_000, split="80/10/10", seed=0)
    given = select.BlockSelector(
        gpt2, calibration.fit, calibration.validation, [1, 4], use_maps=False
    )
    (best,) = given.select("loss", 1)
    found = {
        b: token_losses(without_blocks(gpt2, [b]), calibration.validation).mean for b in (2, 3)
    }
    assert best == min(found, key=found.get)
    trial = select.SpanTrials(given, 1)
    for block, loss in found.items():
        assert trial.loss(contiguous_spans([block])) == pytest.approx(loss, abs=1e-4)


def test_losses_are_hugging_faces_own(gpt2, study_text):
    text = Corpus("one", study_text.documents[:1], "")
    batch = make_batches(text, gpt2.tokenization, EVERY, max_length=40)[0]
    found = token_losses(gpt2, [batch])
    row = batch.input_ids[:1, : int(batch.attention_mask[0].sum())]
    alone = token_losses(gpt2, [batch_from_ids(row[0].tolist())])
    with torch.no_grad():
        theirs = gpt2.hf(row, labels=row).loss
    assert alone.mean == pytest.approx(float(theirs), abs=1e-5)
    assert found.over(found)[0] == 1


def test_max_loss_is_kept(gpt2, study_text):
    pruned = lj.prune(gpt2, study_text, max_loss=1.2, criterion="deepest", tokens=4_000)
    calibration = prepare_calibration(gpt2, study_text, tokens=4_000, split="80/10/10", seed=0)
    limit = 1.2 * token_losses(gpt2, calibration.validation).mean
    assert token_losses(pruned.model, calibration.validation).mean <= limit


def test_a_block_that_forms_a_sink_is_found():
    """Block 2 of this model writes a huge state at the first position alone."""
    model = wrapped(tiny_model("gpt2"), words=True)
    text = make_batches(numbers(60), model.tokenization, EVERY)

    def swell(module, args, output):
        output = output.clone()
        output[:, 0] *= 20
        return output

    assert find_sink_blocks(model, text) == []
    handle = model.structure.blocks[1].register_forward_hook(swell)
    try:
        assert find_sink_blocks(model, text) == [2]
    finally:
        handle.remove()


def test_runs_and_blocks():
    assert contiguous_spans([5, 3, 4, 9]) == [(2, 5), (8, 9)]
    assert blocks_in_spans([(2, 5), (8, 9)]) == (3, 4, 5, 9)
    assert [parse_drop_count(given, 30) for given in (8, "8", "25%", "10%")] == [8, 8, 8, 3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drop": 4}, "leaves none"),
        ({"drop": "100%"}, "leaves none"),
        ({"drop": "150%"}, "leaves none"),
        ({"drop": -1}, "less than one"),
        ({"drop": "-25%"}, "less than one"),
        ({"drop": "some"}, "a number of blocks"),
        ({"drop": 3}, "only 2 may go"),
        ({"drop": 1, "method": "magic"}, "to be one of"),
        ({"drop": 1, "criterion": "taste"}, "to be one of"),
        ({"drop": 1, "method": "rotation"}, "use fold"),
        ({"drop": 1, "protect": [7]}, "blocks 1 to 4"),
        ({"drop": 1, "max_loss": 1.1}, "either"),
        ({}, "either"),
        ({"max_loss": 0.9}, "more than 1"),
        (
            {"drop": 1, "criterion": "deepest", "protect": [2, 3, 4], "method": "fold"},
            "first block",
        ),
    ],
)
def test_senseless_requests_are_refused(gpt2, study_text, settings, message):
    with pytest.raises(BadPruning, match=message):
        lj.prune(gpt2, study_text, tokens=3_000, **settings)


def test_a_text_too_short_for_the_width_is_refused(gpt2):
    few = Corpus("few", ("one two three",) * 4, "")
    with pytest.raises(TextTooShort, match="positions to fit maps of width"):
        lj.prune(gpt2, few, drop=1, method="fold", criterion="deepest", split="2/1/1")


def test_families_that_cannot_fold_say_why(data_folder, study_text):
    bert = lj.load(data_folder / "tiny-bert")
    with pytest.raises(BadPruning, match="use linear or remove"):
        lj.prune(bert, study_text, drop=1, method="fold", tokens=2_000)
    pruned = lj.prune(bert, study_text, drop=1, criterion="influence", tokens=2_000)
    assert pruned.method == "remove"
    gemma = wrapped(tiny_model("gemma2"), words=True)
    with pytest.raises(LayerjumpError, match="a norm follows"):
        lj.prune(gemma, numbers(60), drop=1, method="fold")
