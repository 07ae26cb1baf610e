"""KV cache with blocks at different lengths, and how skipped blocks fill theirs.

Keys and values of every block, in memory allocated ahead; blocks may have seen different numbers of tokens.

Caches that are not computed: keys and values of skipped blocks from states that are predicted or copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    pass

ROOM = 64
"""Tokens of room at first, beside what is stored; later the room doubles."""


class Stored(Exception):  # noqa: N818  (a signal, not an error)
    """Raised out of a block that was run for its keys and values alone, once it has handed them over."""


class BlockCache:
    """What a Hugging Face block knows as `past_key_values`: it calls `update`, and reads what that returns.

    Growing writes into spare room instead of copying all there is; going back is a smaller length. Sliding layers keep
    everything and show their window, so that they can go back too.
    """

    def __init__(self, windows: Sequence[int | None]) -> None:
        self.windows = list(windows)
        """Each block's sliding window; None: it sees everything."""
        self.lengths = [0] * len(self.windows)
        """How many tokens each block has seen."""
        self.store_only = False
        """Leave the block as soon as its keys and values are here."""
        self._keys: list[Tensor | None] = [None] * len(self.windows)
        self._values: list[Tensor | None] = [None] * len(self.windows)

    def update(
        self, keys: Tensor, values: Tensor, index: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Add a block's new keys and values, (rows, heads, tokens, d); give back all that its queries may see."""
        start = self.lengths[index]
        end = start + keys.shape[-2]
        held_keys = self._room(self._keys, index, keys, end)
        held_values = self._room(self._values, index, values, end)
        held_keys[:, :, start:end] = keys
        held_values[:, :, start:end] = values
        self.lengths[index] = end
        if self.store_only:
            raise Stored
        window = self.windows[index]
        first = max(0, start - window + 1) if window else 0
        return held_keys[:, :, first:end], held_values[:, :, first:end]

    def held(self, index: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a block."""
        keys, values = self._keys[index], self._values[index]
        assert keys is not None
        assert values is not None
        length = self.lengths[index]
        return keys[:, :, :length], values[:, :, :length]

    def back(self, length: int) -> None:
        """Forget every token from this one on, in every block that has seen it."""
        self.lengths = [min(seen, length) for seen in self.lengths]

    def get_seq_length(self, index: int = 0) -> int:
        """Hugging Face's name for how many tokens a block has seen."""
        return self.lengths[index]

    def _room(self, held: list[Tensor | None], index: int, new: Tensor, end: int) -> Tensor:
        """The block's memory, with room for `end` tokens."""
        old = held[index]
        if old is not None and old.shape[2] >= end:
            return old
        room = end + ROOM if old is None else max(2 * old.shape[2], end + ROOM)
        made = torch.empty((*new.shape[:2], room, new.shape[3]), dtype=new.dtype, device=new.device)
        if old is not None:
            made[:, :, : self.lengths[index]] = old[:, :, : self.lengths[index]]
        held[index] = made
        return made
