"""Sub-modules replaced in one block at a time, and why that costs what it costs: part of `submodules`.

A map can do well because its sub-module is nearly linear, or because what it adds is small. For each sub-module of
each block: R² of its map; how long its output is beside the stream; how much of attention goes to the token itself and
to the sink at position 0; and the KL of three replacements, the map, the mean output (a constant), and the exact output
plus noise of the length of the map's error. A map far better than the mean is linear; one no better is merely small.
A map better than its noise is wrong in directions that do not matter.

`submodules`: what happens when attention, feed-forward or the norms become matrices (papers' section 7).

`mat_x at level l`: blocks 1 to l run as they are; in all later ones sub-module x is replaced by its fitted map, at all
positions; sums, the final norm and the head stay exact. Nothing that runs is fitted on the replaced network, so errors
add up. All norms are replaced together. Beside it: one block at a time, and why (see `one_block`).

The authors define this for GPT-2 alone. For the others the definition is ours. Attention: from what enters it to what
it adds to the stream (in sandwich blocks, that is after the norm of its own output; that norm goes with it).
Cross-attention and feed-forward: likewise. Norms: those that attention and feed-forward read through, or, in a
post-norm block, those after each sum; each map reads what its norm reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerjump.data.batches import Batches
from layerjump.interventions.linearize import PARTS, submodule_pairs
from layerjump.interventions.patching import (
    Change,
    Changes,
    add_noise,
    replace_by_constant,
    replace_by_map,
)
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.pairs import SUBMODULES, Pair
from layerjump.lens.lens import Lens
from layerjump.models.activations import capture_states
from layerjump.models.model import Model
from layerjump.models.structure import Site
from layerjump.studies._untyped import Result, Row, to_json
from layerjump.studies.ablation import Cost, Variants, announce_cost, rerun_batches, small_batches
from layerjump.studies.attention_mass import attention_mass
from layerjump.studies.setup import Setup

SHARE = 0.5
"""Of the run's budget: there are many replacements to try."""
HOW = ("map", "mean", "noise")
NORMS = ("ln1", "lnx", "ln2")


def run_one_block(setup: Setup, jumps: Jumps) -> Result:
    """Two tables: `one block` and `why`."""
    model, batches = setup.model, small_batches(setup, SHARE)
    parts = _single_parts(model)
    norms = [part for part in parts if part in NORMS]
    each = len(HOW) * len(parts) + (len(norms) > 1)
    blocks = model.n_blocks
    cost = announce_cost(
        "submodules, one block at a time",
        model,
        batches,
        block_runs=each * blocks * (blocks + 1) // 2,
        unembeddings=each * blocks + 1,
    )
    variants = Variants(model)
    changes = _block_changes(setup, jumps, parts)
    for rerun in rerun_batches(setup, batches, variants):
        for block in range(1, blocks + 1):
            for name, change in changes[block].items():
                last = rerun.from_level(block - 1, changes=change)
                variants.add((*name, block), rerun.pick(last))
    result = Result("submodules", {"one block": _one_block(variants, parts, blocks)})
    mass, note = attention_mass(model, batches)
    result.notes += [note] if note else []
    result.tables["why"] = _why(model, batches, jumps, variants, mass)
    result.settings = to_json(cost)
    result.headline = _block_headline(result.tables["why"])
    return result


def _single_parts(model: Model) -> list[str]:
    present = set(model.structure.sites())
    return [part for part in SUBMODULES if Site(1, f"{part}.in") in present]


def _pair(block: int, part: str) -> Pair:
    return Site(block, f"{part}.in"), Site(block, f"{part}.out")


def _block_changes(
    setup: Setup, jumps: Jumps, parts: list[str]
) -> dict[int, dict[tuple[str, str], dict[Pair, Change]]]:
    """block → (how, part) → the changes to make."""
    sums = setup.all_position_moments("submodules").fit
    found: dict[int, dict[tuple[str, str], dict[Pair, Change]]] = {}
    for block in range(1, setup.model.n_blocks + 1):
        mine: dict[tuple[str, str], dict[Pair, Change]] = {}
        for place, part in enumerate(parts):
            pair = _pair(block, part)
            seed = 10 * block + place
            mine["map", part] = {pair: replace_by_map(jumps[pair])}
            mine["mean", part] = {pair: replace_by_constant(sums.mean(pair[1]))}
            mine["noise", part] = {pair: add_noise(jumps[pair], seed=seed)}
        norms = [part for part in parts if part in NORMS]
        if len(norms) > 1:
            mine["map", "norms"] = {k: v for part in norms for k, v in mine["map", part].items()}
        found[block] = mine
    return found


def _one_block(variants: Variants, parts: list[str], blocks: int) -> list[Row]:
    norms = [part for part in parts if part in NORMS]
    keys = {part: part for part in parts if part not in NORMS}
    if norms:
        keys["norms"] = norms[0] if len(norms) == 1 else "norms"
    rows: list[Row] = []
    for name, key in keys.items():
        for block in range(1, blocks + 1):
            row = to_json(variants.scores(("map", key, block)))
            rows.append({"part": name, "block": block} | row)
    return rows


def _why(
    model: Model,
    batches: Batches,
    jumps: Jumps,
    variants: Variants,
    mass: list[tuple[float, float]] | None,
) -> list[Row]:
    parts = _single_parts(model)
    lengths = _relative_lengths(model, batches, parts)
    rows: list[Row] = []
    for part in parts:
        for block in range(1, model.n_blocks + 1):
            score = jumps.info[_pair(block, part)].r2
            on_self, on_sink = mass[block - 1] if mass and part == "attn" else (None, None)
            row: Row = {
                "part": part,
                "block": block,
                "r2": score[0] if score else None,
                "r2 weighted": score[1] if score else None,
                "output norm over stream norm": lengths[part, block],
                "attention on self": on_self,
                "attention on sink": on_sink,
            }
            row |= {
                "kl of the map": variants.mean_kl(("map", part, block)),
                "kl of the mean": variants.mean_kl(("mean", part, block)),
                "kl of noise of the same norm": variants.mean_kl(("noise", part, block)),
            }
            rows.append(row)
    return rows


@torch.no_grad()
def _relative_lengths(
    model: Model, batches: Batches, parts: list[str]
) -> dict[tuple[str, int], float]:
    """Mean over positions of ‖a sub-module's output‖ / ‖the stream it reads from or adds to‖."""
    present = {site.part for site in model.structure.sites()}
    blocks = range(1, model.n_blocks + 1)
    after_attention = [part for part in ("mid2", "mid") if part in present]

    def stream(part: str, block: int) -> Site:
        if after_attention and part in ("ln2", "ffn"):
            return Site(block, after_attention[0])
        return Site(block, "mid") if part in ("lnx", "xattn") else Site(block - 1)

    wanted = {
        (part, block): (_pair(block, part)[1], stream(part, block))
        for part in parts
        for block in blocks
    }
    sites = sorted({site for pair in wanted.values() for site in pair})
    totals, n = dict.fromkeys(wanted, 0.0), 0
    for found in capture_states(model, batches, sites):
        length = {site: found[site].double().norm(dim=-1) for site in sites}
        n += found.batch.n_picks
        for key, (output, beside) in wanted.items():
            totals[key] += float((length[output] / length[beside]).sum())
    return {key: total / n for key, total in totals.items()}


def _block_headline(why: list[Row]) -> dict[str, object]:
    """How much of what the mean costs the map costs, and whether its errors are milder than noise, by sub-module."""
    found: dict[str, object] = {}
    for part in dict.fromkeys(row["part"] for row in why):
        mine = [row for row in why if row["part"] == part]
        kl = {how: sum(row[how] for row in mine) for how in mine[0] if how.startswith("kl of")}
        lost, noise = kl["kl of the mean"], kl["kl of noise of the same norm"]
        found[f"map_over_mean_kl_{part}"] = kl["kl of the map"] / lost if lost else None
        found[f"map_over_noise_kl_{part}"] = kl["kl of the map"] / noise if noise else None
    return found


LEVELS = 12
"""A deeper model starts from so many evenly spaced levels, and the last."""


def run(setup: Setup) -> Result:
    """Replace each kind of sub-module from every level on, then in one block at a time."""
    estimator = setup.settings.estimators[0]
    jumps = setup.all_position_jumps(estimator, "submodules")
    rows, cost, levels = _suffix(setup, jumps)
    result = Result("submodules", {"suffix": rows})
    alone = run_one_block(setup, jumps)
    result.tables |= alone.tables
    result.notes += alone.notes
    result.settings = {
        "estimator": estimator,
        "n_fit": jumps.provenance.n_fit,
        "positions": jumps.provenance.positions,
        "budget": setup.settings.score_tokens,
        "levels": levels,
        "suffix": to_json(cost),
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
    return [part for part in PARTS if submodule_pairs(model, 1, part)]


def start_levels(blocks: int) -> list[int]:
    """The levels from which on a part is replaced: all, or an even choice in a deep model; always 0 and L."""
    if blocks <= LEVELS:
        return list(range(blocks + 1))
    return sorted({round(place * blocks / LEVELS) for place in range(LEVELS + 1)})


def _suffix(setup: Setup, jumps: Jumps) -> tuple[list[Row], Cost, list[int]]:
    model, blocks = setup.model, setup.model.n_blocks
    levels, parts, batches = start_levels(blocks), parts_of(model), small_batches(setup)
    lenses = {"jump to last": setup.settings.estimators[0], "identity": "identity"}
    named = {name: setup.lenses()[lens] for name, lens in lenses.items()}
    cost = announce_cost(
        "submodules, from a level on",
        model,
        batches,
        block_runs=len(parts) * sum(blocks - level for level in levels),
        unembeddings=(len(parts) + len(named)) * len(levels) + 1,
    )
    changes = {part: _changes(model, jumps, part) for part in parts}
    variants = Variants(model)
    for rerun in rerun_batches(setup, batches, variants):
        for level in levels:
            for part in parts:
                last = rerun.from_level(level, changes=changes[part])
                variants.add((part, level), rerun.pick(last))
            state = rerun.pick(rerun.levels[level])
            for name, lens in named.items():
                _read(variants, (name, level), lens, state)
    rows: list[Row] = [
        {"part": part, "level": level}
        | to_json(variants.scores((part, level), seed=setup.settings.seed))
        for part in (*parts, *named)
        for level in levels
    ]
    return rows, cost, levels


def _read(variants: Variants, name: tuple[str, int], lens: Lens, state: Tensor) -> None:
    variants.add_logits(name, lambda part: lens.logits(name[1], state[part]))


def _changes(model: Model, jumps: Jumps, part: str) -> Changes:
    return {
        pair: replace_by_map(jumps[pair])
        for block in range(1, model.n_blocks + 1)
        for pair in submodule_pairs(model, block, part)
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
