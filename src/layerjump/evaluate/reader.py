"""Teacher-forced early exit: each position of a given text is read at the first level where the rule stops.

The text is given, so no token depends on where an earlier one left, and keys and values are the model's own: this is
what `generate` with an exact cache would have read at every position. A rule that looks at a shortlist of tokens
decides by it here too; what is read where it stops is the whole vocabulary, since any token may be asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from layerjump.decode.rules import Look, Rule, levels_of
from layerjump.decode.shortlist import shortlist_of
from layerjump.fit.jumps import Jumps
from layerjump.inputs.models import Model
from layerjump.inputs.sites import Site
from layerjump.lens.lens import Lens, rows_at_once


class Reader:
    """Reads states at the levels that a rule checks, and counts where positions left."""

    def __init__(self, model: Model, jumps: Jumps | None, rule: Rule) -> None:
        self.levels = levels_of(rule, model.n_blocks)
        self.left = [0] * (model.n_blocks + 1)
        """How many positions left at each level."""
        self._lens, self._rule, self._last = Lens(model, jumps), rule, model.n_blocks
        among = shortlist_of(rule)
        self._early = None if among is None else Lens(among.model(model), jumps)
        self._rows = rows_at_once(model)
        if jumps is not None:
            jumps.to(model.device)

    @property
    def mean_level(self) -> float | None:
        """The level at which positions left, on average; None before any has."""
        read = sum(self.left)
        return sum(level * n for level, n in enumerate(self.left)) / read if read else None

    @torch.no_grad()
    def read(self, at: Mapping[Site, Tensor], position: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and their logits, level by level, from states (rows, d) at each level and 0-based positions.

        Rows that go up to level L come last if its states are given; without them they are left to the caller.
        """
        for part in torch.arange(len(position), device=position.device).split(self._rows):
            yield from self._part(at, position, part)

    def _part(
        self, at: Mapping[Site, Tensor], position: Tensor, rows: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        earlier: tuple[Tensor, ...] = ()
        for level in self.levels:
            state = at[Site(level)][rows]
            seen = self._early or self._lens
            look = Look(level, state, position[rows], seen.logits, earlier)
            stops = self._rule.stops(look)
            if bool(stops.any()):
                self.left[level] += int(stops.sum())
                logits = self._lens.logits(level, state) if self._early else look.logits
                yield rows[stops], logits[stops]
            earlier += (look.top,) if look.predicted else ()
            rows, earlier = rows[~stops], tuple(top[~stops] for top in earlier)
            if not len(rows):
                return
        self.left[self._last] += len(rows)
        if (last := Site(self._last)) in at:
            yield rows, self._lens.logits(last, at[last][rows])
