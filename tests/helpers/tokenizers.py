"""Tokenizers made on the spot: one token a word, with what real ones put around a text."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split, WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

SPECIALS = ("[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>")
UNK, PAD, CLS, SEP, MASK, BOS, EOS = range(7)


def tokenizer(
    template: str, words: Sequence[str] = (), *, limit: int = 512, **specials: str
) -> PreTrainedTokenizerFast:
    """Words "0" … "999" (and more) have ids 7 …; the template is as `[CLS] $A [SEP]`."""
    vocabulary = dict.fromkeys([*SPECIALS, *map(str, range(1000)), *words])
    ids = {word: i for i, word in enumerate(vocabulary)}
    backend = Tokenizer(WordLevel(ids, unk_token="[UNK]"))
    backend.pre_tokenizer = WhitespaceSplit()
    used = [(word, ids[word]) for word in template.split() if word != "$A"]
    backend.post_processor = TemplateProcessing(single=template, special_tokens=used)
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=limit, unk_token="[UNK]", **specials)


def bert(words: Sequence[str] = (), *, limit: int = 512) -> PreTrainedTokenizerFast:
    return tokenizer(
        "[CLS] $A [SEP]",
        words,
        limit=limit,
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        pad_token="[PAD]",
    )


def llama(words: Sequence[str] = (), *, limit: int = 512) -> PreTrainedTokenizerFast:
    return tokenizer("<s> $A", words, limit=limit, bos_token="<s>", eos_token="</s>")


def gpt2(words: Sequence[str] = (), *, limit: int = 512) -> PreTrainedTokenizerFast:
    return tokenizer("$A", words, limit=limit, bos_token="</s>", eos_token="</s>")


def characters(**specials: str) -> PreTrainedTokenizerFast:
    """One token a character; it has a BOS and does not add it."""
    letters = [chr(code) for code in range(32, 127)]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate([*SPECIALS, *letters])}, unk_token="[UNK]"))
    backend.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", bos_token="<s>", **specials)


def byte_tokenizer():
    """One token a letter."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {chr(97 + i): i for i in range(26)} | {"[UNK]": 60}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
