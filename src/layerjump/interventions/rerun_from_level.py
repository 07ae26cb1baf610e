"""Record one forward pass, and run the model again from any level of it.

rerun = Rerun(model, batch)                   # one ordinary forward pass, recorded
rerun.from_level(3)                           # blocks 4 to L once more, with identical bits
rerun.from_level(3, changes=changes)          # the same with sub-modules replaced
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from layerjump.data.batches import Batch
from layerjump.errors import BadModel
from layerjump.interventions.change_states import Change, ChangeHooks, Changes
from layerjump.models.hooks import Capture, record_calls
from layerjump.models.model import Model
from layerjump.models.sites import Pair, Site, parse_pair


class Rerun:
    """One recorded forward pass over a batch, which can be run again from any level.

    Blocks get the arguments (masks, rotary embeddings, biases) that Hugging Face passed, so every family works. The
    hidden states of all L + 1 levels at all positions stay in memory: use small batches.
    """

    def __init__(self, model: Model, batch: Batch) -> None:
        self.model = model
        self.batch = batch
        last = Site(model.n_blocks)
        with torch.no_grad(), record_calls(model.structure) as self._calls, Capture(model.structure, [last]) as capture:
            model.run_body(
                batch.input_ids, batch.attention_mask, batch.source_ids, batch.source_mask, batch.extra_inputs
            )
        self.levels = [call.states for call in self._calls] + [capture.take()[last]]
        """(rows, positions, d_model) at levels 0 to L."""

    @torch.no_grad()
    def from_level(
        self, level: int, states: Tensor | None = None, *, changes: Changes | None = None, to: int | None = None
    ) -> Tensor:
        """Run the blocks after `level` and return the hidden states at level `to` (default: L).

        `states` replace the recorded hidden states at `level`. `changes` apply inside single blocks; those of blocks
        that do not run are ignored.
        """
        states = self.levels[level] if states is None else states
        by_block: dict[int, dict[Pair, Change]] = defaultdict(dict)
        for pair, change in (changes or {}).items():
            source, target = parse_pair(pair)
            if source.between_blocks or target.between_blocks or source.index != target.index:
                raise BadModel(
                    f"expected changes inside one block, got {source} → {target}; pass the states at a level instead"
                )
            by_block[target.index][pair] = change
        for block in range(level + 1, (self.model.n_blocks if to is None else to) + 1):
            module, call = self.model.structure.blocks[block - 1], self._calls[block - 1]
            if block not in by_block:
                states = call.repeat(module, states)
                continue
            # A single block runs, so this is the first call of its modules, even of those that blocks share.
            with ChangeHooks(self.model, by_block[block], single_block=True):
                states = call.repeat(module, states)
        return states

    def pick(self, states: Tensor) -> Tensor:
        """(picks, d_model) hidden states at the batch's picked positions."""
        return states[self.batch.row.to(states.device), self.batch.position.to(states.device)]
