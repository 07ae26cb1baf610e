"""What can take the place of a state: its map's prediction, noise, a constant, or one of these on some coordinates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from layerjump.lens.lens import through

Map = Callable[[Tensor], Tensor]
"""States at a source → states at a target; a jump, for example."""
Change = Callable[[Tensor, Tensor], Tensor]
"""(the states at the source, the target's own states) → the states that go on instead."""


def apply(module: Map, states: Tensor) -> Tensor:
    """A map of states, in the states' own precision (jumps are kept in float32)."""
    return through(module, states) if isinstance(module, nn.Module) else module(states).to(states)


def mapped(module: Map) -> Change:
    """What a map makes of the source."""
    return lambda source, exact: apply(module, source)


def constant(vector: Tensor) -> Change:
    """The same vector at every position: zeros, or a mean."""
    return lambda source, exact: vector.to(exact).expand_as(exact)


def noisy(module: Map, *, seed: int) -> Change:
    """The exact states, off in a random direction by as much as the map is off at that position.

    Beside the map itself it tells errors that do no harm from errors that are merely small.
    """
    generator = torch.Generator().manual_seed(seed)

    def change(source: Tensor, exact: Tensor) -> Tensor:
        error = (apply(module, source).to(exact) - exact).norm(dim=-1, keepdim=True)
        noise = torch.randn(exact.shape, generator=generator).to(exact)
        return exact + noise * (error / noise.norm(dim=-1, keepdim=True))

    return change


def only(columns: slice, change: Change) -> Change:
    """A change of some coordinates (a head's), the others as they are; it sees those coordinates alone."""

    def changed(source: Tensor, exact: Tensor) -> Tensor:
        made = exact.clone()
        made[..., columns] = change(source, exact[..., columns]).to(exact)
        return made

    return changed
