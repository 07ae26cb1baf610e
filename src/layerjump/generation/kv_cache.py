"""KV cache whose blocks may hold different numbers of tokens.

Memory is allocated ahead: new keys and values go into spare capacity, and a rollback only lowers lengths.
Sliding-window blocks store every token and return their window, so that they can be rolled back too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

CacheKind = Literal["exact", "jump", "copy"]
"""The keys and values of a token in the blocks that it skipped: its own, computed later (`exact`); those of a state
predicted by a jump (`jump`); those of the state at its exit level (`copy`)."""
_SPARE = 64
"""Tokens of spare capacity at first; later the capacity doubles."""


class KeysStored(Exception):  # noqa: N818  (a signal, not an error)
    """Raised by a cache in `store_only` mode to leave a block once its keys and values are stored."""


class KVCache:
    """The `past_key_values` of a Hugging Face block: the block calls `update` and attends to what that returns."""

    def __init__(self, windows: Sequence[int | None]) -> None:
        self.windows = list(windows)
        """The sliding window of each block; None: full attention."""
        self.lengths = [0] * len(self.windows)
        """The number of tokens stored for each block."""
        self.store_only = False
        """Whether `update` raises `KeysStored` instead of returning."""
        self._keys: list[Tensor | None] = [None] * len(self.windows)
        self._values: list[Tensor | None] = [None] * len(self.windows)

    def update(self, keys: Tensor, values: Tensor, index: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append a block's new keys and values, (rows, heads, tokens, d_head); return all that its queries may
        see."""
        start = self.lengths[index]
        end = start + keys.shape[-2]
        all_keys = self._with_capacity(self._keys, index, keys, end)
        all_values = self._with_capacity(self._values, index, values, end)
        all_keys[:, :, start:end] = keys
        all_values[:, :, start:end] = values
        self.lengths[index] = end
        if self.store_only:
            raise KeysStored
        window = self.windows[index]
        first = max(0, start - window + 1) if window else 0
        return all_keys[:, :, first:end], all_values[:, :, first:end]

    def get(self, index: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a block."""
        keys, values, length = self._keys[index], self._values[index], self.lengths[index]
        assert keys is not None
        assert values is not None
        return keys[:, :, :length], values[:, :, :length]

    def rollback(self, length: int) -> None:
        """Drop every token after the first `length`, in every block."""
        self.lengths = [min(stored, length) for stored in self.lengths]

    def get_seq_length(self, index: int = 0) -> int:
        """The number of tokens stored for a block, under the name that Hugging Face calls."""
        return self.lengths[index]

    def _with_capacity(self, buffers: list[Tensor | None], index: int, new: Tensor, end: int) -> Tensor:
        """The block's buffer, enlarged if it has no room for `end` tokens."""
        old = buffers[index]
        if old is not None and old.shape[2] >= end:
            return old
        capacity = end + _SPARE if old is None else max(2 * old.shape[2], end + _SPARE)
        rows, heads, _, d_head = new.shape
        buffer = torch.empty((rows, heads, capacity, d_head), dtype=new.dtype, device=new.device)
        if old is not None:
            buffer[:, :, : self.lengths[index]] = old[:, :, : self.lengths[index]]
        buffers[index] = buffer
        return buffer
