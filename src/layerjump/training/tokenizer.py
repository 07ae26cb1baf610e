"""Train a byte-level BPE tokenizer for a model that is trained from scratch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from layerjump.errors import BadTraining, argument

N_BYTES = 256
END_OF_TEXT = "<|endoftext|>"
_CAUSAL_SPECIAL: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
_MASKED_SPECIAL: dict[str, Any] = {
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "unk_token": "[UNK]",
    "mask_token": AddedToken("[MASK]", lstrip=True, special=True),
}


def train_tokenizer(
    documents: Sequence[str], vocab_size: int, max_length: int, *, masked: bool
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with exactly `vocab_size` tokens.

    The tokenizer of a causal model adds no special tokens to a text; that of a masked model adds [CLS] and [SEP].
    """
    special = _MASKED_SPECIAL if masked else _CAUSAL_SPECIAL
    special_tokens = {str(token): token for token in special.values()}
    smallest = N_BYTES + len(special_tokens)
    if vocab_size < smallest:
        raise BadTraining(
            f"expected {argument('vocab_size')} of at least {smallest} ({N_BYTES} bytes and {len(special_tokens)} "
            f"special tokens), got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=masked)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    if (trained_size := tokenizer.get_vocab_size()) < vocab_size:
        raise BadTraining(
            f"the text gives only {trained_size:,} tokens, but {vocab_size:,} are requested; pass "
            f"{argument('vocab_size', trained_size)} or less, or more text"
        )
    if masked:
        sep, cls = ((name, tokenizer.token_to_id(name) or 0) for name in ("[SEP]", "[CLS]"))
        tokenizer.post_processor = processors.BertProcessing(sep, cls)
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if masked else [])]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=max_length, model_input_names=inputs, **special
    )
