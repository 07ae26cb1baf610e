"""Run single blocks of a Hugging Face model with a KV cache.

Running single blocks of a Hugging Face model with a cache, called exactly as the model itself would call them.

Masks, rotary embeddings and biases are made by the model's own body: its blocks are swapped for a moment by probes that
write down what they are called with. So every decoder family works, and nothing is re-implemented.

Blocks that run when they are asked to, and states that wait for them.

Every block has a queue: the states that have reached its level but not entered it. A token that leaves early stays in
the queue of its exit level; the next time any token goes deeper, the whole queue goes along. Keys and values are
therefore the full model's own, however tokens leave.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from layerjump.errors import BadModel
from layerjump.generation.kv_cache import BlockCache, Stored
from layerjump.generation.result import Counts
from layerjump.models.hooks import Call, intercept_calls
from layerjump.models.model import Model


class Blocks(Protocol):
    """A way to run blocks. `ids`, `mask` (None: no padding) and `position` are of all tokens so far, (rows, tokens)."""

    def enter(
        self, ids: Tensor, mask: Tensor | None, position: Tensor, cache: BlockCache
    ) -> Tensor:
        """New tokens have come: the states at level 0 of all that the first block has not seen."""

    def run(self, index: int, states: Tensor) -> Tensor:
        """Run a block (counted from 0) on states of the tokens that follow those it has seen."""

    def store(self, index: int, states: Tensor) -> None:
        """Compute and keep a block's keys and values of these states, and nothing else."""


class HuggingFaceBlocks:
    """Any decoder family."""

    def __init__(self, model: Model) -> None:
        self._stack = model.stack
        self._blocks = model.structure.blocks
        self._list = model.hf.get_submodule(model.structure.family.blocks)
        self._config = model.hf.config
        self._takes_position = "position_ids" in inspect.signature(self._stack.forward).parameters
        self._calls: dict[int, list[Call]] = {}
        """Calls of all blocks, by how many tokens a block has seen."""

    @torch.no_grad()
    def enter(
        self, ids: Tensor, mask: Tensor | None, position: Tensor, cache: BlockCache
    ) -> Tensor:
        self._ids, self._mask, self._position, self._cache = ids, mask, position, cache
        self._calls = {}
        return self._record(cache.lengths[0])

    def run(self, index: int, states: Tensor) -> Tensor:
        return self._call(index).repeat(self._blocks[index], states)

    def store(self, index: int, states: Tensor) -> None:
        self._cache.store_only = True
        try:
            self.run(index, states)
        except Stored:
            return
        finally:
            self._cache.store_only = False
        raise BadModel(f"block {index + 1} never handed its keys and values to the cache")

    def _call(self, index: int) -> Call:
        seen = self._cache.lengths[index]
        if seen not in self._calls:
            self._record(seen)
        return self._calls[seen][index]

    def _record(self, seen: int) -> Tensor:
        """Learn how every block would be called for the tokens after the first `seen`; gives level 0."""
        pretended = _pretend(self._config, seen)
        given: dict[str, Any] = {"input_ids": self._ids[:, seen:], "attention_mask": self._mask}
        if self._takes_position:
            given["position_ids"] = self._position[:, seen:]
        with intercept_calls(self._list) as calls:
            self._stack(**given, past_key_values=pretended, use_cache=True)
        self._calls[seen] = [_with_cache(call, pretended, self._cache) for call in calls]
        return calls[0].states


def _pretend(config: Any, seen: int) -> DynamicCache:
    """A cache that holds nothing but says that every block has seen so many tokens."""
    cache = DynamicCache(config=config)
    layers: list[Any] = cache.layers
    for layer in layers:
        if layer.is_sliding:
            layer.cumulative_length = seen
        elif seen:
            layer.keys = layer.values = torch.empty(1).expand(1, 1, seen, 1)  # one number in memory
            layer.is_initialized = True
    return cache


def _with_cache(call: Call, pretended: DynamicCache, cache: BlockCache) -> Call:
    """The call with our cache in place of the pretended one."""
    return Call(
        call.states,
        tuple(cache if given is pretended else given for given in call.args),
        {name: cache if given is pretended else given for name, given in call.kwargs.items()},
    )


def windows(config: Any) -> list[int | None]:
    """The sliding window of every block, as Hugging Face's own cache has it; None: it sees everything."""
    layers: list[Any] = DynamicCache(config=config).layers
    return [layer.sliding_window if layer.is_sliding else None for layer in layers]


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
