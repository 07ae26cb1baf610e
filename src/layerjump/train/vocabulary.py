"""Train a byte-level BPE tokenizer, with the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from layerjump.errors import BadTraining

END_OF_TEXT = "<|endoftext|>"
_CAUSAL: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
_MASKED: dict[str, Any] = {
    f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "unk")
} | {"mask_token": AddedToken("[MASK]", lstrip=True, special=True)}
_BYTES = 256


def train_tokenizer(
    documents: Sequence[str], vocabulary: int, length: int, *, masked: bool
) -> PreTrainedTokenizerFast:
    """A tokenizer of so many tokens: the bytes, the special ones, and the merges that the text asks for most.

    A causal model's adds nothing to a text; a masked one's puts [CLS] and [SEP] around it.
    """
    special = _MASKED if masked else _CAUSAL
    named = {str(token): token for token in special.values()}
    least = _BYTES + len(named)
    if vocabulary < least:
        raise BadTraining(
            f"the vocabulary given is {vocabulary}; give at least {least}, for {_BYTES} bytes and {len(named)} special "
            "tokens"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=masked)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(named.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    if (found := tokenizer.get_vocab_size()) < vocabulary:
        raise BadTraining(
            f"the vocabulary given is {vocabulary:,}, but the text gives only {found:,} tokens before every word is "
            f"one of them; give --vocab {found} or less, or more text"
        )
    if masked:
        sep, cls = ((name, tokenizer.token_to_id(name) or 0) for name in ("[SEP]", "[CLS]"))
        tokenizer.post_processor = processors.BertProcessing(sep, cls)
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if masked else [])]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=length, model_input_names=inputs, **special
    )
