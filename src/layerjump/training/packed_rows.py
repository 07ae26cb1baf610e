"""Training data: documents packed into rows of equal length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from layerjump.data.tokenization import Tokenization
from layerjump.errors import BadTraining, TextTooShort, argument

MASK_PROBABILITY = 0.15
"""Share of a masked model's tokens to predict: 80 % become [MASK], 10 % another token, 10 % stay (BERT)."""
IGNORE_INDEX = -100
"""Label of a token that the loss leaves out."""


def pack_rows(documents: Sequence[str], tokenization: Tokenization, length: int) -> Tensor:
    """Pack documents into rows of `length` token ids, (rows, length); the incomplete last row is dropped.

    For a causal model the end-of-text token precedes every document. For a masked model every row starts and ends
    with the tokens that its tokenizer puts around a text.
    """
    if length > tokenization.max_length:
        raise BadTraining(
            f"the model takes sequences of {tokenization.max_length} tokens, but {length} are requested; pass "
            f"{argument('length', tokenization.max_length)} or less, or {argument('max_positions', length)}"
        )
    is_masked = tokenization.mask is not None
    end = tokenization.tokenizer.eos_token_id
    ids: list[int] = []
    for document in tokenization.encode(documents):
        ids += document if is_masked or end is None else [end, *document]
    prefix, suffix = (tokenization.prefix, tokenization.suffix) if is_masked else ((), ())
    inner = length - len(prefix) - len(suffix)
    n_rows = len(ids) // inner if inner > 0 else 0
    if not n_rows:
        raise TextTooShort(
            f"the text has {len(ids):,} tokens, too few for one row of {length}; pass more text, or a smaller "
            f"{argument('length')}"
        )
    body = torch.tensor(ids[: n_rows * inner], dtype=torch.int32).view(n_rows, inner)
    left, right = (torch.tensor(side, dtype=torch.int32).expand(n_rows, -1) for side in (prefix, suffix))
    return torch.cat([left, body, right], dim=1)


class PackedRows(Dataset[dict[str, Tensor]]):
    """Training examples from packed rows, in an order that depends on the seed alone.

    Example i is the same for any number of processes, any batch size and after any restart. Each epoch visits all
    rows in another order; a masked model gets other masks in each epoch.
    """

    def __init__(
        self, rows: Tensor, n_examples: int, *, seed: int, masking_tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        self._rows, self._n_examples, self._seed = rows, n_examples, seed
        self._tokenizer = masking_tokenizer
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self._n_examples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        epoch, position = divmod(index, len(self._rows))
        if self._order is None or self._order[0] != epoch:
            bits = np.random.Philox(np.random.SeedSequence([self._seed, epoch]))
            self._order = epoch, np.argsort(bits.random_raw(len(self._rows)), kind="stable")
        ids = self._rows[int(self._order[1][position])].long()
        inputs, labels = ids, ids
        if (tokenizer := self._tokenizer) is not None:
            # BERT's masking, drawn from the seed and the example's index.
            (seed,) = np.random.SeedSequence([self._seed, index]).generate_state(1, np.uint64)
            generator = torch.Generator().manual_seed(int(seed >> np.uint64(1)))
            uniform = torch.rand(2, len(ids), generator=generator)
            predicted = (uniform[0] < MASK_PROBABILITY) & ~torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
            random_ids = torch.randint(len(tokenizer), ids.shape, generator=generator)
            replaced = torch.where(uniform[1] < 0.8, tokenizer.mask_token_id, ids)
            replaced = torch.where(uniform[1] >= 0.9, random_ids, replaced)
            inputs, labels = torch.where(predicted, replaced, ids), torch.where(predicted, ids, IGNORE_INDEX)
        return {"input_ids": inputs, "attention_mask": torch.ones_like(ids), "labels": labels}
