"""What lenses read in every cell (a level at a position) of one text, in one sweep and within a memory budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerjump.inputs.models import Model
from layerjump.inputs.sites import Site
from layerjump.lens.lens import MEMORY, Route, rows_at_once, wide
from layerjump.measure.metrics import truth
from layerjump.measure.sweep import Said, Sweep

POSITIONS = 64
"""Positions whose truth is held at once; products are of all levels' states there, stacked."""


@dataclass(frozen=True)
class TextStates:
    """One text's states: what all lenses share."""

    sites: tuple[Site, ...]
    states: tuple[Tensor, ...]
    """(positions, d) at each site."""
    last: Tensor
    """(positions, d) at level L: what the model itself says."""
    targets: Tensor
    """(positions,) the token that really comes next; −1 where none does."""

    @property
    def n_positions(self) -> int:
        return len(self.last)


@dataclass(frozen=True)
class Asked:
    """What is wanted of every cell."""

    k: int
    follow: tuple[int, ...] = ()
    js: bool = False


@torch.no_grad()
def read_cells(
    model: Model,
    routes: Mapping[str, Sequence[Route]],
    text: TextStates,
    asked: Asked,
    *,
    memory: int = MEMORY,
) -> tuple[Tensor, dict[str, Said]]:
    """The model's own best tokens, and every site of a text read through every lens.

    Tensors of `Said` are (levels, positions, …) here. A lens is given by its route from each site of the text. At
    level L all lenses are the model.
    """
    rows = rows_at_once(model, memory)
    at_once = min(rows, POSITIONS)
    best: list[Tensor] = []
    parts: dict[str, list[Said]] = {name: [] for name in routes}
    for start in range(0, text.n_positions, at_once):
        own, found = _read(model, routes, text, asked, slice(start, start + at_once), rows)
        best.append(own.top[:, 0])
        for name, said in found.items():
            parts[name].append(said)
    return torch.cat(best), {name: _joined(found) for name, found in parts.items()}


def _read(
    model: Model,
    routes: Mapping[str, Sequence[Route]],
    text: TextStates,
    asked: Asked,
    part: slice,
    rows: int,
) -> tuple[Said, dict[str, Said]]:
    """What the model says at some positions, and all lenses at all sites there."""
    true = truth(wide(model.logits(text.last[part])))
    targets = text.targets[part].to(true.logits.device)
    follow = torch.tensor(asked.follow, dtype=torch.long, device=true.logits.device)

    sweep = Sweep(true, k=asked.k, targets=targets, follow=follow, js=asked.js)

    def said(logits: Tensor) -> Said:
        return Said(*(each.cpu() for each in sweep(logits)))

    own = said(true.logits)
    last = Site(model.n_blocks)
    jobs = [
        (name, place, route)
        for name, mine in routes.items()
        for place, (site, route) in enumerate(zip(text.sites, mine, strict=True))
        if site != last
    ]
    cells = {(name, place): own for name in routes for place in range(len(text.sites))}
    for group in _groups(jobs, max(1, rows // len(true.logits))):
        # One product of many rows costs far less than many of few.
        final = torch.cat([route(text.states[place][part]) for _, place, route in group])
        logits = wide(model.anatomy.decode(final)).split(len(true.logits))
        for (name, place, _), mine in zip(group, logits, strict=True):
            cells[name, place] = said(mine)
    places = range(len(text.sites))
    return own, {name: _stacked([cells[name, place] for place in places]) for name in routes}


def _groups(
    jobs: Sequence[tuple[str, int, Route]], size: int
) -> Iterator[Sequence[tuple[str, int, Route]]]:
    return (jobs[start : start + size] for start in range(0, len(jobs), size))


def _stacked(levels: Sequence[Said]) -> Said:
    return Said(*(torch.stack(column) for column in zip(*levels, strict=True)))


def _joined(parts: Sequence[Said]) -> Said:
    """Positions beside each other."""
    return Said(*(torch.cat(column, 1) for column in zip(*parts, strict=True)))
