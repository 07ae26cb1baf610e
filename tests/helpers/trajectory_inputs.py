"""What trajectories are read from: a story, a small trained model in double precision, jumps fitted on it."""

import pytest

import layerjump as lj
from helpers import tokenizers
from helpers.tiny_models import tiny_model

STORY = "Once upon a time, there was a little girl named Lily. She had a red ball."
NUMBERS = "3 1 4 1 5 9 2 6 5 35"


@pytest.fixture(scope="module")
def gpt2(data_folder):
    return lj.load(data_folder / "tiny-gpt2", dtype="float64")


@pytest.fixture(scope="module")
def text():
    return lj.load_text("pydoc", limit=80)


@pytest.fixture(scope="module")
def jumps(gpt2, text):
    pairs = "0:4,1:4,2:4,3:4,2.mid:4,0:2,1:3"
    return lj.fit(gpt2, text, pairs=pairs, split="100/0/0")


def made(family: str, variant: str = "") -> lj.Model:
    """A tiny random model of a family, with a tokenizer of numbers."""
    masked = family in ("bert", "albert", "distilbert", "roberta")
    tokenizer = tokenizers.bert() if masked else tokenizers.llama()
    hf = tiny_model(family, variant, vocab_size=1007, pad_token_id=tokenizers.PAD)
    return lj.Model.wrap(hf, tokenizer, name=f"tiny {family}")
