"""Tokenizers and packed rows: training data depends on the text and the seed alone."""

from __future__ import annotations

import pytest
import torch
from helpers.story_text import stories

from layerjump.data.tokenization import Tokenization
from layerjump.errors import BadTraining, TextTooShort
from layerjump.training.packed_rows import IGNORE_INDEX, PackedRows, pack_rows
from layerjump.training.tokenizer import train_tokenizer

TEXT = stories(80).documents


@pytest.fixture(scope="module")
def tokenizers():
    return {masked: train_tokenizer(TEXT, 300, 32, masked=masked) for masked in (False, True)}


@pytest.mark.parametrize("masked", [False, True])
def test_a_tokenizer_has_the_requested_size_and_loses_no_byte(tokenizers, masked):
    tokenizer = tokenizers[masked]
    assert len(tokenizer) == 300
    strange = 'Tom said: "naïve 🦆\n\tfoo"'
    ids = tokenizer(strange, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids).strip() == strange
    assert (tokenizer.mask_token_id is not None) == masked


def test_rows_contain_the_text_in_order(tokenizers):
    tokenizer = tokenizers[False]
    tokens = Tokenization.of(tokenizer, max_positions=32)
    rows = pack_rows(TEXT, tokens, 32)
    flat = [token for document in TEXT for token in [tokenizer.eos_token_id, *tokenizer(document)["input_ids"]]]
    assert rows.flatten().tolist() == flat[: rows.numel()]
    assert len(flat) - rows.numel() < 32
    masked = pack_rows(TEXT, Tokenization.of(tokenizers[True], max_positions=32), 32)
    assert set(masked[:, 0].tolist()) == {tokenizers[True].cls_token_id}
    assert set(masked[:, -1].tolist()) == {tokenizers[True].sep_token_id}


def test_every_epoch_visits_every_row_once_in_another_order():
    rows = torch.arange(20, dtype=torch.int32)[:, None].expand(20, 4)
    data = PackedRows(rows, 50, seed=3)
    ids = [int(data[index]["input_ids"][0]) for index in range(50)]
    assert sorted(ids[:20]) == sorted(ids[20:40]) == list(range(20))
    assert ids[:20] != ids[20:40]
    # Independent of earlier items, as for a resumed run or another process.
    assert [int(PackedRows(rows, 50, seed=3)[index]["labels"][0]) for index in (41, 7)] == [ids[41], ids[7]]
    assert [int(PackedRows(rows, 50, seed=4)[index]["input_ids"][0]) for index in range(20)] != ids[:20]


def test_masking_follows_bert(tokenizers):
    tokenizer = tokenizers[True]
    rows = pack_rows(TEXT, Tokenization.of(tokenizer, max_positions=32), 32)
    data = PackedRows(rows, 15 * len(rows), seed=0, masking_tokenizer=tokenizer)
    items = [data[index] for index in range(15 * len(rows))]
    inputs, labels = (torch.stack([item[name] for item in items]) for name in ("input_ids", "labels"))
    predicted = labels != IGNORE_INDEX
    assert not predicted[:, [0, -1]].any()
    inside = predicted[:, 1:-1].double().mean()
    assert float(inside) == pytest.approx(0.15, abs=0.01)
    as_mask = (inputs[predicted] == tokenizer.mask_token_id).double().mean()
    unchanged = (inputs[predicted] == labels[predicted]).double().mean()
    assert float(as_mask) == pytest.approx(0.8, abs=0.03)
    assert float(unchanged) == pytest.approx(0.1, abs=0.03)
    again = data[5]
    assert torch.equal(again["input_ids"], items[5]["input_ids"])


def test_impossible_sizes_are_refused(tokenizers):
    with pytest.raises(BadTraining, match="gives only"):
        train_tokenizer(TEXT, 50_000, 32, masked=False)
    with pytest.raises(BadTraining, match="at least 257"):
        train_tokenizer(TEXT, 200, 32, masked=False)
    tokens = Tokenization.of(tokenizers[False], max_positions=32)
    with pytest.raises(TextTooShort, match="too few for one row"):
        pack_rows(["Tom."], tokens, 32)
    with pytest.raises(BadTraining, match="max_positions=64"):
        pack_rows(TEXT, tokens, 64)
