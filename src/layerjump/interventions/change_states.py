"""Change hidden states at sites of a running model.

    pair = "3.attn.in", "3.attn.out"
    with change_states(model, {pair: replace_by_map(jumps[pair])}):
        model.hf(input_ids)                       # the attention of block 3 is a linear map here

A replaced sub-module still runs and its output is discarded: this is for measurements, not for speed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerjump.errors import BadModel
from layerjump.jumps.maps import apply_map
from layerjump.models.hooks import Hooks
from layerjump.models.model import Model
from layerjump.models.sites import Pair, parse_pair
from layerjump.models.structure import Tap

Map = Callable[[Tensor], Tensor]
"""A function of hidden states, such as a jump."""
Change = Callable[[Tensor, Tensor], Tensor]
"""(states at the source, exact states at the target) → states that replace those at the target."""
Changes = Mapping[Pair, Change]
"""(source, target) → the change of the states at the target."""


def replace_by_map(jump: Map) -> Change:
    """A change to the output of a map of the source."""
    return lambda source, exact: apply_map(jump, source)


def replace_by_constant(vector: Tensor) -> Change:
    """A change to the same vector at every position, such as zeros or the mean."""
    return lambda source, exact: vector.to(exact).expand_as(exact)


def add_noise(jump: Map, *, seed: int) -> Change:
    """A change that adds noise in a random direction, as long as the error of a map at the same position.

    Compared with the map itself, it separates harmless errors from errors that are merely small.
    """
    generator = torch.Generator().manual_seed(seed)

    def change(source: Tensor, exact: Tensor) -> Tensor:
        error = (apply_map(jump, source).to(exact) - exact).norm(dim=-1, keepdim=True)
        noise = torch.randn(exact.shape, generator=generator).to(exact)
        return exact + noise * (error / noise.norm(dim=-1, keepdim=True))

    return change


def restrict_to(columns: slice, change: Change) -> Change:
    """A change of some coordinates only, such as those of one attention head; it sees only these of the target."""

    def change_columns(source: Tensor, exact: Tensor) -> Tensor:
        states = exact.clone()
        states[..., columns] = change(source, exact[..., columns]).to(exact)
        return states

    return change_columns


@contextmanager
def change_states(model: Model, changes: Mapping[Any, Change]) -> Iterator[Model]:
    """Change hidden states in every forward pass inside the `with` block, however the model is called.

    Keys are pairs of sites as in `Jumps`: `Site` objects, names or level numbers. A level as the target replaces what
    the blocks between source and target compute.
    """
    with ChangeHooks(model, changes):
        yield model


class ChangeHooks(Hooks):
    """Hooks that apply changes while the model runs."""

    def __init__(self, model: Model, changes: Mapping[Any, Change], *, single_block: bool = False) -> None:
        self._changes_at: dict[Tap, list[tuple[Tap, Change]]] = defaultdict(list)
        """Tap whose states are replaced → the taps of the sources, and the changes."""
        for pair, change in changes.items():
            taps = [model.structure.tap(site) for site in parse_pair(pair)]
            source, target = [replace(tap, call=0) for tap in taps] if single_block else taps
            self._changes_at[target].append((source, change))
        self._sources = {source for sources in self._changes_at.values() for source, _ in sources}
        self._captured: dict[Tap, Tensor] = {}
        # Two entries: the full OPT model bypasses the module that `Model.run_body` calls.
        entries = () if single_block else (model.hf, model.stack)
        super().__init__([*self._sources, *self._changes_at], entries=entries)

    def start(self) -> None:
        super().start()
        self._captured.clear()

    def visit(self, tap: Tap, states: Tensor) -> Tensor | None:
        """Replace first, then capture: a change downstream sees the replaced states."""
        changes = self._changes_at.get(tap, [])
        for source, change in changes:
            if source not in self._captured:
                raise BadModel(
                    "expected pairs whose source comes before their target, got a source that the model computes only "
                    "later than the target; swap or change the sites"
                )
            changed = change(self._captured[source].to(states.device), states)
            # Copies, here and below: Falcon adds to its feed-forward output in place.
            states = changed.to(states).reshape(states.shape).clone()
        if tap in self._sources:
            self._captured[tap] = states.clone()
        return states if changes else None
