"""Sub-modules replaced in one block at a time, and why that costs what it costs: part of `submodules`.

A map can do well because its sub-module is nearly linear, or because what it adds is small. For each sub-module of
each block: R² of its map; how long its output is beside the stream; how much of attention goes to the token itself and
to the sink at position 0; and the KL of three replacements, the map, the mean output (a constant), and the exact output
plus noise of the length of the map's error. A map far better than the mean is linear; one no better is merely small.
A map better than its noise is wrong in directions that do not matter.
"""

from __future__ import annotations

import torch

from layerjump.compress.changes import Change, constant, mapped, noisy
from layerjump.fit.jumps import Jumps
from layerjump.fit.pairs import SUBMODULES, Pair
from layerjump.inputs.batches import Batches
from layerjump.inputs.models import Model
from layerjump.inputs.sites import Site
from layerjump.inputs.states import states
from layerjump.studies import everywhere
from layerjump.studies.attention import attention_mass
from layerjump.studies.result import Result, Row
from layerjump.studies.setup import Setup
from layerjump.studies.variants import Variants, announce, budgeted, runs

SHARE = 0.5
"""Of the run's budget: there are many replacements to try."""
HOW = ("map", "mean", "noise")
NORMS = ("ln1", "lnx", "ln2")


def run(setup: Setup, jumps: Jumps) -> Result:
    """Two tables: `one block` and `why`."""
    model, batches = setup.model, budgeted(setup, SHARE)
    parts = _single_parts(model)
    norms = [part for part in parts if part in NORMS]
    each = len(HOW) * len(parts) + (len(norms) > 1)
    blocks = model.n_blocks
    cost = announce(
        "submodules, one block at a time",
        model,
        batches,
        block_runs=each * blocks * (blocks + 1) // 2,
        readings=each * blocks + 1,
    )
    variants = Variants(model)
    changes = _changes(setup, jumps, parts)
    for rerun in runs(setup, batches, variants):
        for block in range(1, blocks + 1):
            for name, change in changes[block].items():
                last = rerun.from_level(block - 1, changes=change)
                variants.add((*name, block), rerun.picked(last))
    result = Result("submodules", {"one block": _one_block(variants, parts, blocks)})
    mass, note = attention_mass(model, batches)
    result.notes += [note] if note else []
    result.tables["why"] = _why(model, batches, jumps, variants, mass)
    result.settings = cost
    result.headline = _headline(result.tables["why"])
    return result


def _single_parts(model: Model) -> list[str]:
    present = set(model.anatomy.sites())
    return [part for part in SUBMODULES if Site(1, f"{part}.in") in present]


def _pair(block: int, part: str) -> Pair:
    return Site(block, f"{part}.in"), Site(block, f"{part}.out")


def _changes(
    setup: Setup, jumps: Jumps, parts: list[str]
) -> dict[int, dict[tuple[str, str], dict[Pair, Change]]]:
    """block → (how, part) → the changes to make."""
    sums = everywhere.collected(setup, "submodules").fit
    found: dict[int, dict[tuple[str, str], dict[Pair, Change]]] = {}
    for block in range(1, setup.model.n_blocks + 1):
        mine: dict[tuple[str, str], dict[Pair, Change]] = {}
        for place, part in enumerate(parts):
            pair = _pair(block, part)
            seed = 10 * block + place
            mine["map", part] = {pair: mapped(jumps[pair])}
            mine["mean", part] = {pair: constant(sums.mean(pair[1]))}
            mine["noise", part] = {pair: noisy(jumps[pair], seed=seed)}
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
            row = variants.row(("map", key, block))
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
                "kl of the map": variants.mean(("map", part, block)),
                "kl of the mean": variants.mean(("mean", part, block)),
                "kl of noise of the same norm": variants.mean(("noise", part, block)),
            }
            rows.append(row)
    return rows


@torch.no_grad()
def _relative_lengths(
    model: Model, batches: Batches, parts: list[str]
) -> dict[tuple[str, int], float]:
    """Mean over positions of ‖a sub-module's output‖ / ‖the stream it reads from or adds to‖."""
    present = {site.part for site in model.anatomy.sites()}
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
    for found in states(model, batches, sites):
        length = {site: found[site].double().norm(dim=-1) for site in sites}
        n += found.batch.n_picks
        for key, (output, beside) in wanted.items():
            totals[key] += float((length[output] / length[beside]).sum())
    return {key: total / n for key, total in totals.items()}


def _headline(why: list[Row]) -> dict[str, object]:
    """How much of what the mean costs the map costs, and whether its errors are milder than noise, by sub-module."""
    found: dict[str, object] = {}
    for part in dict.fromkeys(row["part"] for row in why):
        mine = [row for row in why if row["part"] == part]
        kl = {how: sum(row[how] for row in mine) for how in mine[0] if how.startswith("kl of")}
        lost, noise = kl["kl of the mean"], kl["kl of noise of the same norm"]
        found[f"map_over_mean_kl_{part}"] = kl["kl of the map"] / lost if lost else None
        found[f"map_over_noise_kl_{part}"] = kl["kl of the map"] / noise if noise else None
    return found
