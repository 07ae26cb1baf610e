"""The same weights have the same fingerprint, however loaded; other weights have another."""

import copy
import hashlib
import json
import struct

import pytest
import torch
from helpers import tokenizers
from helpers.tiny_models import tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from layerjump.errors import BadModel
from layerjump.models.fingerprint import fingerprint, tokenizer_hash


@pytest.fixture(scope="module")
def hf():
    return tiny_model("gpt2", dtype=torch.float32)


def bfloat16(value: float) -> int:
    """The 16 bits of a float32 rounded to bfloat16, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def by_hand(hf) -> str:
    """The same fingerprint, in plain Python."""
    digest = hashlib.sha256()
    for name, parameter in sorted(hf.named_parameters(), key=lambda item: item[0]):
        values = parameter.flatten().tolist()
        step = (len(values) + 1023) // 1024
        step += step % 2 == 0
        digest.update(json.dumps([name, list(parameter.shape)]).encode())
        digest.update(b"".join(struct.pack("<H", bfloat16(value)) for value in values[::step]))
    return digest.hexdigest()


def test_it_is_what_the_docstring_says(hf):
    assert fingerprint(hf) == by_hand(hf)


def test_one_checkpoint_has_one_fingerprint_in_every_type(hf, tmp_path):
    hf.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        assert fingerprint(loaded) == fingerprint(hf)


def test_a_change_of_any_tensor_is_noticed(hf):
    known = {fingerprint(hf)}
    for parameter in hf.parameters():
        before = parameter.detach().clone()
        parameter.data *= 1.02
        known.add(fingerprint(hf))
        parameter.data.copy_(before)
    assert len(known) == 1 + len(list(hf.parameters()))
    assert fingerprint(hf) in known


def test_a_change_in_any_column_is_noticed():
    model = nn.Linear(576, 2048)
    before = fingerprint(model)
    for column in range(0, 576, 5):
        changed = copy.deepcopy(model)
        changed.weight.data[:, column] += 1
        assert fingerprint(changed) != before


def test_names_and_shapes_count():
    def model(name: str, *shape: int) -> nn.Module:
        module = nn.Module()
        module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        return module

    variants = [("a", 4, 6), ("b", 4, 6), ("a", 6, 4), ("a", 24), ("a", 0), ("a",)]
    assert len({fingerprint(model(*variant)) for variant in variants}) == len(variants)


def test_memory_layout_does_not_count():
    model = nn.Linear(6, 4)
    before = fingerprint(model)
    model.weight.data = model.weight.data.mT.contiguous().mT
    assert fingerprint(model) == before


def test_weights_that_are_not_in_memory_have_none(hf):
    with pytest.raises(BadModel, match="not in memory"):
        fingerprint(copy.deepcopy(hf).to("meta"))


def test_tokenizers():
    makers = [tokenizers.bert, tokenizers.llama, tokenizers.gpt2, lambda: tokenizers.bert(["new"])]
    hashes = [tokenizer_hash(make()) for make in makers]
    assert len(set(hashes)) == len(makers)
    assert hashes == [tokenizer_hash(make()) for make in makers]
    assert tokenizer_hash(None) is None


def test_a_tokenizer_that_was_used_is_still_the_same(tmp_path):
    tokenizer = tokenizers.bert()
    before = tokenizer_hash(tokenizer)
    tokenizer(["1 2 3", "4"], truncation=True, max_length=3, padding=True)
    assert tokenizer_hash(tokenizer) == before
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_hash(AutoTokenizer.from_pretrained(tmp_path)) == before


def test_a_special_token_counts():
    tokenizer = tokenizers.gpt2()
    before = tokenizer_hash(tokenizer)
    tokenizer.pad_token = "[PAD]"
    assert tokenizer_hash(tokenizer) != before
