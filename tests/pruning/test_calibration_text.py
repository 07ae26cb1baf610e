"""What a pruning is calibrated on: mixtures, self-generated text, and losses on each text by itself."""

from __future__ import annotations

import pytest
import torch
from helpers.story_text import stories

import layerjump as lj
from layerjump.data.corpus import Corpus, split_indices
from layerjump.data.mixture import mix_texts
from layerjump.errors import BadPruning, BadText
from layerjump.metrics.token_loss import token_losses
from layerjump.pruning.checkpoint import PruningRecord, model_card
from layerjump.pruning.prune import prepare_calibration
from layerjump.pruning.self_generated_text import OPENING, continue_documents

SETTINGS = {"tokens": 4_000, "split": "60/20/20", "seed": 0}


@pytest.fixture(scope="module")
def model(data_folder):
    return lj.load(data_folder / "tiny-gpt2")


@pytest.fixture(scope="module")
def manual():
    return lj.load_text("pydoc", limit=100)


def test_a_mixture_has_as_many_words_of_each_text():
    long, short = Corpus("long", ("a b c d",) * 50, ""), Corpus("short", ("x y",) * 20, "")
    mixed = mix_texts([long, short])
    assert mixed.name == "long + short"
    assert [mixed.sources.count(name) for name in ("long", "short")] == [10, 20]
    for source, document in zip(mixed.sources, mixed.documents, strict=True):
        assert document in {"long": long, "short": short}[source].documents
    with pytest.raises(BadText, match="got none"):
        mix_texts([])


def test_the_loss_is_measured_on_each_text_and_on_others(model, manual):
    tales, others = stories(200), stories(60, seed=9, name="others")
    settings = {**SETTINGS, "out_of_domain": [others]}
    pruned = lj.prune(model, [tales, manual], drop=1, method="fold", criterion="deepest", **settings)
    texts = {(each.text, each.in_domain) for each in pruned.text_losses}
    assert texts == {("stories", True), (manual.name, True), ("others", False)}
    inside = [each.loss for each in pruned.text_losses if each.in_domain]
    assert sum(loss.tokens for loss in inside) == pruned.loss.tokens
    mean = sum(loss.tokens * loss.loss_after for loss in inside) / pruned.loss.tokens
    assert mean == pytest.approx(pruned.loss.loss_after)
    (name, batches), *more = prepare_calibration(model, [tales, manual], **settings).out_of_domain
    assert (name, more) == ("others", [])
    assert pruned.text_losses[-1].loss.loss_after == pytest.approx(token_losses(pruned.model, batches).mean)
    card = model_card(PruningRecord.of(pruned))
    assert "`others` (not calibrated on): perplexity ratio" in card


def test_self_generated_text_continues_the_openings_of_fit_documents(model):
    tales = stories(40, sentences=3)
    fit = split_indices(40, "60/20/20", seed=0).fit
    written = continue_documents(model, tales, fit, tokens=None, seed=0)
    few = continue_documents(model, tales, fit, tokens=100, seed=0)
    other = continue_documents(model, tales, fit, tokens=100, seed=1)
    changed = [i for i in range(40) if written.documents[i] != tales.documents[i]]
    assert set(changed) <= set(fit)
    assert len(changed) > 0.9 * len(fit)
    for index in changed:
        old, new = model.tokenization.encode([tales.documents[index], written.documents[index]])
        assert new[: OPENING - 1] == old[: OPENING - 1]
    assert few.documents != other.documents
    assert [few.documents[index] for index in fit[:16]] == [written.documents[index] for index in fit[:16]]
    assert sum(a != b for a, b in zip(few.documents, tales.documents, strict=True)) <= 16


def test_only_the_fit_documents_are_self_generated(model):
    settings = {**SETTINGS, "tokens": 1_500}
    plain = prepare_calibration(model, stories(200), **settings)
    own = prepare_calibration(model, stories(200), **settings, self_generated=True)
    assert torch.equal(plain.validation[0].input_ids, own.validation[0].input_ids)
    assert plain.info.text_sha256 != own.info.text_sha256
    assert own.info.text.endswith("self-generated")


def test_a_masked_model_writes_no_text(data_folder):
    bert = lj.load(data_folder / "tiny-bert")
    with pytest.raises(BadPruning, match="causal model"):
        lj.prune(bert, stories(200), drop=1, self_generated=True, **SETTINGS)
