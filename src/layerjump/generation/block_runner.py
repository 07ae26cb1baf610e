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
from collections import UserDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from layerjump.errors import BadModel
from layerjump.models.hooks import Call, intercept_calls
from layerjump.models.model import Model

_KEPT_TOKENS = 64  # latest tokens whose states of a level are kept, more than a verification step has
_SPARE = 64  # tokens of spare capacity of a KV cache at first; later the capacity doubles


@dataclass
class DraftCounts:
    """The drafts of one drafter by depth: the first draft of a step, the second, …"""

    drafted: list[int] = field(default_factory=list)
    """Tokens that were verified."""
    accepted: list[int] = field(default_factory=list)

    def add(self, depth: int, accepted: bool) -> None:
        """Count a verified draft; `depth` counts from 0."""
        for counts in (self.drafted, self.accepted):
            counts += [0] * (depth + 1 - len(counts))
        self.drafted[depth] += 1
        self.accepted[depth] += accepted


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
    steps: int = 0
    """Passes of the full model that verified drafts, or decided a token without any."""
    drafts: int = 0
    """Drafted tokens that the full model verified; not those after a rejected one."""
    accepted: int = 0
    """Drafts that the full model confirmed."""
    drafters: dict[str, DraftCounts] = field(default_factory=dict)
    """Drafter → its drafts and how many were accepted at each depth."""
    rollbacks: int = 0
    """Times that tokens were dropped from the KV cache."""
    near_ties: int = 0
    """Verified tokens whose two largest logits differ by less than 1e-4, where rounding decides."""
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("blocks", "unembeddings", "rules", "drafts", "rest"), 0.0)
    )
    """Wall-clock time by part; on an accelerator, a part's time includes what the host waited for there."""

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


class _Buffer:
    """Tensors (…, tokens, d) side by side in memory that is allocated ahead."""

    def __init__(self) -> None:
        self.length = 0
        self._memory: Tensor | None = None

    def append(self, new: Tensor) -> None:
        """Write tokens after those that are stored."""
        start, end = self.length, self.length + new.shape[-2]
        if self._memory is None or self._memory.shape[-2] < end:
            capacity = max(end + _SPARE, 0 if self._memory is None else 2 * self._memory.shape[-2])
            enlarged = new.new_empty((*new.shape[:-2], capacity, new.shape[-1]))
            if self._memory is not None:
                enlarged[..., :start, :] = self._memory[..., :start, :]
            self._memory = enlarged
        self._memory[..., start:end, :] = new
        self.length = end

    def read(self, first: int = 0) -> Tensor:
        """All tokens from `first` on."""
        assert self._memory is not None, "nothing is stored"
        return self._memory[..., first : self.length, :]


class CacheLayer:
    """Keys and values of one attention layer, (rows, heads, tokens, d_head), under the names that Hugging Face uses."""

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        """The sliding window; None: full attention."""
        self._keys, self._values, self._indexer_keys = _Buffer(), _Buffer(), _Buffer()

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append new keys and values; return all that the new tokens' queries may see."""
        start = self._keys.length
        self._keys.append(keys)
        self._values.append(values)
        return self.read(start)

    def read(self, start: int | None = None) -> tuple[Tensor, Tensor]:
        """All keys and values, or those that the queries of tokens from `start` on may see."""
        first = max(0, start - self.window + 1) if self.window and start is not None else 0
        return self._keys.read(first), self._values.read(first)

    def update_indexer(self, keys: Tensor) -> Tensor:
        """Append the keys by which sparse attention selects tokens, (…, tokens, d); return all of them."""
        self._indexer_keys.append(keys)
        return self._indexer_keys.read()

    update_index = update_indexer

    @property
    def is_plain(self) -> bool:
        """Whether the layer stores nothing but keys and values."""
        return self._indexer_keys.length == 0

    def get_seq_length(self) -> int:
        """The number of tokens stored."""
        return self._keys.length

    def rollback(self, length: int) -> None:
        """Drop every token after the first `length`."""
        for buffer in (self._keys, self._values, self._indexer_keys):
            buffer.length = min(buffer.length, length)


class KVCache:
    """The `past_key_values` of a Hugging Face block: the block calls `update` and attends to what that returns."""

    def __init__(self, n_blocks: int, windows: Sequence[int | None]) -> None:
        self.layers = [CacheLayer(window) for window in windows]
        """The attention layers: usually block i has layer i; blocks with two attentions have two, others none."""
        self.lengths = [0] * n_blocks
        """The number of tokens that have entered each block."""
        self.shared = _SharedStates(self)
        """Keys and values that later blocks read too (Gemma 3n)."""
        self.store_only = False
        """Whether `update` raises `KeysStored` instead of returning."""
        self.updated: list[int] = []
        """The layers that were updated since the last `begin`."""
        self.start = 0
        """The number of tokens that had entered the block that runs."""

    def begin(self, block: int, *, store_only: bool = False) -> None:
        """A block, counted from 0, is about to run."""
        self.start, self.updated, self.store_only = self.lengths[block], [], store_only

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append a layer's new keys and values, (rows, heads, tokens, d_head); return all its queries may see."""
        visible = self.layers[layer_idx].append(keys, values)
        self.updated.append(layer_idx)
        if self.store_only:
            raise KeysStored
        return visible

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """Append the keys by which sparse attention selects tokens, (rows, tokens, d); return all of them."""
        return self.layers[layer_idx].update_indexer(keys)

    def get(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer that has stored some."""
        return self.layers[layer_idx].read()

    def rollback(self, length: int) -> None:
        """Drop every token after the first `length`, in every block."""
        self.lengths = [min(entered, length) for entered in self.lengths]
        for layer in self.layers:
            layer.rollback(length)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens stored in a layer, under the name that Hugging Face calls."""
        return self.layers[layer_idx].get_seq_length()


class _SharedStates(UserDict[Any, Any]):
    """Keys and values that a block leaves for later ones, read from the cache: a later block may have queued tokens
    that the block with the keys has run on long ago.
    """

    def __init__(self, cache: KVCache) -> None:
        super().__init__()
        self._cache = cache

    def __setitem__(self, key: Any, item: Any) -> None:
        super().__setitem__(key, self._cache.updated[-1])

    def __getitem__(self, key: Any) -> Any:
        return self._cache.layers[super().__getitem__(key)].read(self._cache.start)


def _windows(model: Model) -> list[int | None]:
    """The sliding window of each attention layer, or None, as Hugging Face's own cache has them."""
    layers: list[Any] = DynamicCache(config=model.text_config).layers
    return [layer.sliding_window if getattr(layer, "is_sliding", False) else None for layer in layers]


def prompt_positions(model: Model, ids: Tensor, mask: Tensor | None) -> Tensor:
    """The positions of a prompt as `generate` of Hugging Face makes them, counted without padding on the left.

    They are (rows, T), or (axes, rows, T) for a model whose positions have several axes.
    """
    attended = torch.ones_like(ids) if mask is None else mask
    prepare = getattr(model.hf, "_prepare_position_ids_for_generation", None)
    if prepare is not None and takes_positions(model.hf):
        positions: Tensor = prepare(ids, {"attention_mask": attended})
        return positions
    return (attended.long().cumsum(-1) - 1).clamp_min(0)


def takes_positions(module: nn.Module) -> bool:
    return "position_ids" in inspect.signature(module.forward).parameters


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

    def __init__(self, model: Model, blocks: Blocks, mask: Tensor | None, positions: Tensor) -> None:
        """`mask` and `positions` are those of the prompt, (rows, T); positions of several axes (axes, rows, T)."""
        self._blocks = blocks
        self.n_blocks = model.n_blocks
        self.cache = KVCache(model.n_blocks, _windows(model))
        self._queues: list[Tensor | None] = [None] * self.n_blocks
        """States at level l that block l + 1 has not run on, (rows, tokens, d_model)."""
        self._mask, self._positions = mask, positions
        self.length = 0
        """Tokens entered so far, in every row."""
        self.padding: list[int] | None = None if mask is None else (mask == 0).sum(1).tolist()
        """Columns of padding on the left of each row; None: there is no padding."""
        self.counts = Counts()
        self._kept: dict[int, Tensor] = {}
        """Level → its states of the latest tokens, (rows, tokens, d_model), the last that entered its block last."""
        self._spliced: dict[int, list[int]] = {}
        """Block → the cache layers that hold tokens which entered it by a splice."""

    def keep_levels(self, levels: Iterable[int]) -> None:
        """Keep the latest states of these levels, from 1 to L, for `kept`."""
        self._kept |= {level: torch.empty(0) for level in levels}

    def kept(self, level: int) -> Tensor:
        """The states of a level of the latest tokens, (rows, tokens, d_model); the last is the newest that has run."""
        return self._kept[level]

    @property
    def positions(self) -> Tensor:
        """The newest token's position in every row, counted without padding."""
        positions = self._positions if self._positions.dim() == 2 else self._positions[0]
        return positions[:, self.length - 1]

    def extend(self, ids: Tensor) -> Tensor:
        """Enter the sequences with their new tokens, ids (rows, T); the new tokens' states at level 0."""
        self.length = length = ids.shape[1]
        while self._positions.shape[-1] < length:
            self._positions = torch.cat([self._positions, self._positions[..., -1:] + 1], -1)
        if self._mask is not None and self._mask.shape[1] < length:
            new = self._mask.new_ones(len(self._mask), length - self._mask.shape[1])
            self._mask = torch.cat([self._mask, new], 1)
        mask = None if self._mask is None else self._mask[:, :length]
        states = self._blocks.embed(ids, mask, self._positions[..., :length], self.cache)
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
        if block in self._kept:
            before = self._kept[block]
            self._kept[block] = torch.cat([before, output], 1)[:, -_KEPT_TOKENS:] if before.numel() else output
        if block < self.n_blocks:
            queue = self._queues[block]
            self._queues[block] = output if queue is None else torch.cat([queue, output], 1)
        return output

    def run_all(self) -> Tensor:
        """Run every block that tokens wait for; level L of all tokens that had not reached it."""
        states = torch.empty(0)
        for block in range(1, self.n_blocks + 1):
            if self._queues[block - 1] is not None:
                states = self.run(block)
        return states

    def fill(self, block: int, states: Tensor) -> None:
        """Store keys and values of predicted states in a block, counted from 1, and empty its queue."""
        self.counts.filled_blocks += 1
        self._blocks.store(block - 1, states)
        self._queues[block - 1] = None

    def splice(self, level: int, states: Tensor) -> Tensor:
        """Run the blocks above a level on predicted states of tokens that wait below it; their level L.

        States, (rows, tokens, d_model), follow the tokens that these blocks have stored. `end_splice` drops them again.
        """
        for block in range(level, self.n_blocks):
            self.counts.block_runs += 1
            self.counts.block_tokens += states.shape[0] * states.shape[1]
            self.cache.begin(block)
            states = self._blocks.run(block, states)
            self._spliced[block] = list(self.cache.updated)
        return states

    @property
    def is_spliced(self) -> bool:
        """Whether blocks hold tokens that entered by a splice."""
        return bool(self._spliced)

    def end_splice(self, length: int) -> None:
        """Drop the predicted states after the first `length` tokens, so that the tokens themselves can enter."""
        for block, layers in self._spliced.items():
            self.cache.lengths[block] = length
            for layer in layers:
                self.cache.layers[layer].rollback(length)
        self._spliced = {}

    def rollback(self, length: int) -> None:
        """Drop every token after the first `length`; all blocks must have run on the others."""
        n_dropped = self.cache.lengths[0] - length
        for level, states in self._kept.items():
            self._kept[level] = states[:, : states.shape[1] - n_dropped] if n_dropped > 0 else states
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
        # Hugging Face's `generate` passes positions to the models that take them.
        self._takes_positions = takes_positions(self._stack) and takes_positions(model.hf)
        self._calls: dict[int, list[Call]] = {}
        """The calls of all blocks, by the number of tokens that a block has stored."""
        self._layers: dict[int, list[int]] = {}
        """The cache layers that each block updates."""

    @torch.no_grad()
    def embed(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: KVCache) -> Tensor:
        self._ids, self._mask, self._positions, self._cache = ids, mask, positions, cache
        self._calls = {}
        return self._record_calls(cache.lengths[0])

    def run(self, index: int, states: Tensor) -> Tensor:
        cache = self._cache
        cache.begin(index)
        output = self._call(index).repeat(self._blocks[index], states)
        cache.lengths[index] += states.shape[1]
        self._layers[index] = list(cache.updated)
        return output

    def store(self, index: int, states: Tensor) -> None:
        # Only of a block that is known to have one plain attention; any other runs as a whole.
        layers = [self._cache.layers[layer] for layer in self._layers.get(index, ())]
        if len(layers) != 1 or not layers[0].is_plain:
            self.run(index, states)
            return
        self._cache.begin(index, store_only=True)
        try:
            self._call(index).repeat(self._blocks[index], states)
        except KeysStored:
            self._cache.lengths[index] += states.shape[1]
            return
        finally:
            self._cache.store_only = False
        raise BadModel(f"block {index + 1} did not pass its keys and values to the cache")

    def _call(self, index: int) -> Call:
        """The call of a block on the tokens that have not entered it."""
        stored = self._cache.lengths[index]
        if stored not in self._calls:
            self._record_calls(stored)
        return self._calls[stored][index]

    def _record_calls(self, stored: int) -> Tensor:
        """Record every block's call for the tokens after the first `stored`; the states at level 0."""
        # An empty cache that reports `stored` tokens for every layer.
        placeholder = DynamicCache(config=self._config)
        layers: list[Any] = placeholder.layers
        for layer in layers:
            if hasattr(layer, "recurrent_states"):
                raise BadModel("its blocks keep a recurrent state")
            if layer.is_sliding:
                layer.cumulative_length = stored
            elif stored:
                # A view of one number: the shape is all that is read.
                layer.keys = layer.values = torch.empty(1).expand(1, 1, stored, 1)
                layer.is_initialized = True
        inputs: dict[str, Any] = {"input_ids": self._ids[:, stored:], "attention_mask": self._mask}
        if self._takes_positions:
            inputs["position_ids"] = self._positions[..., stored:].contiguous()
        with intercept_calls(self._structure) as calls:
            self._stack(**inputs, past_key_values=placeholder, use_cache=True)
        if not any(value is placeholder for call in calls for value in (*call.args, *call.kwargs.values())):
            raise BadModel("its blocks take no cache of keys and values")

        def replace_cache(value: Any) -> Any:
            if value is placeholder:
                return self._cache
            # A dictionary through which blocks share keys and values.
            return self._cache.shared if isinstance(value, (dict, UserDict)) and not value else value

        self._calls[stored] = [
            replace(
                call,
                args=tuple(map(replace_cache, call.args)),
                kwargs={name: replace_cache(value) for name, value in call.kwargs.items()},
            )
            for call in calls
        ]
        return calls[0].states
