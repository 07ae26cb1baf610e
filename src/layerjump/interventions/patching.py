"""Replace activations at sites of a running model; rerun it from a level.

What can take the place of a state: its map's prediction, noise, a constant, or one of these on some coordinates.

Operations on a running model: a site's state is changed on the way, and nothing stays behind.

    with replaced(model, {("3.attn.in", "3.attn.out"): mapped(jumps["3.attn.in", "3.attn.out"])}):
        model.hf(input_ids)                       # attention of block 3 is a matrix here

    rerun = Rerun(model, batch)                   # one ordinary pass, remembered
    rerun.from_level(3)                           # blocks 4 to L once more: the same to the last bit
    rerun.from_level(3, changes=changes)          # the same with parts replaced

A part that is replaced is still computed and its result thrown away: this is for measuring, not for speed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from layerjump.data.batches import Batch
from layerjump.errors import BadModel
from layerjump.jumps.jumps import parse_pair
from layerjump.jumps.maps import apply_map
from layerjump.jumps.pairs import Pair
from layerjump.models.hooks import Capture, Hooks, record_calls
from layerjump.models.model import Model
from layerjump.models.structure import Site, Tap

Map = Callable[[Tensor], Tensor]
"""States at a source → states at a target; a jump, for example."""
Change = Callable[[Tensor, Tensor], Tensor]
"""(the states at the source, the target's own states) → the states that go on instead."""


def apply(module: Map, states: Tensor) -> Tensor:
    """A map of states, in the states' own precision (jumps are kept in float32)."""
    return apply_map(module, states) if isinstance(module, nn.Module) else module(states).to(states)


def replace_by_map(module: Map) -> Change:
    """What a map makes of the source."""
    return lambda source, exact: apply(module, source)


def replace_by_constant(vector: Tensor) -> Change:
    """The same vector at every position: zeros, or a mean."""
    return lambda source, exact: vector.to(exact).expand_as(exact)


def add_noise(module: Map, *, seed: int) -> Change:
    """The exact states, off in a random direction by as much as the map is off at that position.

    Beside the map itself it tells errors that do no harm from errors that are merely small.
    """
    generator = torch.Generator().manual_seed(seed)

    def change(source: Tensor, exact: Tensor) -> Tensor:
        error = (apply(module, source).to(exact) - exact).norm(dim=-1, keepdim=True)
        noise = torch.randn(exact.shape, generator=generator).to(exact)
        return exact + noise * (error / noise.norm(dim=-1, keepdim=True))

    return change


def restrict_to(columns: slice, change: Change) -> Change:
    """A change of some coordinates (a head's), the others as they are; it sees those coordinates alone."""

    def changed(source: Tensor, exact: Tensor) -> Tensor:
        made = exact.clone()
        made[..., columns] = change(source, exact[..., columns]).to(exact)
        return made

    return changed


Changes = Mapping[Pair, Change]
"""(source, target) → what takes the target's place, made from the source's states."""


@contextmanager
def patch(model: Model, changes: Mapping[Any, Change]) -> Iterator[Model]:
    """Run the model, any way you like, with the targets' states changed; it is whole again afterwards.

    Pairs are given as to `Jumps`: sites, their names or levels' numbers. A level as a target works too, and stands
    for a jump over the blocks in between.
    """
    # Two entries: OPT's whole model runs its decoder past the module that our own passes enter by.
    with _Operation(_cuts(model, changes), entries=(model.hf, model.stack)):
        yield model


class Rerun:
    """One batch, run once in the ordinary way; from any level on it can be run again and again.

    The calls of the blocks (masks, rotary embeddings, biases) are those that Hugging Face made, so every family
    works. All L + 1 levels of all positions are held: keep batches small.
    """

    def __init__(self, model: Model, batch: Batch) -> None:
        self.model = model
        self.batch = batch
        blocks, last = model.structure.blocks, Site(model.n_blocks)
        with (
            torch.no_grad(),
            record_calls(blocks) as self._calls,
            Capture(model.structure, [last]) as capture,
        ):
            model.body(batch.input_ids, batch.attention_mask, batch.source_ids, batch.source_mask)
        self.levels = [call.states for call in self._calls] + [capture.take()[last]]
        """(rows, positions, d) at levels 0 to L."""

    @torch.no_grad()
    def from_level(
        self,
        level: int,
        states: Tensor | None = None,
        *,
        changes: Changes | None = None,
        to: int | None = None,
    ) -> Tensor:
        """The states at level `to` (L unless told), from those at a level (the ordinary pass's unless given).

        Changes are of parts of the blocks that are run; those of other blocks have no say.
        """
        hidden = self.levels[level] if states is None else states
        last = self.model.n_blocks if to is None else to
        by_block: dict[int, dict[Pair, Change]] = defaultdict(dict)
        for pair, change in (changes or {}).items():
            by_block[_block_of(pair)][pair] = change
        for block in range(level + 1, last + 1):
            hidden = self._run(block, hidden, by_block.get(block))
        return hidden

    def picked(self, states: Tensor) -> Tensor:
        """The states of the batch's picks, (picks, d)."""
        return states[self.batch.row.to(states.device), self.batch.position.to(states.device)]

    def _run(self, block: int, hidden: Tensor, changes: Changes | None) -> Tensor:
        module = self.model.structure.blocks[block - 1]
        call = self._calls[block - 1]
        if not changes:
            return call.repeat(module, hidden)
        # One block runs, so each of its modules is called for the first time, even where blocks share them.
        cuts = [
            replace(cut, source=replace(cut.source, call=0), target=replace(cut.target, call=0))
            for cut in _cuts(self.model, changes)
        ]
        with _Operation(cuts):
            return call.repeat(module, hidden)


@dataclass(frozen=True)
class _Cut:
    """One change: where its source is read, where its target is replaced."""

    source: Tap
    target: Tap
    change: Change


class _Operation(Hooks):
    """Hooks that carry out cuts while the model runs; they are gone when the `with` ends."""

    def __init__(self, cuts: Sequence[_Cut], *, entries: Iterable[nn.Module] = ()) -> None:
        self._by_target: dict[Tap, list[_Cut]] = defaultdict(list)
        for cut in cuts:
            self._by_target[cut.target].append(cut)
        self._sources = {cut.source for cut in cuts}
        self._seen: dict[Tap, Tensor] = {}
        super().__init__([*self._sources, *self._by_target], entries=entries)

    def start(self) -> None:
        super().start()
        self._seen.clear()

    def visit(self, tap: Tap, states: Tensor) -> Tensor | None:
        """Replace, then remember for others: what is read downstream is what was put there."""
        cuts = self._by_target.get(tap, [])
        for cut in cuts:
            states = self._changed(cut, states)
        if tap in self._sources:
            # Copies, here and below: Falcon adds to its feed-forward output in place.
            self._seen[tap] = states.clone()
        return states if cuts else None

    def _changed(self, cut: _Cut, states: Tensor) -> Tensor:
        if cut.source not in self._seen:
            raise BadModel(
                "a state was to be replaced by a map of one that the model computes only later; give pairs whose "
                "source comes before their target"
            )
        made = cut.change(self._seen[cut.source].to(states.device), states)
        return made.to(states).reshape(states.shape).clone()


def _cuts(model: Model, changes: Mapping[Any, Change]) -> list[_Cut]:
    structure = model.structure
    cuts = []
    for given, change in changes.items():
        source, target = parse_pair(given)
        cuts.append(_Cut(structure.tap(source), structure.tap(target), change))
    return cuts


def _block_of(pair: Pair) -> int:
    source, target = parse_pair(pair)
    if source.between_blocks or target.between_blocks or source.index != target.index:
        raise BadModel(
            f"the change {source} → {target} is not inside one block; give the states at a level instead"
        )
    return target.index
