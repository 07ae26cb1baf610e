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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from layerjump.data.batches import Batch
from layerjump.errors import BadModel
from layerjump.jumps.jumps import parse_pair
from layerjump.jumps.maps import apply_map
from layerjump.jumps.pairs import Pair
from layerjump.models.hooks import Hooks
from layerjump.models.model import Model
from layerjump.models.structure import Tap

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
    with _Operation(_cuts(model, changes)) as operation:
        # OPT's whole model runs its decoder past the module that our own passes enter by.
        doors = {model.hf, model.stack}
        handles = [door.register_forward_pre_hook(lambda *_: operation.start()) for door in doors]
        try:
            yield model
        finally:
            for handle in handles:
                handle.remove()


class Rerun:
    """One batch, run once in the ordinary way; from any level on it can be run again and again.

    The calls of the blocks (masks, rotary embeddings, biases) are those that Hugging Face made, so every family
    works. All L + 1 levels of all positions are held: keep batches small.
    """

    def __init__(self, model: Model, batch: Batch) -> None:
        self.model = model
        self.batch = batch
        self.levels: list[Tensor] = []
        """(rows, positions, d) at levels 0 to L."""
        self._calls = record_calls(model, batch, self.levels)

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
        args, kwargs = self._calls[block - 1]
        if not changes:
            return first_of(module(hidden, *args, **kwargs))
        # One block runs, so each of its modules is called for the first time, even where blocks share them.
        cuts = [
            replace(cut, source=replace(cut.source, call=0), target=replace(cut.target, call=0))
            for cut in _cuts(self.model, changes)
        ]
        with _Operation(cuts):
            return first_of(module(hidden, *args, **kwargs))


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""What a block was given beside the states: masks, rotary embeddings, biases."""


@torch.no_grad()
def record_calls(model: Model, batch: Batch, levels: list[Tensor]) -> list[Call]:
    """Run a batch in the ordinary way; the calls of its blocks are returned, its levels are put in the list."""
    calls: list[Call] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        levels.append(args[0])
        calls.append((args[1:], kwargs))

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if len(calls) == model.n_blocks:
            levels.append(first_of(output))

    handles: list[RemovableHandle] = []
    try:
        for module in set(model.structure.blocks):
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after))
        sources = batch.source_ids, batch.source_mask
        model.body(batch.input_ids, batch.attention_mask, *sources)
    finally:
        for handle in handles:
            handle.remove()
    return calls


@dataclass(frozen=True)
class _Cut:
    """One change: where its source is read, where its target is replaced."""

    source: Tap
    target: Tap
    change: Change


class _Operation(Hooks):
    """Hooks that carry out cuts while the model runs; they are gone when the `with` ends."""

    def __init__(self, cuts: Sequence[_Cut]) -> None:
        self._by_target: dict[Tap, list[_Cut]] = defaultdict(list)
        for cut in cuts:
            self._by_target[cut.target].append(cut)
        self._sources = {cut.source for cut in cuts}
        taps = [*self._sources, *self._by_target]
        super().__init__(dict.fromkeys((tap.module, tap.side) for tap in taps))
        self.start()

    def start(self) -> None:
        """A forward pass begins: no module has been called yet."""
        self._calls: dict[tuple[nn.Module, str], int] = defaultdict(int)
        self._seen: dict[Tap, Tensor] = {}

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = self._visit(module, "in", args[0] if args else kwargs["hidden_states"])
        if changed is None:
            return None
        if args:
            return (changed, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": changed}

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        changed = self._visit(module, "out", first_of(output))
        if changed is None:
            return None
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    def _visit(self, module: nn.Module, side: Any, states: Tensor) -> Tensor | None:
        """Replace, then remember for others: what is read downstream is what was put there. None: unchanged."""
        tap = Tap(module, side, self._calls[module, side])
        self._calls[module, side] += 1
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


def first_of(output: Any) -> Tensor:
    """The states that a module gives, whatever else comes with them."""
    return output[0] if isinstance(output, tuple) else output
