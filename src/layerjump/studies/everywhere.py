"""Fits for maps that are applied at every position: position 0 and special tokens are fitted on too.

A masked model sees the same share of [MASK]s as it is asked about, but is fitted on all positions of that text, not
on the masks alone: its maps must carry the context as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from layerjump.fit.collect import Plan, sampled
from layerjump.fit.collected import Collected
from layerjump.fit.fit import solve_jumps
from layerjump.fit.jumps import Jumps
from layerjump.inputs.positions import MASKED_SHARE, PAPER, Positions
from layerjump.studies.setup import Setup

EVERY = Positions("all", skip_first=0, special=True)


def collected(setup: Setup, pairs: str) -> Collected:
    """Sums over every position (all pairs: over a sample of them), kept for all studies of a run."""

    def make() -> Collected:
        return _plan(setup, pairs).run(progress=setup.progress)

    return setup.keep(f"everywhere {pairs}", make)


def jumps(setup: Setup, estimator: str, pairs: str) -> Jumps:
    """Every map of the pairs, solved once."""
    return setup.keep(
        f"everywhere {estimator} {pairs}",
        lambda: solve_jumps(collected(setup, pairs), estimator, model=setup.model),
    )


def _plan(setup: Setup, pairs: str) -> Plan:
    # All pairs are for schedules, which are chosen on the select split.
    settings: dict[str, Any] = {"select": True} if pairs == "all" else {}
    if not setup.model.masked:
        positions = _asked(setup) or EVERY
        if pairs == "all" and positions == EVERY:
            every = setup.plan(setup.corpus, pairs, positions=EVERY, **settings)
            positions = sampled(every.batches["fit"].n_picks, setup.model.width, everywhere=True)
        return setup.plan(setup.corpus, pairs, positions=positions, **settings)
    masks = _asked(setup) or _parse(MASKED_SHARE)
    made = setup.plan(setup.corpus, pairs, positions=masks, **settings)
    look = EVERY
    if pairs == "all":
        every_fit = made.batches["fit"].look_at(EVERY)
        look = sampled(every_fit.n_picks, setup.model.width, everywhere=True)
    looking = {name: batches.look_at(look) for name, batches in made.batches.items()}
    about = made.about | {"positions": f"{look}, {masks} of them masked"}
    return replace(made, batches=looking, about=about)


def _asked(setup: Setup) -> Positions | None:
    """The positions the run was told to take, position 0 among them."""
    if setup.settings.paper:
        return PAPER
    return _parse(setup.settings.positions) if setup.settings.positions else None


def _parse(text: str) -> Positions:
    return Positions.parse(text, skip_first=0, special=True)
