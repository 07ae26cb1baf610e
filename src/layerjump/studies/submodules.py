"""`submodules`: which sub-modules can be replaced by linear maps, from which level on, and why.

From a level on ("Jump to Conclusions", section 7): blocks 1 to l run unchanged. In every later block one kind of
sub-module (attention, cross-attention, feed-forward, or all norms together) is replaced by its fitted map, at all
positions. Residual sums, the final norm and the LM head stay exact. The maps are fitted on the unchanged model, so
errors accumulate. The jump to the last level and the identity are scored on the same positions.

In one block at a time: the KL of three replacements of the sub-module's output, which are its map, its mean (a
constant), and the exact output plus noise of the same norm as the map's error. A map much better than the mean shows
that the sub-module is nearly linear; a map no better shows that its output hardly matters. A map better than the noise
errs in directions that do not matter. R² of the map, the norm of the output relative to the residual stream, and the
attention mass on the token itself and on the sink at position 0 help to explain the difference.

The authors define the replacement for GPT-2 only; for other families the definition is ours. Attention and
feed-forward: from the input of the sub-module to its residual write (in sandwich blocks that includes the norm of its
output). Norms: those that attention and feed-forward read through or, in a post-norm block, those after each sum; each
map reads what its norm reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import plotly.graph_objects as go
import torch
from torch import Tensor

from layerjump.data.batches import Batch, Batches
from layerjump.interventions.change_states import Changes, add_noise, replace_by_constant, replace_by_map
from layerjump.interventions.linearize import PARTS, submodule_pairs
from layerjump.jumps.jumps import Jumps
from layerjump.models.hooks import Capture, watch_outputs
from layerjump.models.loading import quiet_transformers
from layerjump.models.model import Model, capture_states
from layerjump.models.self_check import TOLERANCE
from layerjump.models.sites import SUBMODULES, Pair, Site
from layerjump.studies.charts import Panel, Value, line_chart
from layerjump.studies.compare_variants import Cost, Variants, VariantScores, announce_cost, small_batches
from layerjump.studies.formatting import listed, mean, number, percent, unique
from layerjump.studies.results import Column, Finding, Record, Result, Study
from layerjump.studies.setup import Setup

MAX_LEVELS = 12
"""A deeper model is replaced from this many evenly spaced levels on, and from the last."""
BLOCK_SHARE = 0.5
"""Share of the run's test tokens for single blocks, of which there are many variants."""
NORMS = ("ln1", "lnx", "ln2")
JUMP, IDENTITY = "jump to last", "identity"
NAMES = {
    "attn": "attention",
    "mixer": "mixer",
    "xattn": "cross-attention",
    "ffn": "feed-forward",
    "norms": "norms",
    "ln1": "norm before attention",
    "lnx": "norm before cross-attention",
    "ln2": "norm before feed-forward",
    JUMP: "jump to the last level",
    IDENTITY: IDENTITY,
}
"""Kinds of sub-modules, and what they are compared with, in words."""

Replacement = Literal["map", "mean", "noise"]


class SuffixRow(Record):
    """One kind of sub-module replaced in all blocks after a level."""

    part: str
    level: int
    scores: Annotated[VariantScores, Column("{}")]


class BlockRow(Record):
    """One kind of sub-module replaced by its map in one block."""

    part: str
    block: int
    scores: Annotated[VariantScores, Column("{}")]


class WhyRow(Record):
    """One sub-module of one block: how linear it is, how large its output, and what three replacements cost."""

    part: str
    block: int
    r2: float
    r2_weighted: Annotated[float, Column("r2 weighted")]
    relative_norm: Annotated[float, Column("output norm over stream norm")]
    attention_on_self: Annotated[float | None, Column("attention on self")]
    attention_on_sink: Annotated[float | None, Column("attention on sink")]
    kl_map: Annotated[float, Column("kl of the map")]
    kl_mean: Annotated[float, Column("kl of the mean")]
    kl_noise: Annotated[float, Column("kl of noise of the same norm")]


class Tables(Record):
    """Rows from a level on, and in one block at a time."""

    suffix: list[SuffixRow] = field(default_factory=list)
    one_block: Annotated[list[BlockRow], Column("one block")] = field(default_factory=list)
    why: list[WhyRow] = field(default_factory=list)


class Headline(Record):
    """Means over levels below the last and over blocks, by kind of sub-module."""

    most_tolerant: str | None = None
    """The kind of sub-module whose replacement costs least precision@1."""
    mean_p1: Annotated[dict[str, float], Column("mean_p@1_{}")] = field(default_factory=dict)
    map_over_mean_kl: Annotated[dict[str, float], Column("map_over_mean_kl_{}")] = field(default_factory=dict)
    map_over_noise_kl: Annotated[dict[str, float], Column("map_over_noise_kl_{}")] = field(default_factory=dict)


def run(setup: Setup) -> Result[Tables, Headline]:
    """Replace each kind of sub-module from every level on, then in one block at a time."""
    model, estimator = setup.model, setup.settings.estimators[0]
    jumps = setup.all_position_jumps(estimator, "submodules")
    levels = start_levels(model.n_blocks)
    suffix, suffix_cost = _replace_suffix(setup, jumps, levels)
    one_block, why, notes, block_cost = _replace_one_block(setup, jumps)
    if len(levels) <= model.n_blocks:
        notes.append(f"Only levels {', '.join(map(str, levels))}, to limit the cost.")
    if model.masked:
        notes.append(
            "The authors replace sub-modules of GPT-2 only; for an encoder the definition is ours: both norms of a "
            "block follow its residual sums, and each is replaced by a map of its input."
        )
    facts = {
        "estimator": estimator,
        "n_fit": jumps.provenance.n_fit,
        "positions": jumps.provenance.positions,
        "budget": setup.settings.rerun_tokens,
        "levels": levels,
        "suffix": suffix_cost,
        "one block": block_cost,
    }
    below = [row for row in suffix if row.level < model.n_blocks]
    precision = {
        part: mean(row.scores.p1.mean for row in below if row.part == part)
        for part in unique(row.part for row in below)
    }
    parts = unique(row.part for row in why)
    headline = Headline(
        most_tolerant=max((part for part in precision if part in PARTS), key=precision.__getitem__, default=None),
        mean_p1={part.replace(" ", "_"): value for part, value in precision.items()},
        map_over_mean_kl={part: _kl_ratio(why, part, lambda row: row.kl_mean) for part in parts},
        map_over_noise_kl={part: _kl_ratio(why, part, lambda row: row.kl_noise) for part in parts},
    )
    return Result("submodules", Tables(suffix, one_block, why), headline, notes, facts)


def start_levels(n_blocks: int) -> list[int]:
    """Return the levels from which on parts are replaced: all, or evenly spaced ones; always 0 and the last."""
    if n_blocks <= MAX_LEVELS:
        return list(range(n_blocks + 1))
    return sorted({round(index * n_blocks / MAX_LEVELS) for index in range(MAX_LEVELS + 1)})


def changes_from_maps(model: Model, jumps: Jumps, part: str) -> Changes:
    """Return the replacement of one kind of sub-module by its maps, in all blocks."""
    return {
        pair: replace_by_map(jumps[pair])
        for block in range(1, model.n_blocks + 1)
        for pair in submodule_pairs(model, block, part)
    }


def _replace_suffix(setup: Setup, jumps: Jumps, levels: Sequence[int]) -> tuple[list[SuffixRow], Cost]:
    model, batches = setup.model, small_batches(setup)
    blocks = range(1, model.n_blocks + 1)
    parts = [part for part in PARTS if any(submodule_pairs(model, block, part) for block in blocks)]
    lenses = {JUMP: setup.lenses()[setup.settings.estimators[0]], IDENTITY: setup.lenses()[IDENTITY]}
    cost = announce_cost(
        "submodules, from a level on",
        model,
        batches,
        block_runs=len(parts) * sum(model.n_blocks - level for level in levels),
        unembeddings=(len(parts) + len(lenses)) * len(levels) + 1,
    )
    changes = {part: changes_from_maps(model, jumps, part) for part in parts}
    variants = Variants(model)
    for rerun in variants.reruns(batches, setup.progress):
        for level in levels:
            for part in parts:
                states = rerun.from_level(level, changes=changes[part])
                variants.add((part, level), rerun.pick(states))
            picked = rerun.pick(rerun.levels[level])
            for name, lens in lenses.items():
                variants.add((name, level), picked, partial(lens.logits, level))
    rows = [
        SuffixRow(part, level, variants.scores((part, level), seed=setup.settings.seed))
        for part in (*parts, *lenses)
        for level in levels
    ]
    return rows, cost


def _pair(block: int, part: str) -> Pair:
    return Site(block, f"{part}.in"), Site(block, f"{part}.out")


def _replace_one_block(setup: Setup, jumps: Jumps) -> tuple[list[BlockRow], list[WhyRow], list[str], Cost]:
    """Run each replacement in each block; return the scores, what explains them, notes and the cost."""
    model, n_blocks = setup.model, setup.model.n_blocks
    batches, moments = small_batches(setup, BLOCK_SHARE), setup.all_position_moments("submodules").fit
    # Blocks of a hybrid differ: some have attention, others a mixer, or no feed-forward.
    sites, blocks = set(model.structure.sites()), range(1, n_blocks + 1)
    parts_of = {block: [part for part in SUBMODULES if Site(block, f"{part}.in") in sites] for block in blocks}
    parts = [part for part in SUBMODULES if any(part in parts_of[block] for block in blocks)]
    norms_of = {block: [part for part in parts_of[block] if part in NORMS] for block in blocks}
    changes: dict[tuple[Replacement, str, int], Changes] = {}
    for block in blocks:
        for part in parts_of[block]:
            pair = _pair(block, part)
            changes["map", part, block] = {pair: replace_by_map(jumps[pair])}
            changes["mean", part, block] = {pair: replace_by_constant(moments.mean(pair[1]))}
            changes["noise", part, block] = {pair: add_noise(jumps[pair], seed=10 * block + parts.index(part))}
        if len(norms_of[block]) > 1:
            pairs = [_pair(block, part) for part in norms_of[block]]
            changes["map", "norms", block] = {pair: replace_by_map(jumps[pair]) for pair in pairs}
    cost = announce_cost(
        "submodules, one block at a time",
        model,
        batches,
        block_runs=sum(n_blocks - block + 1 for _, _, block in changes),
        unembeddings=len(changes) + 1,
    )
    variants = Variants(model)
    for rerun in variants.reruns(batches, setup.progress):
        for (replacement, part, block), change in changes.items():
            states = rerun.from_level(block - 1, changes=change)
            variants.add((replacement, part, block), rerun.pick(states))

    others = [(part, block, part) for part in parts if part not in NORMS for block in blocks if part in parts_of[block]]
    norms = [("norms", block, "norms" if names[1:] else names[0]) for block, names in norms_of.items() if names]
    one_block = [
        BlockRow(part, block, variants.scores(("map", variant, block))) for part, block, variant in (*others, *norms)
    ]
    mass, note = attention_mass(model, batches)
    why, sizes = [], _relative_norms(model, batches, parts_of)
    for part in parts:
        for block in (block for block in blocks if part in parts_of[block]):
            r2 = jumps.info[_pair(block, part)].r2 or (math.nan, math.nan)
            on_self, on_sink = mass[block] if mass and part == "attn" else (None, None)
            kl = [variants.mean_kl((replacement, part, block)) for replacement in ("map", "mean", "noise")]
            why.append(WhyRow(part, block, *r2, sizes[part, block], on_self, on_sink, *kl))
    return one_block, why, [note] if note else [], cost


@torch.no_grad()
def _relative_norms(
    model: Model, batches: Batches, parts_of: Mapping[int, Sequence[str]]
) -> dict[tuple[str, int], float]:
    """Return the mean over positions of ‖output of a sub-module‖ / ‖residual stream that it reads or writes‖."""
    present = set(model.structure.sites())

    def stream(part: str, block: int) -> Site:
        writes = model.structure.writes(block)
        phase = next(write.phase for write in writes if part in (write.name, write.norm))
        site = Site(block, "mid" if phase == 1 else f"mid{phase}")
        return site if phase and site in present else Site(block - 1)

    compared = {
        (part, block): (_pair(block, part)[1], stream(part, block))
        for block, parts in parts_of.items()
        for part in parts
    }
    sites = sorted({site for pair in compared.values() for site in pair})
    totals, n = dict.fromkeys(compared, 0.0), 0
    for states in capture_states(model, batches, sites):
        norms = {site: states[site].double().norm(dim=-1) for site in sites}
        n += states.batch.n_picks
        for key, (output, residual) in compared.items():
            totals[key] += float((norms[output] / norms[residual]).sum())
    return {key: total / n for key, total in totals.items()}


class AttentionMass(NamedTuple):
    """Attention weight of one block, averaged over heads and positions."""

    on_self: float
    on_sink: float
    """At position 0."""


@torch.no_grad()
def attention_mass(model: Model, batches: Batches) -> tuple[dict[int, AttentionMass] | None, str | None]:
    """Return the attention mass of blocks with attention, or None and why the model does not expose its weights.

    Fused kernels do not return weights, so the model runs with eager attention meanwhile, and only if that leaves its
    hidden states as they are.
    """
    present = set(model.structure.sites())
    blocks = [block for block in range(1, model.n_blocks + 1) if Site(block, "attn.in") in present]
    if not blocks:
        return None, "Attention mass is not shown: the model has no attention."
    totals, n = torch.zeros(len(blocks), 2, dtype=torch.float64), 0
    attention = model.hf.config._attn_implementation
    for batch in batches:
        exact, _ = _run_with_mass(model, batch, blocks)
        with quiet_transformers():
            try:
                model.hf.set_attn_implementation("eager")
                states, mass = _run_with_mass(model, batch, blocks)
            finally:
                model.hf.set_attn_implementation(attention)
        difference = (states - exact).abs().max() / exact.abs().max().clamp_min(1e-30)
        if difference > TOLERANCE[exact.dtype]:
            return None, "Attention mass is not shown: eager attention changes the hidden states."
        if len(mass) != len(blocks):
            return None, "Attention mass is not shown: the model does not return its weights."
        totals += torch.stack(mass) * batch.n_picks
        n += batch.n_picks
    return {block: AttentionMass(*mass) for block, mass in zip(blocks, (totals / n).tolist(), strict=True)}, None


def _run_with_mass(model: Model, batch: Batch, blocks: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Return level L of the picks and, for each block that returns weights, the mass on self and on the sink."""
    masses: list[Tensor] = []

    def add_mass(output: Any) -> None:
        # The weights come last: T5 returns its position bias before them.
        weights = output[-1] if isinstance(output, tuple) and len(output) > 1 else None
        if isinstance(weights, Tensor) and weights.dim() == 4:  # rows, heads, queries, keys
            row, position = batch.row.to(weights.device), batch.position.to(weights.device)
            of_picks = weights[row, :, position].double().mean(1)
            on_self = of_picks.gather(1, position[:, None]).mean()
            masses.append(torch.stack([on_self, of_picks[:, 0].mean()]).cpu())

    last = Site(model.n_blocks)
    taps = [model.structure.tap(Site(block, "attn.in")) for block in blocks]
    attention = {tap.module for tap in taps}
    with watch_outputs(attention, add_mass), Capture(model.structure, [last]) as capture:
        return capture.run(model, batch)[last], masses


def _kl_ratio(rows: Sequence[WhyRow], part: str, other: Callable[[WhyRow], float]) -> float:
    """Return the KL of the maps of one kind of sub-module over that of another replacement, summed over blocks."""
    group = [row for row in rows if row.part == part]
    total = sum(map(other, group))
    return sum(row.kl_map for row in group) / total if total else math.nan


def figures(result: Result[Tables, Headline]) -> list[Panel]:
    """Return precision@1 and KL by level and by block, then what explains them."""
    tables, panels = result.tables, []
    if tables.suffix:
        last, axis = max(row.level for row in tables.suffix), "replaced after level"
        precision = [(row.part, row.level, row.scores.p1) for row in tables.suffix]
        # At the last level nothing is replaced.
        below = [row for row in tables.suffix if row.level < last]
        charts = [
            _chart_by_part("precision@1", precision, axis, "unit"),
            _chart_by_part(
                "KL from the model, nats", [(row.part, row.level, row.scores.kl) for row in below], axis, "log"
            ),
        ]
        means = {
            part: mean(row.scores.p1.mean for row in below if row.part == part)
            for part in unique(row.part for row in tables.suffix)
        }
        parts = [f"{number(means[part])} for {NAMES[part]}" for part in means if part in PARTS]
        lenses = [f"{number(means[name])} for the {NAMES[name]}" for name in means if name not in PARTS]
        reading = (
            f"With maps in all later blocks, the mean precision@1 over the levels below the last is {listed(parts)}; "
            f"it is {listed(lenses)}."
        )
        panels.append(Panel("Sub-modules replaced from a level on", reading, ("suffix",), charts))
    if tables.one_block:
        precision = [(row.part, row.block, row.scores.p1) for row in tables.one_block]
        kl = [(row.part, row.block, row.scores.kl) for row in tables.one_block]
        charts = [
            _chart_by_part("precision@1", precision, "block", "unit"),
            _chart_by_part("KL from the model, nats", kl, "block"),
        ]
        worst, best = (end(tables.one_block, key=lambda row: row.scores.kl) for end in (max, min))
        reading = (
            f"A map in a single block costs most for {NAMES[worst.part]} in block {worst.block} (KL "
            f"{number(worst.scores.kl)} nats, precision@1 {number(worst.scores.p1.mean)}) and least for "
            f"{NAMES[best.part]} in block {best.block} (KL {number(best.scores.kl)} nats)."
        )
        panels.append(Panel("Sub-modules replaced in one block", reading, ("one block",), charts))
    if tables.why:
        panels += _why_panels(tables.why)
    return panels


def _chart_by_part(
    title: str, points: Sequence[tuple[str, int, Value]], x: str, scale: Literal["free", "unit", "log"] = "free"
) -> go.Figure:
    """Draw one line for each kind of sub-module through (part, level or block, value)."""
    lines = {
        NAMES[part]: [(at, value) for name, at, value in points if name == part]
        for part in unique(part for part, _, _ in points)
    }
    return line_chart(title, lines, x=x, scale=scale, whole_x=True, dashed=(NAMES[JUMP], IDENTITY))


def _why_panels(rows: Sequence[WhyRow]) -> list[Panel]:
    """Draw the KL of the three replacements, R² and relative norm, and attention mass where the model shows it."""
    parts = unique(row.part for row in rows)
    replacements = []
    for part in parts:
        group = [row for row in rows if row.part == part]
        lines = {
            "map": [(row.block, row.kl_map) for row in group],
            "mean output": [(row.block, row.kl_mean) for row in group],
            "noise as large as the map's error": [(row.block, row.kl_noise) for row in group],
        }
        replacements.append(line_chart(NAMES[part], lines, x="block", y="KL, nats", scale="log", whole_x=True))
    ratios = [f"{number(_kl_ratio(rows, part, lambda row: row.kl_mean))} for {NAMES[part]}" for part in parts]
    reading = (
        f"Summed over blocks, the KL of the map relative to that of the mean output is {listed(ratios)}: near 0 a "
        f"sub-module is nearly linear, near 1 its map is no better than a constant."
    )
    panels = [Panel("Map, mean output and noise in one block", reading, ("why",), replacements)]
    r2 = [(row.part, row.block, row.r2) for row in rows]
    norms = [(row.part, row.block, row.relative_norm) for row in rows]
    figures = [
        _chart_by_part("R² of the map", r2, "block", "unit"),
        _chart_by_part("norm of the output over the residual stream's", norms, "block"),
    ]
    most, least = (end(rows, key=lambda row: row.r2) for end in (max, min))
    reading = (
        f"The map explains most of {NAMES[most.part]} in block {most.block} (R² {number(most.r2)}) and least of "
        f"{NAMES[least.part]} in block {least.block} (R² {number(least.r2)})."
    )
    panels.append(Panel("Linearity and size of each sub-module", reading, ("why",), figures))
    on_self = [(r.block, r.attention_on_self) for r in rows if r.attention_on_self is not None]
    on_sink = [(r.block, r.attention_on_sink) for r in rows if r.attention_on_sink is not None]
    if on_self and on_sink:
        mass = {"on the token itself": on_self, "on position 0": on_sink}
        figure = line_chart("attention mass, mean over heads", mass, x="block", scale="unit", whole_x=True)
        reading = (
            f"On average, attention puts {percent(mean(mass for _, mass in on_self))} of its mass on the token itself "
            f"and {percent(mean(mass for _, mass in on_sink))} on position 0."
        )
        panels.append(Panel("Attention mass", reading, ("why",), [figure]))
    return panels


def finding(result: Result[Tables, Headline]) -> Finding | None:
    """Return the kind of sub-module whose replacement costs least."""
    head = result.headline
    means = {part: head.mean_p1[part] for part in PARTS if part in head.mean_p1}
    if head.most_tolerant not in means:
        return None
    others = [f"{NAMES[part]} {number(means[part])}" for part in means if part != head.most_tolerant]
    return Finding(
        "Most linear sub-module",
        NAMES[head.most_tolerant],
        f"with maps in its place from a level on, precision@1 is {number(means[head.most_tolerant])} on average "
        f"({', '.join(others)}).",
    )


STUDY = Study(
    "submodules",
    "which sub-modules can be replaced by linear maps, where, and why?",
    run,
    figures,
    finding,
    all_position_pairs="submodules",
)
