"""Encoder–decoders: halves of documents, batches of two rows, and both stacks' states."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from helpers import seq2seq_models, tokenizers
from helpers.tiny_models import tiny_model
from safetensors.torch import load_file, save_file

import layerjump as lj
from layerjump.data.corpus import Corpus
from layerjump.errors import BadModel, NoPredictions, UnsupportedModel
from layerjump.models.self_check import sample
from layerjump.models.sites import FINAL, Site, parse_pairs

model, corpus = seq2seq_models.model, seq2seq_models.corpus  # fixtures

EVERY = lj.Positions("all", skip_first=0, special=True)
TEXT = lj.Positions("all", skip_first=0)


def ids_of(document: str) -> list[int]:
    return [int(word) + len(tokenizers.SPECIALS) for word in document.split()]


def by_pick(found, site) -> dict[tuple[int, int], torch.Tensor]:
    """States by (document, position): documents here are single sequences."""
    return {
        (int(document), int(position)): state
        for states in found
        for document, position, state in zip(states.batch.document, states.batch.position, states[site], strict=True)
    }


# -- halves


@pytest.mark.parametrize("length", [2, 3, 8, 9])
def test_the_decoders_half_is_the_labels_moved_right(model, length):
    """The model's own convention: labels are what the tokenizer makes of the second half."""
    tokens, ids = model.tokenization, list(range(100, 100 + length))
    source, row = tokens.halves(ids)
    middle = (length + 1) // 2
    assert source == tokens.wrap(ids[:middle])
    labels = torch.tensor([tokens.wrap(ids[middle:])])
    assert row == model.hf.prepare_decoder_input_ids_from_labels(labels)[0].tolist()
    assert tokens.around == (len(row) - (length - middle), 0)


def test_a_start_token_that_is_not_named_is_the_padding():
    hf = tiny_model("t5", decoder_start_token_id=None)
    model = lj.Model.wrap(hf, tokenizers.tokenizer("$A </s>", pad_token="[PAD]", eos_token="</s>"))
    assert model.tokenization.start == hf.config.pad_token_id


# -- batches


def test_every_token_is_read_once_by_one_of_the_two(model, corpus):
    found = lj.make_batches(corpus, model.tokenization, TEXT)
    for batch in found:
        for row in range(len(batch.input_ids)):
            document = int(batch.document[batch.row == row][0])
            source = batch.source_ids[row][batch.source_mask[row] == 1].tolist()
            target = batch.input_ids[row][batch.attention_mask[row] == 1].tolist()
            assert (source, target) == model.tokenization.halves(ids_of(corpus.documents[document]))
    seen = Counter(int(token) for batch in found for token in batch.token)
    second = [ids[(len(ids) + 1) // 2 :] for ids in map(ids_of, corpus.documents)]
    assert seen == Counter(token for ids in second for token in ids)


def test_counts_take_in_both_rows(model, corpus):
    found = lj.make_batches(corpus, model.tokenization, TEXT, max_batch_tokens=600)
    assert found.n_tokens == sum(batch.n_tokens for batch in found)
    assert found.n_source_tokens == sum(int(batch.source_mask.sum()) for batch in found)
    assert found.n_picks == sum(batch.n_picks for batch in found)
    cells = [batch.input_ids.numel() + batch.source_ids.numel() for batch in found]
    assert max(cells) <= 600
    assert found.padding_share == pytest.approx(1 - found.n_tokens / sum(cells))
    assert found.padding_share < 0.15
    some = lj.make_batches(corpus, model.tokenization, TEXT, tokens=500)
    assert 500 <= some.n_tokens < 560


@pytest.mark.parametrize("kind", ["one", "sample=3", "30%", "all"])
def test_picks_do_not_depend_on_the_budget(model, corpus, kind):
    def picks(batches):
        rows = (zip(b.document.tolist(), b.position.tolist(), strict=True) for b in batches)
        return sorted(pick for row in rows for pick in row)

    positions = lj.Positions.parse(kind)
    whole = lj.make_batches(corpus, model.tokenization, positions)
    small = lj.make_batches(corpus, model.tokenization, positions, max_batch_tokens=90)
    assert picks(whole) == picks(small)
    assert min(position for _, position in picks(whole)) == model.tokenization.around[0]


def test_a_long_document_becomes_several_pairs_of_rows(model, corpus):
    long = Corpus("long", (" ".join(corpus.documents),), "")
    found = list(lj.make_batches(long, model.tokenization, EVERY, max_length=12))
    assert max(batch.input_ids.shape[1] for batch in found) <= 12
    assert max(batch.source_ids.shape[1] for batch in found) <= 12
    special = {tokenizers.PAD, tokenizers.BOS, tokenizers.EOS}
    read = Counter(
        int(token)
        for batch in found
        for ids, mask in ((batch.input_ids, batch.attention_mask), (batch.source_ids, batch.source_mask))
        for token in ids[mask == 1]
    )
    read = {token: count for token, count in read.items() if token not in special}
    assert read == Counter(ids_of(long.documents[0]))


# -- states


def test_states_do_not_depend_on_the_batches(model, corpus):
    site = Site(model.n_blocks)
    together = by_pick(lj.capture_states(model, lj.make_batches(corpus, model.tokenization, EVERY), [site]), site)
    alone = by_pick(
        lj.capture_states(model, lj.make_batches(corpus, model.tokenization, EVERY, max_batch_tokens=1), [site]), site
    )
    assert together.keys() == alone.keys()
    # T5's norms round to float32 whatever the model's dtype.
    assert all(torch.allclose(together[pick], alone[pick], rtol=0, atol=1e-5) for pick in alone)


def test_the_source_is_asked_for(model):
    with pytest.raises(BadModel, match="pass source_ids and source_mask"):
        list(lj.capture_states(model, [lj.batch_from_ids([1, 2, 3])], [0]))
    (found,) = lj.capture_states(model, [lj.batch_from_ids([1, 2, 3], source=[4, 5])], [0])
    assert found[0].shape == (3, 32)


def test_the_encoders_levels_are_hugging_faces(model):
    side = model.encoder_side()
    batch = sample(side, rows=3, length=14)
    (found,) = lj.capture_states(side, [batch], range(side.n_blocks + 1))
    with torch.no_grad():
        output = model.hf(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            decoder_input_ids=batch.input_ids[:, :1],
            output_hidden_states=True,
        )
    for level in range(side.n_blocks):
        theirs = output.encoder_hidden_states[level][batch.row, batch.position]
        assert torch.allclose(found[level], theirs, rtol=0, atol=1e-12)


def test_an_encoders_side_has_no_predictions_and_no_final(model):
    side = model.encoder_side()
    assert FINAL not in side.structure.sites()
    assert not any("xattn" in str(site) for site in side.structure.sites())
    with pytest.raises(BadModel, match="no site final"):
        parse_pairs("0:final", side.structure)
    with pytest.raises(NoPredictions, match="use the decoder"):
        side.logits(torch.zeros(1, 32, dtype=torch.float64))


def test_an_encoder_reads_whole_texts_with_what_goes_around_them(model, corpus):
    side = model.encoder_side()
    (batch,) = lj.make_batches(Corpus("one", corpus.documents[:1], ""), side.tokenization, lj.Positions("one"))
    assert batch.source_ids is None
    assert batch.input_ids[0].tolist() == model.tokenization.wrap(ids_of(corpus.documents[0]))


def test_a_single_stack_has_no_encoder_side():
    with pytest.raises(UnsupportedModel, match="no encoder next to"):
        lj.Model.wrap(tiny_model("gpt2"), name="tiny").encoder_side()


# -- loading


@pytest.mark.parametrize(("family", "variant"), [("t5", ""), ("t5", "gated"), ("bart", "")])
def test_a_folder_loads_and_predicts(family, variant, tmp_path):
    hf = tiny_model(family, variant, dtype=torch.float32)
    hf.save_pretrained(tmp_path)
    model = lj.load(tmp_path)
    assert model.no_predictions is None
    assert (model.task, model.n_blocks, model.d_model) == ("seq2seq", 3, 32)
    names = [check.name for check in lj.self_check(model)]
    assert {"logits", "causality", "encoder levels", "encoder blocks", "encoder inputs"} <= {*names}
    batch = sample(model)
    (ours,) = lj.capture_states(model, [batch], [3], logits=True)
    (theirs,) = lj.capture_states(lj.Model.wrap(hf), [batch], [3], logits=True)
    assert torch.allclose(ours.logits, theirs.logits, atol=1e-5)


def test_a_t5_with_a_head_of_its_own_keeps_it(tmp_path):
    """T5 1.1 is not tied, though its class is."""
    hf = tiny_model("t5", "gated", dtype=torch.float32)
    hf.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn_like(tensors["shared.weight"])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = lj.load(tmp_path)
    assert torch.equal(model.structure.unembedding.weight, tensors["lm_head.weight"])


def test_a_t5_with_a_missing_body_weight_is_refused(tmp_path):
    tiny_model("t5", dtype=torch.float32).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["decoder.block.1.layer.1.EncDecAttention.k.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadModel, match=r"lacks 1 weights of its body, such as decoder.block.1"):
        lj.load(tmp_path)
