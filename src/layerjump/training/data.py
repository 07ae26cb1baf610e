"""Training data: packed rows and a byte-level BPE tokenizer.

Documents packed into rows of one length, dealt out in an order that depends on the seed alone.

Train a byte-level BPE tokenizer, with the `tokenizers` library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from layerjump.data.tokenization import Tokenization
from layerjump.errors import BadTraining, TextTooShort, argument

MASKED = 0.15
"""Of a masked model's tokens: eight tenths of them become [MASK], one tenth another token, one tenth stay."""
IGNORE_INDEX = -100


def pack_rows(documents: Sequence[str], tokens: Tokenization, length: int) -> Tensor:
    """All text in rows of `length` tokens, (rows, length); what does not fill the last row is left out.

    A causal model's documents follow each other behind the end-of-text token; a masked model's rows stand between the
    tokens its tokenizer puts around a text.
    """
    if length > tokens.max_length:
        raise BadTraining(
            f"sequences of {length} tokens were asked for, but the model takes {tokens.max_length}; pass "
            f"{argument('length', tokens.max_length)} or less, or {argument('max_positions', length)}"
        )
    end = tokens.tokenizer.eos_token_id
    ids: list[int] = []
    for document in tokens.encode(documents):
        ids += document if tokens.mask is not None or end is None else [end, *document]
    before, after = (tokens.prefix, tokens.suffix) if tokens.mask is not None else ((), ())
    room = length - len(before) - len(after)
    count = len(ids) // room if room > 0 else 0
    if not count:
        raise TextTooShort(
            f"the text has {len(ids):,} tokens, too few for one row of {length}; give more text, "
            f"or a smaller {argument('length')}"
        )
    inside = torch.tensor(ids[: count * room], dtype=torch.int32).view(count, room)
    sides = [torch.tensor(side, dtype=torch.int32).expand(count, -1) for side in (before, after)]
    return torch.cat([sides[0], inside, sides[1]], dim=1)


class PackedRows(Dataset[dict[str, Tensor]]):
    """What a run trains on: example i is the same however many processes, batches or restarts there are.

    The rows are passed through again and again, each time in another order; a masked model's masks differ from pass to
    pass.
    """

    def __init__(
        self,
        rows: Tensor,
        examples: int,
        *,
        seed: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self._rows, self._examples, self._seed = rows, examples, seed
        self._tokenizer = tokenizer
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self._examples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        turn, place = divmod(index, len(self._rows))
        ids = self._rows[int(self._ordered(turn)[place])].long()
        item = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        return item if self._tokenizer is None else self._masked(item, index)

    def _ordered(self, turn: int) -> np.ndarray:
        if self._order is None or self._order[0] != turn:
            bits = np.random.Philox(np.random.SeedSequence([self._seed, turn]))
            order = np.argsort(bits.random_raw(len(self._rows)), kind="stable")
            self._order = turn, order
        return self._order[1]

    def _masked(self, item: dict[str, Tensor], index: int) -> dict[str, Tensor]:
        """BERT's recipe, drawn from the seed and the example's number."""
        assert self._tokenizer is not None
        (seed,) = np.random.SeedSequence([self._seed, index]).generate_state(1, np.uint64)
        draw = torch.Generator().manual_seed(int(seed >> np.uint64(1)))
        ids, special = item["labels"], torch.tensor(self._tokenizer.all_special_ids)
        chance = torch.rand(2, len(ids), generator=draw)
        chosen = (chance[0] < MASKED) & ~torch.isin(ids, special)
        other = torch.randint(len(self._tokenizer), ids.shape, generator=draw)
        shown = torch.where(chance[1] < 0.8, self._tokenizer.mask_token_id, ids)
        shown = torch.where(chance[1] >= 0.9, other, shown)
        return item | {
            "input_ids": torch.where(chosen, shown, ids),
            "labels": torch.where(chosen, ids, IGNORE_INDEX),
        }


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
            f"one of them; pass {argument('vocab_size', found)} or less, or more text"
        )
    if masked:
        sep, cls = ((name, tokenizer.token_to_id(name) or 0) for name in ("[SEP]", "[CLS]"))
        tokenizer.post_processor = processors.BertProcessing(sep, cls)
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if masked else [])]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=length, model_input_names=inputs, **special
    )
