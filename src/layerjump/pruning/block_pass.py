"""Run a model over batches one block at a time, with the states of one level waiting on the disk.

Weights of the next block may change between two runs of it: nothing before it runs again. Memory holds one batch,
whatever the length of the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from layerjump.data.batches import Batch, Batches
from layerjump.jumps.spill_states import StateStore
from layerjump.metrics.token_loss import token_losses_at
from layerjump.models.hooks import Call, Hooks, intercept_calls
from layerjump.models.model import Model
from layerjump.models.sites import Site
from layerjump.models.structure import Tap


class BlockPass:
    """The states of all batches at one level of a model, from which its blocks run one after another."""

    def __init__(self, model: Model, batches: Batches, folder: Path, name: str) -> None:
        self.model, self.batches = model, batches
        self._folder, self._name = folder, name
        self._n_cells = sum(batch.input_ids.numel() for batch in batches)
        self.level = 0
        self._states = self._new_store()
        for batch in batches:
            self._states.append({Site(0): self._calls(batch)[0].states.flatten(0, -2)})

    def fork(self, model: Model, name: str) -> BlockPass:
        """A pass of another model, whose blocks up to this level are the same, with copies of the states."""
        other = object.__new__(BlockPass)
        other.model, other.batches, other.level = model, self.batches, self.level
        other._folder, other._name, other._n_cells = self._folder, name, self._n_cells
        other._states = other._new_store()
        for _, states in self.states():
            other._states.append({Site(self.level): states.flatten(0, -2)})
        return other

    def states(self) -> Iterator[tuple[Batch, Tensor]]:
        """Yield each batch with its states (rows, positions, width) at the level of the pass."""
        start = 0
        for batch in self.batches:
            shape = batch.input_ids.shape
            rows = self._states.read(Site(self.level), start, start := start + shape.numel())
            yield batch, rows.view(*shape, -1)

    def picked_states(self) -> Iterator[Tensor]:
        """Yield the states of each batch at its picked positions."""
        for batch, states in self.states():
            yield states[batch.row.to(states.device), batch.position.to(states.device)]

    @torch.no_grad()
    def advance(self, level: int) -> None:
        """Run the blocks up to a level."""
        while self.level < level:
            last, self.level = self._states, self.level + 1
            following = self._new_store()
            start = 0
            for batch in self.batches:
                shape = batch.input_ids.shape
                rows = last.read(Site(self.level - 1), start, start := start + shape.numel())
                states = self._run_block(self.level, self._calls(batch), rows.view(*shape, -1))
                following.append({Site(self.level): states.flatten(0, -2)})
            last.close()
            self._states = following

    @torch.no_grad()
    def visit(self, taps: Mapping[str, Tap]) -> Iterator[dict[str, Tensor]]:
        """Run the next block without moving on; yield the states at taps in it, at each batch's picked positions."""
        with _TapCapture(taps) as capture:
            for batch, states in self.states():
                capture.states.clear()
                self._run_block(self.level + 1, self._calls(batch), states)
                picks = batch.row * batch.input_ids.shape[1] + batch.position
                yield {name: rows[picks.to(rows.device)] for name, rows in capture.states.items()}

    @torch.no_grad()
    def loss(self) -> float:
        """Run all later blocks without moving on; return the mean loss in nats per token."""
        losses = []
        for batch, states in self.states():
            calls = self._calls(batch)
            for block in range(self.level + 1, self.model.n_blocks + 1):
                states = self._run_block(block, calls, states)
            last = states[batch.row.to(states.device), batch.position.to(states.device)]
            losses.append(token_losses_at(self.model, batch, last)[0])
        return float(torch.cat(losses).mean())

    def close(self) -> None:
        """Release the states."""
        self._states.close()

    def _new_store(self) -> StateStore:
        return StateStore([Site(self.level)], self._n_cells, self._folder / f"{self._name} {self.level}")

    def _calls(self, batch: Batch) -> list[Call]:
        # Recorded again for every run: the masks of all batches may not fit into memory.
        with torch.no_grad(), intercept_calls(self.model.structure) as calls:
            self.model.run_body(batch.input_ids, batch.attention_mask)
        return calls

    def _run_block(self, block: int, calls: list[Call], states: Tensor) -> Tensor:
        return calls[block - 1].repeat(self.model.structure.blocks[block - 1], states)


class _TapCapture(Hooks):
    """Hooks that hold the states at taps of one block's run as (rows · positions, width)."""

    def __init__(self, taps: Mapping[str, Tap]) -> None:
        super().__init__(taps.values(), counts_calls=False)
        self._names = {tap: name for name, tap in taps.items()}
        self.states: dict[str, Tensor] = {}

    def visit(self, tap: Tap, states: Tensor) -> None:
        # A copy: Falcon adds to its feed-forward output in place afterwards.
        self.states[self._names[tap]] = states.reshape(-1, states.shape[-1]).clone()
