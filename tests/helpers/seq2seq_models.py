"""Tiny encoder–decoders with tokenizers of numbers, and a text for them."""

from __future__ import annotations

import random

import pytest

import layerjump as lj
from helpers import tokenizers
from helpers.tiny_models import tiny_model
from layerjump.data.corpus import Corpus

VOCABULARY = 1007


def made(family: str, variant: str = "") -> lj.Model:
    """A tiny model with a tokenizer that puts around a text what the family's own does."""
    around = {"t5": "$A </s>", "bart": "<s> $A </s>"}[family]
    named = {"pad_token": "[PAD]", "eos_token": "</s>", "mask_token": "[MASK]"}
    ids = {"pad_token_id": tokenizers.PAD, "eos_token_id": tokenizers.EOS}
    ids["decoder_start_token_id"] = {"t5": tokenizers.PAD, "bart": tokenizers.EOS}[family]
    hf = tiny_model(family, variant, vocab_size=VOCABULARY, **ids)
    return lj.Model.wrap(hf, tokenizers.tokenizer(around, **named), name=f"tiny {family}")


@pytest.fixture(scope="module", params=["t5", "bart"])
def model(request: pytest.FixtureRequest) -> lj.Model:
    return made(request.param)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    numbers = random.Random(0)
    lengths = [numbers.randint(5, 50) for _ in range(60)]
    documents = (" ".join(str(numbers.randrange(1000)) for _ in range(n)) for n in lengths)
    return Corpus("numbers", tuple(documents), "")
