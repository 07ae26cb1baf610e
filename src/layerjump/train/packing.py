"""Documents packed into rows of one length, dealt out in an order that depends on the seed alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from layerjump.errors import BadTraining, TextTooShort
from layerjump.inputs.tokens import Tokens

MASKED = 0.15
"""Of a masked model's tokens: eight tenths of them become [MASK], one tenth another token, one tenth stay."""
IGNORED = -100


def pack(documents: Sequence[str], tokens: Tokens, length: int) -> Tensor:
    """All text in rows of `length` tokens, (rows, length); what does not fill the last row is left out.

    A causal model's documents follow each other behind the end-of-text token; a masked model's rows stand between the
    tokens its tokenizer puts around a text.
    """
    if length > tokens.max_length:
        raise BadTraining(
            f"sequences of {length} tokens were asked for, but the model takes {tokens.max_length}; give --length "
            f"{tokens.max_length} or less, or --positions {length}"
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
            f"the text has {len(ids):,} tokens, too few for one row of {length}; give more text, or a smaller --length"
        )
    inside = torch.tensor(ids[: count * room], dtype=torch.int32).view(count, room)
    sides = [torch.tensor(side, dtype=torch.int32).expand(count, -1) for side in (before, after)]
    return torch.cat([sides[0], inside, sides[1]], dim=1)


class Rows(Dataset[dict[str, Tensor]]):
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
            "labels": torch.where(chosen, ids, IGNORED),
        }
