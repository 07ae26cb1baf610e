"""What goes around a text is what the tokenizer itself puts there, and nothing else."""

import logging
from pathlib import Path

import pytest
import torch
from helpers import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from layerjump.data.tokenization import Tokenization
from layerjump.errors import BadText

MODELS = Path(__file__).resolve().parents[2].parent / "shared" / "models"


def real(name: str) -> PreTrainedTokenizerFast:
    if not (MODELS / name).exists():
        pytest.skip(f"no model in {MODELS / name}")
    return AutoTokenizer.from_pretrained(MODELS / name)


@pytest.mark.parametrize(
    ("make", "prefix", "suffix", "pad", "mask"),
    [
        (tokenizers.bert, (tokenizers.CLS,), (tokenizers.SEP,), tokenizers.PAD, tokenizers.MASK),
        (tokenizers.llama, (tokenizers.BOS,), (), tokenizers.EOS, None),
        (tokenizers.gpt2, (), (), tokenizers.EOS, None),
    ],
)
def test_what_goes_around(make, prefix, suffix, pad, mask):
    tokens = Tokenization.of(make(), max_positions=64)
    assert (tokens.prefix, tokens.suffix) == (prefix, suffix)
    assert (tokens.pad, tokens.mask) == (pad, mask)
    assert tokens.wrap([9, 10]) == [*prefix, 9, 10, *suffix] == tokens.tokenizer("2 3").input_ids
    assert tokens.text_length(tokens.max_length) == 64 - len(prefix) - len(suffix)


def test_a_causal_model_never_gets_a_suffix():
    tokenizer = tokenizers.tokenizer("<s> $A </s>", bos_token="<s>", eos_token="</s>")
    tokens = Tokenization.of(tokenizer, max_positions=64)
    assert (tokens.prefix, tokens.suffix) == ((tokenizers.BOS,), ())


def test_a_causal_model_with_a_mask_token_is_told_so():
    tokens = Tokenization.of(tokenizers.bert(), max_positions=64, masked=False)
    assert (tokens.prefix, tokens.suffix, tokens.mask) == ((tokenizers.CLS,), (), None)
    with pytest.raises(BadText, match="no mask token"):
        Tokenization.of(tokenizers.llama(), max_positions=64, masked=True)


def test_a_bos_that_is_needed_is_added_once():
    shy = Tokenization.of(tokenizers.tokenizer("$A", bos_token="<s>"), max_positions=64)
    assert shy.prefix == ()
    assert shy.with_bos().prefix == shy.with_bos().with_bos().prefix == (tokenizers.BOS,)
    assert Tokenization.of(tokenizers.llama(), max_positions=64).with_bos().prefix == (tokenizers.BOS,)
    assert Tokenization.of(tokenizers.tokenizer("$A"), max_positions=64).with_bos().prefix == ()


def test_a_prompt_that_begins_with_bos_gets_no_second_one():
    tokens = Tokenization.of(tokenizers.llama(), max_positions=64)
    for text in ("2 3", "<s> 2 3"):  # chat templates write BOS themselves
        assert tokens.generation_inputs([text])["input_ids"].tolist() == [[tokenizers.BOS, 9, 10]]
    assert tokens.wrap_prompt([]) == [tokenizers.BOS]


def test_padding_is_found_without_touching_the_tokenizer():
    tokenizer = tokenizers.gpt2()
    tokens = Tokenization.of(tokenizer, max_positions=64)
    tokens.encode(["1 2"])
    tokens.generation_inputs(["1 2", "3"])
    assert tokens.pad == tokenizers.EOS
    assert tokenizer.pad_token is None
    assert tokenizer.padding_side == "right"
    assert Tokenization.of(tokenizers.tokenizer("$A"), max_positions=64).pad == tokenizers.UNK


@pytest.mark.parametrize(("limit", "positions", "length"), [(100, 64, 64), (32, 64, 32), (10**30, 64, 64)])
def test_the_shorter_limit_holds(limit, positions, length):
    assert Tokenization.of(tokenizers.gpt2(limit=limit), max_positions=positions).max_length == length


@pytest.mark.parametrize("limit", ["512", -float("inf"), float("nan"), 0])
def test_a_limit_that_is_no_number(limit):
    tokenizer = tokenizers.gpt2()
    tokenizer.model_max_length = limit
    with pytest.raises(BadText, match=f"tokenizer_config.json, got '{limit}'"):
        Tokenization.of(tokenizer, max_positions=64)


def test_an_unknown_token_that_is_unknown():
    tokenizer = tokenizers.gpt2()
    tokenizer._special_tokens_map["unk_token"] = "[WHAT]"
    with pytest.raises(BadText, match=r"unknown token in its vocabulary, got '\[WHAT\]'"):
        Tokenization.of(tokenizer, max_positions=64)


def test_no_room_for_text():
    with pytest.raises(BadText, match="the 2 tokens that the tokenizer adds, got 2") as caught:
        Tokenization.of(tokenizers.bert(), max_positions=2)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_knows_no_common_word_is_still_probed():
    tokens = Tokenization.of(real("rxn-bert"), max_positions=512)
    assert tokens.encode(["a"]) == [[]]  # the probe that is tried first
    assert (tokens.prefix, tokens.suffix) == ((12,), (13,))
    assert (tokens.mask, tokens.text_length(tokens.max_length)) == (14, 510)


def test_a_real_llama_tokenizer():
    tokens = Tokenization.of(real("stories15M"), max_positions=1024)
    assert (tokens.prefix, tokens.suffix, tokens.mask, tokens.max_length) == ((1,), (), None, 256)
    assert tokens.pad == 2  # there is no pad token, so the end of text fills
    assert tokens.encode(["a </s> b"]) == [tokens.tokenizer("a </s> b", add_special_tokens=False).input_ids]


def test_encoding_is_in_full_in_order_and_silent(caplog):
    texts = [" ".join(str(i % 1000) for i in range(n % 40)) for n in range(2100)]
    texts[1500] = "5 " * 3000
    tokens = Tokenization.of(tokenizers.llama(limit=16), max_positions=16)
    with caplog.at_level(logging.WARNING):
        logging.getLogger("transformers").addHandler(caplog.handler)
        encoded = tokens.encode(texts)
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert encoded == [[int(word) + 7 for word in text.split()] for text in texts]
    assert not caplog.records
    assert tokens.encode([]) == []


def test_prompts_are_padded_on_the_left():
    tokens = Tokenization.of(tokenizers.llama(), max_positions=64)
    inputs = tokens.generation_inputs(["0 1 2", "3"])
    s, p = tokenizers.BOS, tokenizers.EOS
    assert torch.equal(inputs["input_ids"], torch.tensor([[s, 7, 8, 9], [p, p, s, 10]]))
    assert torch.equal(inputs["attention_mask"], torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]))
    assert inputs["input_ids"].dtype == inputs["attention_mask"].dtype == torch.int64


@pytest.mark.parametrize(
    ("make", "text", "said"),
    [(tokenizers.llama, "1 " * 20, "at most 16 tokens, got 21"), (tokenizers.gpt2, "", "got none in ''")],
)
def test_prompts_that_cannot_be_continued(make, text, said):
    with pytest.raises(BadText) as caught:
        Tokenization.of(make(), max_positions=16).generation_inputs([text])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
