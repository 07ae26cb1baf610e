"""`submodules`: what happens when attention, feed-forward or the norms become matrices (papers' section 7).

`mat_x at level l`: blocks 1 to l run as they are; in all later ones sub-module x is replaced by its fitted map, at all
positions; sums, the final norm and the head stay exact. Nothing that runs is fitted on the replaced network, so errors
add up. All norms are replaced together. Beside it: one block at a time, and why (see `one_block`).

The authors define this for GPT-2 alone. For the others the definition is ours. Attention: from what enters it to what
it adds to the stream (in sandwich blocks, that is after the norm of its own output; that norm goes with it).
Cross-attention and feed-forward: likewise. Norms: those that attention and feed-forward read through, or, in a
post-norm block, those after each sum; each map reads what its norm reads.
"""

from __future__ import annotations

from torch import Tensor

from layerjump.compress.changes import mapped
from layerjump.compress.linearised import PARTS, pairs_of
from layerjump.compress.surgery import Changes
from layerjump.fit.jumps import Jumps
from layerjump.inputs.models import Model
from layerjump.lens.lens import Lens
from layerjump.studies import everywhere, one_block
from layerjump.studies.result import Result, Row
from layerjump.studies.setup import Setup
from layerjump.studies.variants import Variants, announce, budgeted, runs

LEVELS = 12
"""A deeper model starts from so many evenly spaced levels, and the last."""


def run(setup: Setup) -> Result:
    """Replace each kind of sub-module from every level on, then in one block at a time."""
    estimator = setup.settings.estimators[0]
    jumps = everywhere.jumps(setup, estimator, "submodules")
    rows, cost, levels = _suffix(setup, jumps)
    result = Result("submodules", {"suffix": rows})
    alone = one_block.run(setup, jumps)
    result.tables |= alone.tables
    result.notes += alone.notes
    result.settings = {
        "estimator": estimator,
        "n_fit": jumps.provenance.n_fit,
        "positions": jumps.provenance.positions,
        "budget": setup.settings.budget,
        "levels": levels,
        "suffix": cost,
        "one block": alone.settings,
    }
    result.headline = _headline(rows, setup.model.n_blocks) | alone.headline
    if len(levels) <= setup.model.n_blocks:
        result.notes.append(f"Levels {', '.join(map(str, levels))} only, to keep to the budget.")
    if setup.model.masked:
        result.notes.append(
            "The authors replace sub-modules of GPT-2 only; for an encoder the definition is ours: both norms of a "
            "block stand after its sums, and each is replaced by a map of what it reads."
        )
    return result


def parts_of(model: Model) -> list[str]:
    """The parts this model has."""
    return [part for part in PARTS if pairs_of(model, 1, part)]


def start_levels(blocks: int) -> list[int]:
    """The levels from which on a part is replaced: all, or an even choice in a deep model; always 0 and L."""
    if blocks <= LEVELS:
        return list(range(blocks + 1))
    return sorted({round(place * blocks / LEVELS) for place in range(LEVELS + 1)})


def _suffix(setup: Setup, jumps: Jumps) -> tuple[list[Row], dict[str, object], list[int]]:
    model, blocks = setup.model, setup.model.n_blocks
    levels, parts, batches = start_levels(blocks), parts_of(model), budgeted(setup)
    lenses = {"jump to last": setup.settings.estimators[0], "identity": "identity"}
    named = {name: setup.lenses()[lens] for name, lens in lenses.items()}
    cost = announce(
        "submodules, from a level on",
        model,
        batches,
        block_runs=len(parts) * sum(blocks - level for level in levels),
        readings=(len(parts) + len(named)) * len(levels) + 1,
    )
    changes = {part: _changes(model, jumps, part) for part in parts}
    variants = Variants(model)
    for rerun in runs(setup, batches, variants):
        for level in levels:
            for part in parts:
                last = rerun.from_level(level, changes=changes[part])
                variants.add((part, level), rerun.picked(last))
            state = rerun.picked(rerun.levels[level])
            for name, lens in named.items():
                _read(variants, (name, level), lens, state)
    rows: list[Row] = [
        {"part": part, "level": level} | variants.row((part, level), seed=setup.settings.seed)
        for part in (*parts, *named)
        for level in levels
    ]
    return rows, cost, levels


def _read(variants: Variants, name: tuple[str, int], lens: Lens, state: Tensor) -> None:
    variants.add_logits(name, lambda part: lens.logits(name[1], state[part]))


def _changes(model: Model, jumps: Jumps, part: str) -> Changes:
    return {
        pair: mapped(jumps[pair])
        for block in range(1, model.n_blocks + 1)
        for pair in pairs_of(model, block, part)
    }


def _headline(rows: list[Row], blocks: int) -> dict[str, object]:
    """Mean P@1 below the last level for each part, and the part whose replacement costs least."""
    below = [row for row in rows if row["level"] < blocks]
    found: dict[str, object] = {}
    means: dict[str, float] = {}
    for part in dict.fromkeys(row["part"] for row in below):
        mine = [row["p@1"] for row in below if row["part"] == part]
        means[part] = sum(mine) / len(mine)
        found[f"mean_p@1_{part.replace(' ', '_')}"] = means[part]
    tolerant = {part: mean for part, mean in means.items() if part in PARTS}
    return {"most_tolerant": max(tolerant, key=lambda part: tolerant[part])} | found
