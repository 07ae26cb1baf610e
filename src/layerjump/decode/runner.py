"""Blocks that run when they are asked to, and states that wait for them.

Every block has a queue: the states that have reached its level but not entered it. A token that leaves early stays in
the queue of its exit level; the next time any token goes deeper, the whole queue goes along. Keys and values are
therefore the full model's own, however tokens leave.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerjump.decode.blocks import Blocks, windows
from layerjump.decode.cache import BlockCache
from layerjump.decode.result import Counts


class Runner:
    """One batch of growing texts, and how far each block has come with them."""

    def __init__(
        self,
        blocks: Blocks,
        config: object,
        mask: Tensor | None,
        position: Tensor,
        counts: Counts,
    ) -> None:
        self._blocks = blocks
        self.cache = BlockCache(windows(config))
        self.n_blocks = len(self.cache.lengths)
        self._waiting: list[Tensor | None] = [None] * self.n_blocks
        """States at level l that block l + 1 has not seen, (rows, tokens, d)."""
        self._mask, self._position = mask, position
        self._length = 0
        self._counts = counts

    @property
    def position(self) -> Tensor:
        """The newest token's position in every row, padding not counted."""
        return self._position[:, self._length - 1]

    @property
    def length(self) -> int:
        """Tokens fed so far, in every row."""
        return self._length

    def feed(self, ids: Tensor) -> Tensor:
        """Take the texts with their new tokens; gives level 0 of those."""
        length = ids.shape[1]
        self._length = length
        while self._position.shape[1] < length:
            self._position = torch.cat([self._position, self._position[:, -1:] + 1], 1)
        if self._mask is not None and self._mask.shape[1] < length:
            more = self._mask.new_ones(len(self._mask), length - self._mask.shape[1])
            self._mask = torch.cat([self._mask, more], 1)
        mask = None if self._mask is None else self._mask[:, :length]
        states = self._blocks.enter(ids, mask, self._position[:, :length], self.cache)
        self._waiting[0] = states
        return states

    def up(self, block: int) -> Tensor:
        """Run a block (counted from 1) on all that waits for it; the states that leave it.

        A block must be asked for only after the one before it.
        """
        states = self._waiting[block - 1]
        assert states is not None
        self._counts.block_runs += 1
        self._counts.block_tokens += states.shape[0] * states.shape[1]
        left = self._blocks.run(block - 1, states)
        self._waiting[block - 1] = None
        if block < self.n_blocks:
            before = self._waiting[block]
            self._waiting[block] = left if before is None else torch.cat([before, left], 1)
        return left

    def fill(self, block: int, states: Tensor) -> None:
        """Give a block keys and values of states that are predicted, not computed."""
        self._counts.filled += 1
        self._blocks.store(block - 1, states)

    def forget_waiting(self, level: int) -> None:
        """Nothing waits at this level any more: the blocks above have been filled."""
        self._waiting[level] = None

    def back(self, length: int) -> None:
        """Forget the tokens from this one on; all blocks must have seen them."""
        self.cache.back(length)
        self._waiting = [None] * self.n_blocks
        self._length = length
