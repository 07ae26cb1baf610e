"""Pruning of trained models: a better replacement has a lower loss, and bad arguments are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import fitted_gpt2
from helpers.story_text import numbers, stories
from helpers.tiny_models import tiny_model, wrapped

import layerjump as lj
from layerjump.data.batches import batch_from_ids, make_batches
from layerjump.data.corpus import Corpus
from layerjump.data.positions import Positions
from layerjump.errors import BadPruning, LayerjumpError, TextTooShort
from layerjump.metrics.token_loss import token_losses
from layerjump.models.model import Model, capture_states
from layerjump.pruning import select
from layerjump.pruning.drop_blocks import without_blocks
from layerjump.pruning.prune import drop_and_replace, prepare_calibration
from layerjump.pruning.select import blocks_in_spans, contiguous_spans, find_sink_blocks, parse_drop_count

gpt2 = fitted_gpt2.model  # a fixture

ALL_POSITIONS = Positions("all", skip_first=0, special=True)


@pytest.fixture(scope="module")
def trained(real_folder) -> tuple[Model, Corpus]:
    stories = real_folder("stories15M").parents[1] / "text/tinystories/tinystories_train_sample.txt"
    return lj.load(real_folder("stories15M")), lj.load_text(stories, limit=60)


def test_each_method_beats_the_earlier_one_on_a_trained_model(trained):
    """On one span, in the order of the papers and then shorter."""
    model, text = trained
    calibration = prepare_calibration(model, text, tokens=4_000, split="80/5/15", seed=0)
    before = token_losses(model, calibration.test).mean
    losses = {
        method: token_losses(drop_and_replace(model, [(2, 3)], method, calibration).model, calibration.test).mean
        for method in ("remove", "replaceme", "fold", "rotation", "linear")
    }
    assert before < losses["rotation"] < losses["fold"] < losses["replaceme"] < losses["remove"]
    assert losses["linear"] < losses["replaceme"]


def test_selection_by_loss_compares_the_best_span_with_the_greedy_blocks(trained):
    """With their own replacements on validation documents; here the two selections differ."""
    model, text = trained
    settings = {"tokens": 4_000, "split": "80/5/15", "seed": 0}
    calibration = prepare_calibration(model, text, **settings)
    ends = select.BlockSelector(model, calibration.fit, calibration.validation, (1, 6))
    one = replace(ends, contiguous=True)
    both = [tuple(contiguous_spans(way.select("loss", 2))) for way in (ends, one)]
    assert len(set(both)) == 2
    cost = {}
    for cuts in both:
        cost[cuts] = token_losses(drop_and_replace(model, cuts, "fold", calibration).model, calibration.validation).mean
    losses = lj.prune(model, text, drop=2, method="fold", protect=[1, 6], **settings)
    assert losses.spans == min(cost, key=cost.__getitem__)
    alone = lj.prune(model, text, drop=2, method="fold", protect=[1, 6], contiguous=True, **settings)
    assert alone.spans == both[1]


def test_a_later_span_is_fitted_on_the_pruned_models_states(trained):
    """The source of the second span is the state after the first replacement."""
    model, text = trained
    calibration = prepare_calibration(model, text, tokens=4_000, split="80/5/15", seed=0)
    pruned = drop_and_replace(model, [(1, 2), (3, 4)], "rotation", calibration)
    assert [transform.level for transform in pruned.transforms] == [1, 2]
    (batch,) = [calibration.test[0]]
    (shorter,) = capture_states(pruned.model, [batch], [2])
    (original,) = capture_states(model, [batch], [4])
    transform = pruned.transforms[-1]
    expected = transform.scale * original[4] @ transform.rotation.float().T
    error = (shorter[2] - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.median()) < 0.6


@pytest.mark.parametrize("criterion", select.CRITERIA)
def test_every_choice_keeps_the_ends(gpt2, study_text, criterion):
    pruned = lj.prune(gpt2, study_text, drop=2, criterion=criterion, method="remove", tokens=3_000)
    assert len(pruned.dropped) == 2
    assert not {1, gpt2.n_blocks} & set(pruned.dropped)
    assert pruned.model.n_blocks == 2
    assert pruned.loss.loss_after > 0


def test_the_first_block_selected_by_loss_has_the_lowest_loss(gpt2, study_text):
    calibration = prepare_calibration(gpt2, study_text, tokens=4_000, split="80/10/10", seed=0)
    settings = select.BlockSelector(gpt2, calibration.fit, calibration.validation, [1, 4], use_maps=False)
    (best,) = settings.select("loss", 1)
    losses = {b: token_losses(without_blocks(gpt2, [b]), calibration.validation).mean for b in (2, 3)}
    assert best == min(losses, key=losses.get)
    trial = select.SpanTrials(settings, 1)
    for block, loss in losses.items():
        assert trial.loss(contiguous_spans([block])) == pytest.approx(loss, abs=1e-4)


def test_losses_equal_hugging_face(gpt2, study_text):
    text = Corpus("one", study_text.documents[:1], "")
    batch = make_batches(text, gpt2.tokenization, ALL_POSITIONS, max_length=40)[0]
    losses = token_losses(gpt2, [batch])
    row = batch.input_ids[:1, : int(batch.attention_mask[0].sum())]
    alone = token_losses(gpt2, [batch_from_ids(row[0].tolist())])
    with torch.no_grad():
        original = gpt2.hf(row, labels=row).loss
    assert alone.mean == pytest.approx(float(original), abs=1e-5)
    assert losses.over(losses)[0] == 1


def test_the_validation_loss_stays_below_max_loss(gpt2, study_text):
    pruned = lj.prune(gpt2, study_text, max_loss_ratio=1.2, criterion="deepest", tokens=4_000)
    calibration = prepare_calibration(gpt2, study_text, tokens=4_000, split="80/10/10", seed=0)
    limit = 1.2 * token_losses(gpt2, calibration.validation).mean
    assert token_losses(pruned.model, calibration.validation).mean <= limit


def test_a_block_that_forms_an_attention_sink_is_detected():
    """Block 2 of this model writes a large state at the first position alone."""
    model = wrapped(tiny_model("gpt2"), words=True)
    text = make_batches(numbers(60), model.tokenization, ALL_POSITIONS)

    def enlarge(module, args, output):
        output = output.clone()
        output[:, 0] *= 20
        return output

    assert find_sink_blocks(model, text) == []
    handle = model.structure.blocks[1].register_forward_hook(enlarge)
    try:
        assert find_sink_blocks(model, text) == [2]
    finally:
        handle.remove()


def test_spans_and_blocks():
    assert contiguous_spans([5, 3, 4, 9]) == [(2, 5), (8, 9)]
    assert blocks_in_spans([(2, 5), (8, 9)]) == (3, 4, 5, 9)
    assert [parse_drop_count(settings, 30) for settings in (8, "8", "25%", "10%")] == [8, 8, 8, 3]


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
        ({"drop": 1, "max_loss_ratio": 1.1}, "either"),
        ({}, "either"),
        ({"max_loss_ratio": 0.9}, "more than 1"),
        ({"drop": 1, "criterion": "deepest", "protect": [2, 3, 4], "method": "fold"}, "first block"),
    ],
)
def test_bad_arguments_are_refused(gpt2, study_text, settings, message):
    with pytest.raises(BadPruning, match=message):
        lj.prune(gpt2, study_text, tokens=3_000, **settings)


def test_a_text_too_short_for_the_width_is_refused(gpt2):
    few = Corpus("few", ("one two three",) * 4, "")
    with pytest.raises(TextTooShort, match="positions to fit maps of width"):
        lj.prune(gpt2, few, drop=1, method="fold", criterion="deepest", split="2/1/1")


def test_families_without_folding_give_the_reason(data_folder, study_text):
    bert = lj.load(data_folder / "tiny-bert")
    with pytest.raises(BadPruning, match="use linear or remove"):
        lj.prune(bert, study_text, drop=1, method="fold", tokens=2_000)
    pruned = lj.prune(bert, study_text, drop=1, criterion="influence", tokens=2_000)
    assert pruned.method == "remove"
    gemma = wrapped(tiny_model("gemma2"), words=True)
    with pytest.raises(LayerjumpError, match="a norm follows"):
        lj.prune(gemma, numbers(60), drop=1, method="fold")


def test_missing_spans_are_skipped_within_max_loss(data_folder):
    model = lj.load(data_folder / "tiny-gpt2")
    settings = {"max_loss_ratio": 50.0, "method": "remove", "tokens": 6_000, "protect": [2]}
    assert lj.prune(model, stories(200), criterion="angle", **settings).dropped == (3, 4)
    with pytest.raises(BadPruning, match="got 'luck'"):
        lj.prune(model, stories(200), max_loss_ratio=2.0, criterion="luck", tokens=6_000)
