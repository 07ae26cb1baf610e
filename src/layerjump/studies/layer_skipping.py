"""Schedules of blocks that run and levels that are jumped over: pure functions, no model.

A schedule is the jumps it makes, in order: ((4, 6), (9, 12)) runs blocks 1 to 4, jumps from level 4 to level 6, runs
blocks 7 to 9 and jumps from 9 to 12. No jump starts where another ends: one fitted map over both does better.

`alternation`: run some blocks, jump over others, run again (papers' section 4.3).

Rules, each for as many numbers of blocks run as it can:

    single jump   run l blocks, jump to the last level
    round robin   run a blocks, jump b, again and again; all a + b that divide the number of blocks
    r2            the product of the jumps' held-out R² is as large as can be (the authors' informed rule)
    kl            the sum of the jumps' costs is as small as can be; a jump's cost is the KL of the output when only
                  that jump is made and all else is exact
    ours          of the schedules of all these rules with that many blocks, the one with the lowest KL when run

R², costs and the last choice are taken on select documents, every number shown on test documents. All positions go
through the jumps, so the maps are fitted on all positions.

The figure of `alternation`: what running some blocks and jumping over others keeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go
from torch import Tensor

from layerjump.data.batches import Batches
from layerjump.data.positions import MASKED_SHARE, Positions
from layerjump.interventions.patching import Rerun
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import Affine, apply_map, to_affine
from layerjump.jumps.scoring import r2
from layerjump.studies.ablation import Variants, announce, budgeted, runs
from layerjump.studies.charts import (
    Panel,
    Study,
    add_line,
    colours,
    empty_figure,
    level_axis,
    number,
    percent,
    unique,
    where,
)
from layerjump.studies.results import Result, Row
from layerjump.studies.setup import Setup, collect_all_positions, fit_all_positions

Jump = tuple[int, int]
Schedule = tuple[Jump, ...]


def blocks_run(schedule: Schedule, blocks: int) -> int:
    """How many blocks a schedule runs."""
    return blocks - sum(target - source for source, target in schedule)


def single(blocks: int) -> list[Schedule]:
    """The jump to the last level from every level."""
    return [((level, blocks),) for level in range(blocks)]


def round_robins(blocks: int) -> dict[tuple[int, int], Schedule]:
    """(a, b) → run a blocks, jump b, again and again, for all a + b that divide the blocks.

    With a + b = the number of blocks there is one jump only: those are `single`, and left out here.
    """
    found: dict[tuple[int, int], Schedule] = {}
    for turn in range(2, blocks):
        if blocks % turn == 0:
            for run in range(1, turn):
                starts = range(run, blocks, turn)
                found[run, turn - run] = tuple((level, level + turn - run) for level in starts)
    return found


def cheapest(blocks: int, cost: Mapping[Jump, float]) -> dict[int, Schedule]:
    """For each number of blocks run, from 0 to all but one, the schedule whose jumps' costs have the least sum.

    Dynamic programming over levels: the best way to a level with so many blocks run, which ends with a block or with a
    jump, extends such a way to an earlier level.
    """
    # (level, blocks run) → (cost, schedule), apart for ways that end with a block and with a jump
    by_block: dict[tuple[int, int], tuple[float, Schedule]] = {(0, 0): (0.0, ())}
    by_jump: dict[tuple[int, int], tuple[float, Schedule]] = {}
    for level in range(1, blocks + 1):
        for run in range(level + 1):
            before = (level - 1, run - 1)
            ways = [way[before] for way in (by_block, by_jump) if before in way]
            if ways:
                by_block[level, run] = min(ways, key=lambda way: way[0])
            jumps = [
                (by_block[source, run][0] + cost[source, level], source)
                for source in range(level)
                if (source, level) in cost and (source, run) in by_block
            ]
            if jumps:
                total, source = min(jumps)
                by_jump[level, run] = total, (*by_block[source, run][1], (source, level))
    ends = {run: _better(by_block, by_jump, (blocks, run)) for run in range(blocks)}
    return {run: schedule for run, (total, schedule) in ends.items() if total < math.inf}


def most_explained(blocks: int, r2: Mapping[Jump, float]) -> dict[int, Schedule]:
    """For each number of blocks run, the schedule whose jumps' R² have the greatest product."""
    floor = 1e-12  # an R² at or below 0 explains nothing, but a schedule may have to use it
    return cheapest(blocks, {jump: -math.log(max(value, floor)) for jump, value in r2.items()})


def said(schedule: Schedule, blocks: int) -> str:
    """A schedule in one line: `0-4 → 6-9 → 12` runs from level 0 to 4, jumps to 6, runs to 9, jumps to 12."""
    starts = [0, *(target for _, target in schedule)]
    ends = [*(source for source, _ in schedule), blocks]
    legs = zip(starts, ends, strict=True)
    return " → ".join(f"{start}-{end}" if start < end else str(start) for start, end in legs)


def _better(
    by_block: Mapping[tuple[int, int], tuple[float, Schedule]],
    by_jump: Mapping[tuple[int, int], tuple[float, Schedule]],
    end: tuple[int, int],
) -> tuple[float, Schedule]:
    ways = [way[end] for way in (by_block, by_jump) if end in way]
    return min(ways, key=lambda way: way[0], default=(math.inf, ()))


ALONE_SHARE = 0.5
"""Of the run's budget: select tokens on which every jump is tried alone. Schedules are chosen on the full budget."""
GOOD = 0.95
"""Agreement at which the headline states the blocks needed."""


def run(setup: Setup) -> Result:
    """Measure every jump alone, make the schedules, choose, and score all of them on test documents."""
    setup, note = with_select(setup)
    estimator, blocks = setup.settings.estimators[0], setup.model.n_blocks
    jumps = fit_all_positions(setup, estimator, "all")
    explained = _explained(setup, jumps)
    costs, alone_cost = _costs(setup, jumps)
    rules = _rules(blocks, explained, costs)
    rules["ours"], select_cost = _best_when_run(setup, jumps, rules)
    every = [schedule for rule in rules.values() for schedule in rule]
    variants, test_cost = _tried(setup, jumps, every, budgeted(setup), "every schedule")
    result = Result("alternation", {"schedules": _rows(rules, variants, setup)})
    result.tables["pairs"] = [
        {"from": a, "to": b, "r2": explained[a, b], "kl": costs[a, b]} for a, b in sorted(costs)
    ]
    result.settings = {
        "estimator": estimator,
        "n_fit": jumps.provenance.n_fit,
        "positions": jumps.provenance.positions,
        "budget": setup.settings.budget,
        "blocks": blocks,
        "jumps alone": alone_cost,
        "choosing": select_cost,
        "schedules": test_cost,
    }
    result.headline = _headline(result.tables["schedules"], blocks)
    result.notes += [note] if note else []
    return result


def with_select(setup: Setup) -> tuple[Setup, str | None]:
    """The run with some documents to choose schedules on: its own, or a tenth of those it would fit on."""
    parts = setup.parts()
    if parts.select:
        return setup, None
    held = max(1, len(parts.fit) // 10)
    sizes = f"{len(parts.fit) - held}/{held}/{len(parts.test)}"
    note = (
        f"The split {setup.settings.split} has no select documents: {held} of the {len(parts.fit)} fit documents were "
        f"held out to choose schedules on."
    )
    return setup.without_kept(settings=replace(setup.settings, split=sizes)), note


def follow(rerun: Rerun, schedule: Schedule, jumps: Jumps) -> Tensor:
    """Level L as a schedule reaches it, at all positions; what runs before its first jump is known already."""
    level = schedule[0][0] if schedule else rerun.model.n_blocks
    states = rerun.levels[level]
    for source, target in schedule:
        states = rerun.from_level(level, states, to=source)
        states = apply_map(jumps[source, target], states)
        level = target
    return rerun.from_level(level, states)


def _explained(setup: Setup, jumps: Jumps) -> dict[Jump, float]:
    """R² of every jump on select documents."""
    sums = collect_all_positions(setup, "all").select
    found: dict[Jump, float] = {}
    for source, target in jumps:
        jump = to_affine(jumps[source, target])
        bias = None if jump.bias is None else jump.bias.double()
        exact = Affine.of(jump.weight.double(), bias=bias)
        score = r2(exact, sums.source(source), sums.target(source, target))
        found[source.index, target.index] = score.uniform
    return found


def _select_batches(setup: Setup, share: float = 1.0) -> Batches:
    # More than one position a document even in the paper's protocol: these numbers only choose.
    positions = Positions.parse(MASKED_SHARE) if setup.model.masked else Positions("all")
    return budgeted(setup, share, part="select", positions=positions)


def _costs(setup: Setup, jumps: Jumps) -> tuple[dict[Jump, float], dict[str, Any]]:
    """KL of the output when one jump is made and all else is exact, for every jump."""
    batches, blocks = _select_batches(setup, ALONE_SHARE), setup.model.n_blocks
    pairs = [(source.index, target.index) for source, target in jumps]
    cost = announce(
        "alternation, each jump alone",
        setup.model,
        batches,
        block_runs=sum(blocks - target for _, target in pairs),
        readings=len(pairs) + 1,
    )
    variants = Variants(setup.model)
    for rerun in runs(setup, batches, variants):
        for pair in pairs:
            variants.add(pair, rerun.pick(follow(rerun, (pair,), jumps)))
    return {pair: variants.mean(pair) for pair in pairs}, cost


def _rules(
    blocks: int, explained: dict[Jump, float], costs: dict[Jump, float]
) -> dict[str, list[Schedule]]:
    return {
        "single jump": single(blocks),
        "round robin": list(round_robins(blocks).values()),
        "r2": list(most_explained(blocks, explained).values()),
        "kl": list(cheapest(blocks, costs).values()),
    }


def _best_when_run(
    setup: Setup, jumps: Jumps, rules: dict[str, list[Schedule]]
) -> tuple[list[Schedule], dict[str, Any]]:
    """For each number of blocks run, the schedule with the lowest KL on select documents."""
    tried = [schedule for rule in rules.values() for schedule in rule]
    variants, cost = _tried(setup, jumps, tried, _select_batches(setup), "choosing a schedule")
    best: dict[int, Schedule] = {}
    for schedule in sorted(dict.fromkeys(tried), key=lambda each: variants.mean(each)):
        best.setdefault(blocks_run(schedule, setup.model.n_blocks), schedule)
    return [best[count] for count in sorted(best)], cost


def _tried(
    setup: Setup, jumps: Jumps, schedules: list[Schedule], batches: Batches, what: str
) -> tuple[Variants, dict[str, Any]]:
    """Every schedule run over the batches, and what that costs."""
    distinct, blocks = list(dict.fromkeys(schedules)), setup.model.n_blocks
    cost = announce(
        f"alternation, {what}",
        setup.model,
        batches,
        block_runs=sum(blocks_run(each, blocks) - each[0][0] for each in distinct),
        readings=len(distinct) + 1,
    )
    variants = Variants(setup.model)
    for rerun in runs(setup, batches, variants):
        for schedule in distinct:
            variants.add(schedule, rerun.pick(follow(rerun, schedule, jumps)))
    return variants, cost


def _rows(rules: dict[str, list[Schedule]], variants: Variants, setup: Setup) -> list[Row]:
    blocks = setup.model.n_blocks
    turns = {schedule: turn for turn, schedule in round_robins(blocks).items()}
    rows: list[Row] = []
    for rule, schedules in rules.items():
        for schedule in schedules:
            run_, jumped = turns[schedule] if rule == "round robin" else (None, None)
            count = blocks_run(schedule, blocks)
            row: Row = {"rule": rule, "a": run_, "b": jumped, "blocks run": count}
            score = variants.row(schedule, seed=setup.settings.seed)
            rows.append(row | {"schedule": said(schedule, blocks)} | score)
    return rows


def _headline(rows: list[Row], blocks: int) -> dict[str, object]:
    """For each rule: mean P@1 over the blocks it reaches, its lead over the single jump, and where 95 % is."""
    alone = {row["blocks run"]: row["p@1"] for row in rows if row["rule"] == "single jump"}
    found: dict[str, object] = {}
    for rule in dict.fromkeys(row["rule"] for row in rows):
        name = rule.replace(" ", "_")
        mine = [row for row in rows if row["rule"] == rule]
        if not mine:
            continue
        found[f"mean_p@1_{name}"] = sum(row["p@1"] for row in mine) / len(mine)
        ahead = [row["p@1"] - alone[row["blocks run"]] for row in mine]
        found[f"mean_lead_over_single_jump_{name}"] = sum(ahead) / len(ahead)
        good = [row["blocks run"] for row in mine if row["p@1"] >= GOOD]
        found[f"blocks_for_{GOOD:g}_{name}"] = min(good, default=blocks)
    return found


def schedules(study: Study) -> list[Panel]:
    """Precision@1 and KL against the blocks run, the best schedule of every rule for each number of blocks."""
    rows = study["tables"].get("schedules")
    if not rows:
        return []
    figures = [
        _by_rule(rows, "p@1", "precision@1"),
        _by_rule(rows, "kl", "KL from the model, nats"),
    ]
    return [Panel("Run, jump, run again", _reading(rows), ("schedules",), figures)]


def best_of(rows: Sequence[Row], rule: str) -> list[Row]:
    """For each number of blocks run, the rule's schedule with the highest precision@1."""
    mine = where(rows, rule=rule)
    counts = sorted(unique(row["blocks run"] for row in mine))
    return [max(where(mine, **{"blocks run": n}), key=lambda row: row["p@1"]) for n in counts]


def _by_rule(rows: Sequence[Row], column: str, title: str) -> go.Figure:
    figure = empty_figure(title, x="blocks run", height=360)
    rules = unique(row["rule"] for row in rows)
    paint = colours(rules)
    for rule in rules:
        dash = "dot" if rule == "round robin" else "solid"
        mine = best_of(rows, rule)
        add_line(figure, mine, "blocks run", column, name=rule, colour=paint[rule], dash=dash)
    if column == "p@1":
        figure.update_yaxes(range=[-0.02, 1.03])
    return level_axis(figure, rows, "blocks run")


def _reading(rows: Sequence[Row]) -> str:
    most = max(row["blocks run"] for row in rows)
    within = [row for row in rows if row["blocks run"] <= most / 2]
    if not within:
        return f"No schedule runs less than half of the {most} blocks."
    best = max(within, key=lambda row: row["p@1"])
    return (
        f"Of the schedules that run no more than half of the {most} blocks, the best is by the rule {best['rule']} "
        f"with {number(best['blocks run'])} blocks: it gives the model's own token in {percent(best['p@1'])} of the "
        f"cases."
    )
