"""Tokenizers and rows: what a run is trained on depends on the text and the seed alone."""

from __future__ import annotations

import pytest
import torch
from helpers.story_text import stories

from layerjump.data.tokenization import Tokenization
from layerjump.errors import BadTraining, TextTooShort
from layerjump.training.data import IGNORE_INDEX, PackedRows, pack_rows, train_tokenizer

TEXT = stories(80).documents


@pytest.fixture(scope="module")
def tokenizers():
    return {masked: train_tokenizer(TEXT, 300, 32, masked=masked) for masked in (False, True)}


@pytest.mark.parametrize("masked", [False, True])
def test_a_tokenizer_has_the_size_asked_for_and_loses_no_byte(tokenizers, masked):
    tokenizer = tokenizers[masked]
    assert len(tokenizer) == 300
    strange = 'Tom said: "naïve 🦆\n\tfoo"'
    ids = tokenizer(strange, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids).strip() == strange
    assert (tokenizer.mask_token_id is not None) == masked


def test_rows_hold_the_text_in_order(tokenizers):
    tokenizer = tokenizers[False]
    tokens = Tokenization.of(tokenizer, max_positions=32)
    rows = pack_rows(TEXT, tokens, 32)
    flat = [
        token
        for document in TEXT
        for token in [tokenizer.eos_token_id, *tokenizer(document)["input_ids"]]
    ]
    assert rows.flatten().tolist() == flat[: rows.numel()]
    assert len(flat) - rows.numel() < 32
    masked = pack_rows(TEXT, Tokenization.of(tokenizers[True], max_positions=32), 32)
    assert set(masked[:, 0].tolist()) == {tokenizers[True].cls_token_id}
    assert set(masked[:, -1].tolist()) == {tokenizers[True].sep_token_id}


def test_every_pass_visits_every_row_once_in_another_order():
    rows = torch.arange(20, dtype=torch.int32)[:, None].expand(20, 4)
    data = PackedRows(rows, 50, seed=3)
    seen = [int(data[index]["input_ids"][0]) for index in range(50)]
    assert sorted(seen[:20]) == sorted(seen[20:40]) == list(range(20))
    assert seen[:20] != seen[20:40]
    # Whatever was asked for before: what a resumed run or another process sees.
    assert [int(PackedRows(rows, 50, seed=3)[index]["labels"][0]) for index in (41, 7)] == [
        seen[41],
        seen[7],
    ]
    assert [
        int(PackedRows(rows, 50, seed=4)[index]["input_ids"][0]) for index in range(20)
    ] != seen[:20]


def test_masks_are_berts(tokenizers):
    tokenizer = tokenizers[True]
    rows = pack_rows(TEXT, Tokenization.of(tokenizer, max_positions=32), 32)
    data = PackedRows(rows, 15 * len(rows), seed=0, masking_tokenizer=tokenizer)
    items = [data[index] for index in range(15 * len(rows))]
    shown, labels = (
        torch.stack([item[name] for item in items]) for name in ("input_ids", "labels")
    )
    chosen = labels != IGNORE_INDEX
    assert not chosen[:, [0, -1]].any()
    inside = chosen[:, 1:-1].double().mean()
    assert float(inside) == pytest.approx(0.15, abs=0.01)
    as_mask = (shown[chosen] == tokenizer.mask_token_id).double().mean()
    unchanged = (shown[chosen] == labels[chosen]).double().mean()
    assert float(as_mask) == pytest.approx(0.8, abs=0.03)
    assert float(unchanged) == pytest.approx(0.1, abs=0.03)
    again = data[5]
    assert torch.equal(again["input_ids"], items[5]["input_ids"])


def test_what_the_text_does_not_allow_is_refused(tokenizers):
    with pytest.raises(BadTraining, match="gives only"):
        train_tokenizer(TEXT, 50_000, 32, masked=False)
    with pytest.raises(BadTraining, match="at least 257"):
        train_tokenizer(TEXT, 200, 32, masked=False)
    tokens = Tokenization.of(tokenizers[False], max_positions=32)
    with pytest.raises(TextTooShort, match="too few for one row"):
        pack_rows(["Tom."], tokens, 32)
    with pytest.raises(BadTraining, match="max_positions=64"):
        pack_rows(TEXT, tokens, 64)
