"""Classification heads: the path from level L to the logits of labels, and what reads it."""

from __future__ import annotations

import pytest
import torch
import transformers
from helpers.classifiers import FAMILIES, LABELS, LAST, numbers, small_classifier, wrapped

import layerjump as lj
from layerjump.data.batches import Batch, make_batches
from layerjump.data.corpus import load_text
from layerjump.data.positions import Positions
from layerjump.errors import BadText, NoPredictions, UnsupportedModel
from layerjump.lens.evaluate import evaluate_lenses
from layerjump.models.loading import load
from layerjump.models.model import Model, capture_states
from layerjump.models.self_check import sample, self_check


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_of_a_text_is_read_at_one_position(family):
    model = Model.wrap(small_classifier(family))
    assert (model.task, model.n_blocks, model.structure.degree) == ("classification", 3, "full")
    assert model.pooled == ("last" if family in LAST else "first")
    assert model.labels == LABELS
    checks = {check.name: check for check in self_check(model)}
    assert checks["logits"].passed
    assert checks["logits"].difference is not None
    # Other texts, and other lengths, than discovery and the self-check have seen.
    for seed, length in ((1, 5), (2, 17)):
        ids = torch.randint(4, 1100, (4, length), generator=torch.Generator().manual_seed(seed))
        row = torch.arange(4)
        position = torch.zeros_like(row) if model.pooled == "first" else torch.full_like(row, length - 1)
        batch = Batch(ids, torch.ones_like(ids), row, position, row, ids[row, position])
        (states,) = capture_states(model, [batch], [3], logits=True)
        with torch.no_grad():
            theirs = model.hf(input_ids=ids, attention_mask=batch.attention_mask).logits
        assert theirs.std(0).min() > 1e-3
        torch.testing.assert_close(states.logits, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_of_tokens_is_read_everywhere(family):
    model = Model.wrap(small_classifier(family, "Token"))
    assert (model.task, model.n_blocks, model.pooled, model.labels) == ("classification", 3, None, LABELS)
    batch = sample(model)
    (states,) = capture_states(model, [batch], [3], logits=True)
    with torch.no_grad():
        theirs = model.run_whole(batch).logits[batch.row, batch.position]
    torch.testing.assert_close(states.logits, theirs, atol=1e-5, rtol=1e-4)


def test_a_mean_over_positions_has_levels_and_no_predictions():
    model = Model.wrap(small_classifier("ModernBert", classifier_pooling="mean"))
    assert model.structure.degree == "states"
    (states,) = capture_states(model, [sample(model)], [0, 3])
    assert states[3].shape[-1] == 32
    assert model.labels is None
    with pytest.raises(NoPredictions, match=r"predicts no labels: its head reads 9 positions of 9 \(a mean"):
        lj.Lens(model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_labels": 1, "id2label": {0: "score"}}, "one number"),
        ({"problem_type": "multi_label_classification"}, "do not exclude each other"),
    ],
)
def test_regression_and_multi_label_heads_have_no_predictions(change, reason):
    model = Model.wrap(small_classifier("Bert", **change))
    with pytest.raises(NoPredictions, match=reason):
        lj.Lens(model)


def test_an_encoder_decoder_with_a_classification_head_is_refused():
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    config = transformers.BartConfig(d_model=16, vocab_size=64, max_position_embeddings=64, num_labels=3, **sizes)
    with pytest.raises(UnsupportedModel, match="encoder and decoder both read the text"):
        Model.wrap(transformers.BartForSequenceClassification(config))


def test_a_saved_classifier_loads_with_its_head(tmp_path):
    made = wrapped("Bert")
    made.hf.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    model = load(tmp_path, device="cpu")
    assert (model.labels, model.pooled, model.no_predictions) == (LABELS, "first", None)
    ours, theirs = (lj.Lens(one)("1 2 3").probability for one in (made, model))
    torch.testing.assert_close(ours, theirs)


def test_the_lens_names_labels_at_the_position_of_the_head():
    model = wrapped("Bert")
    text = "5 6 7 8"
    trajectory = lj.Lens(model)(text, tokens=["law"])
    assert trajectory.positions == (0,)
    assert trajectory.tokens[0].strip() == "[CLS]"
    assert trajectory.probability.shape == (4, 1, 3)
    inputs = model.tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        theirs = model.hf(input_ids=inputs["input_ids"]).logits[0].softmax(-1)
    torch.testing.assert_close(trajectory.distribution(3, 0), theirs, atol=1e-6, rtol=1e-4)
    assert trajectory.decode([int(trajectory.model_top[0])]) == [LABELS[int(theirs.argmax())]]
    assert trajectory.tracked[0].text == "law"
    assert float(trajectory.track("story").probability[3, 0]) == pytest.approx(float(theirs[1]), rel=1e-4)
    assert set(trajectory.to_dict()["words"].values()) == set(LABELS)
    assert set(trajectory.to_pandas()["top"]) <= set(LABELS)
    with pytest.raises(BadText, match="expected a label of news, story, law, got 'poem'"):
        trajectory.track("poem")


def test_the_lens_of_a_token_head_reads_every_token():
    model = wrapped("Bert", "Token")
    trajectory = lj.Lens(model)("5 6 7")
    assert trajectory.positions == (0, 1, 2, 3, 4)
    assert set(trajectory.decode(trajectory.top[0, :, 0].tolist())) <= set(LABELS)


@pytest.mark.parametrize("estimator", ["mat", "ridge", "calibrated"])
def test_jumps_are_fitted_and_scored_where_the_head_reads(estimator):
    model, text = wrapped("Bert"), numbers(500)
    jumps = lj.fit(model, text, estimator=estimator)
    assert (jumps.provenance.positions, jumps.provenance.n_fit) == ("first", 400)
    test = lj.split_indices(500).test
    batches = make_batches(text, model.tokenization, model.prediction_positions, documents=test)
    assert batches.n_picks == 50
    lenses = {"identity": lj.Lens(model), "fitted": lj.Lens(model, jumps)}
    scores = evaluate_lenses(model, lenses, batches)
    assert set(scores.position.tolist()) == {0}
    kl = scores.kl.mean(-1)
    assert kl[0, 2] > kl[1, 2]
    assert bool(scores.hits(10).all())  # there are three labels


def test_first_and_last_are_one_position_of_a_document():
    tokenization, text = wrapped("Bert").tokenization, load_text(["1 2 3", " ".join(["4"] * 100)])
    for kind, expected in (("first", {0}), ("last", {4, 59})):
        batches = list(make_batches(text, tokenization, Positions.parse(kind)))
        assert {position for batch in batches for position in batch.position.tolist()} == expected
        assert sum(batch.n_picks for batch in batches) == 2
    assert str(Positions.parse("last")) == "last"
