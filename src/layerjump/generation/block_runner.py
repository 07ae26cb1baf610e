"""Run single blocks of a Hugging Face model with a KV cache.

`BlockRunner` keeps a queue for every block: the states that have reached its level but have not entered it. A token
that exits early stays in the queue of its exit level; the next token that goes deeper takes the queue along. Keys and
values are therefore the full model's, wherever tokens exit.

The `KVCache` may hold another number of tokens for each block. Memory is allocated ahead: new keys and values go into
spare capacity, and a rollback only lowers lengths. Sliding-window blocks store every token and return their window, so
that they can be rolled back too.

`HuggingFaceBlocks` calls blocks exactly as the model itself would. The model's own forward pass, with placeholders
for its blocks, makes their masks, rotary embeddings and biases. So every decoder family works, and nothing is
re-implemented.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from layerjump.errors import BadModel
from layerjump.models.hooks import Call, intercept_calls
from layerjump.models.model import Model

_SPARE = 64  # tokens of spare capacity of a KV cache at first; later the capacity doubles


@dataclass
class Counts:
    """The work of one generation, prompt included."""

    block_runs: int = 0
    """Calls of a block, on any number of tokens."""
    block_tokens: int = 0
    """Tokens run through blocks, summed over blocks."""
    wasted_tokens: int = 0
    """Of these, tokens that had exited but ran along because another row of their batch went deeper."""
    filled_blocks: int = 0
    """Blocks whose keys and values were computed from a predicted or copied state."""
    unembeddings: int = 0
    """Products with the full unembedding, of any number of tokens."""
    shortlist_unembeddings: int = 0
    """Products with the unembedding of a shortlist."""
    probe_evaluations: int = 0
    drafts: int = 0
    """Tokens that exited early and were then verified by the full model."""
    accepted: int = 0
    """Drafts that the full model confirmed."""
    rollbacks: int = 0
    """Times that tokens were dropped from the KV cache."""
    near_ties: int = 0
    """Verified tokens whose two largest logits differ by less than 1e-4, where rounding decides."""
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("blocks", "unembeddings", "rules", "rest"), 0.0)
    )
    """Wall-clock time by part."""

    def __post_init__(self) -> None:
        self._since = time.perf_counter()

    def record_time(self, part: str, unembedding_seconds: float = 0.0) -> None:
        """Add the time since the last call to a part, less what of it went into unembeddings."""
        now = time.perf_counter()
        self.seconds[part] += now - self._since - unembedding_seconds
        self.seconds["unembeddings"] += unembedding_seconds
        self._since = now


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
        self._buffers: list[list[Tensor]] = [[] for _ in self.windows]
        """Keys and values of each block, (rows, heads, capacity, d_head); none before the first token."""

    def update(self, keys: Tensor, values: Tensor, index: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append a block's new keys and values, (rows, heads, tokens, d_head); return all its queries may see."""
        start = self.lengths[index]
        end = start + keys.shape[-2]
        buffers = self._buffers[index]
        if not buffers or buffers[0].shape[2] < end:
            capacity = max(end + _SPARE, 2 * buffers[0].shape[2] if buffers else 0)
            enlarged = [new.new_empty((*new.shape[:2], capacity, new.shape[3])) for new in (keys, values)]
            for buffer, old in zip(enlarged, buffers, strict=False):
                buffer[:, :, :start] = old[:, :, :start]
            self._buffers[index] = buffers = enlarged
        for buffer, new in zip(buffers, (keys, values), strict=True):
            buffer[:, :, start:end] = new
        self.lengths[index] = end
        if self.store_only:
            raise KeysStored
        window = self.windows[index]
        first = max(0, start - window + 1) if window else 0
        return buffers[0][:, :, first:end], buffers[1][:, :, first:end]

    def get(self, index: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a block that has stored some."""
        keys, values = self._buffers[index]
        return keys[:, :, : self.lengths[index]], values[:, :, : self.lengths[index]]

    def rollback(self, length: int) -> None:
        """Drop every token after the first `length`, in every block."""
        self.lengths = [min(stored, length) for stored in self.lengths]

    def get_seq_length(self, index: int = 0) -> int:
        """The number of tokens stored for a block, under the name that Hugging Face calls."""
        return self.lengths[index]


class Blocks(Protocol):
    """Runs single blocks, by index from 0. `mask` is None without padding; arguments of `embed` cover all tokens."""

    def embed(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: KVCache) -> Tensor:
        """Begin a step with ids (rows, T); the level-0 states of the tokens that block 0 has not stored."""

    def run(self, index: int, states: Tensor) -> Tensor:
        """Run a block on the states of the tokens that follow those it has stored, (rows, tokens, d_model)."""

    def store(self, index: int, states: Tensor) -> None:
        """Store a block's keys and values of these states without running the rest of the block."""


class BlockRunner:
    """Runs the blocks of a growing batch of sequences, each block when a step needs it."""

    def __init__(self, blocks: Blocks, config: Any, mask: Tensor | None, positions: Tensor) -> None:
        self._blocks = blocks
        layers: list[Any] = DynamicCache(config=config).layers  # Hugging Face's own cache knows each block's window
        self.cache = KVCache([layer.sliding_window if layer.is_sliding else None for layer in layers])
        self.n_blocks = len(self.cache.lengths)
        self._queues: list[Tensor | None] = [None] * self.n_blocks
        """States at level l that block l + 1 has not run on, (rows, tokens, d_model)."""
        self._mask, self._positions = mask, positions
        self.length = 0
        """Tokens entered so far, in every row."""
        self.counts = Counts()

    @property
    def positions(self) -> Tensor:
        """The newest token's position in every row, counted without padding."""
        return self._positions[:, self.length - 1]

    def extend(self, ids: Tensor) -> Tensor:
        """Enter the sequences with their new tokens, ids (rows, T); the new tokens' states at level 0."""
        self.length = length = ids.shape[1]
        while self._positions.shape[1] < length:
            self._positions = torch.cat([self._positions, self._positions[:, -1:] + 1], 1)
        if self._mask is not None and self._mask.shape[1] < length:
            new = self._mask.new_ones(len(self._mask), length - self._mask.shape[1])
            self._mask = torch.cat([self._mask, new], 1)
        mask = None if self._mask is None else self._mask[:, :length]
        states = self._blocks.embed(ids, mask, self._positions[:, :length], self.cache)
        self._queues[0] = states
        return states

    def run(self, block: int) -> Tensor:
        """Run a block, counted from 1, on its queue; its output joins the next queue and is returned."""
        states = self._queues[block - 1]
        assert states is not None, "run the block before this one first"
        self.counts.block_runs += 1
        self.counts.block_tokens += states.shape[0] * states.shape[1]
        output = self._blocks.run(block - 1, states)
        self._queues[block - 1] = None
        if block < self.n_blocks:
            queue = self._queues[block]
            self._queues[block] = output if queue is None else torch.cat([queue, output], 1)
        return output

    def fill(self, block: int, states: Tensor) -> None:
        """Store keys and values of predicted states in a block, counted from 1, and empty its queue."""
        self.counts.filled_blocks += 1
        self._blocks.store(block - 1, states)
        self._queues[block - 1] = None

    def rollback(self, length: int) -> None:
        """Drop every token after the first `length`; all blocks must have run on the others."""
        self.cache.rollback(length)
        self._queues = [None] * self.n_blocks
        self.length = length


class HuggingFaceBlocks:
    """The blocks of any decoder family."""

    def __init__(self, model: Model) -> None:
        self._stack = model.stack
        self._structure = model.structure
        self._blocks = model.structure.blocks
        self._config = model.text_config
        self._takes_positions = "position_ids" in inspect.signature(self._stack.forward).parameters
        self._calls: dict[int, list[Call]] = {}
        """The calls of all blocks, by the number of tokens that a block has stored."""

    @torch.no_grad()
    def embed(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: KVCache) -> Tensor:
        self._ids, self._mask, self._positions, self._cache = ids, mask, positions, cache
        self._calls = {}
        return self._record_calls(cache.lengths[0])

    def run(self, index: int, states: Tensor) -> Tensor:
        stored = self._cache.lengths[index]
        if stored not in self._calls:
            self._record_calls(stored)
        return self._calls[stored][index].repeat(self._blocks[index], states)

    def store(self, index: int, states: Tensor) -> None:
        self._cache.store_only = True
        try:
            self.run(index, states)
        except KeysStored:
            return
        finally:
            self._cache.store_only = False
        raise BadModel(f"block {index + 1} did not pass its keys and values to the cache")

    def _record_calls(self, stored: int) -> Tensor:
        """Record every block's call for the tokens after the first `stored`; the states at level 0."""
        # An empty cache that reports `stored` tokens for every block.
        placeholder = DynamicCache(config=self._config)
        layers: list[Any] = placeholder.layers
        for layer in layers:
            if layer.is_sliding:
                layer.cumulative_length = stored
            elif stored:
                # A view of one number: the shape is all that is read.
                layer.keys = layer.values = torch.empty(1).expand(1, 1, stored, 1)
                layer.is_initialized = True
        inputs: dict[str, Any] = {"input_ids": self._ids[:, stored:], "attention_mask": self._mask}
        if self._takes_positions:
            inputs["position_ids"] = self._positions[:, stored:]
        with intercept_calls(self._structure) as calls:
            self._stack(**inputs, past_key_values=placeholder, use_cache=True)

        def with_real_cache(value: Any) -> Any:
            return self._cache if value is placeholder else value

        self._calls[stored] = [
            replace(
                call,
                args=tuple(map(with_real_cache, call.args)),
                kwargs={name: with_real_cache(value) for name, value in call.kwargs.items()},
            )
            for call in calls
        ]
        return calls[0].states
