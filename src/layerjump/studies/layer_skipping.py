"""`layer_skipping`: run some blocks, skip others with a jump, run again (section 4.3 of the paper).

Rules, each for every number of blocks run that it can reach:

    single jump   run l blocks, then jump to the last level
    round robin   run a blocks, skip b, and so on; for all a + b that divide the number of blocks
    r2            the largest product of the held-out R² of the jumps (the authors' informed rule)
    kl            the smallest sum of the costs of the jumps; the cost of a jump is the KL divergence of the output when
                  only that jump is made and everything else is exact
    ours          of the schedules of all these rules with the same number of blocks, the one with the lowest KL

R², costs and the last choice are taken on validation documents, all reported numbers on test documents. All positions
go through the jumps, so the maps are fitted on all positions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import plotly.graph_objects as go
from torch import Tensor

from layerjump.data.batches import Batches
from layerjump.errors import BadArtifact
from layerjump.interventions.rerun_from_level import Rerun
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import apply_map
from layerjump.studies.charts import Panel, Value, draw_heat_map, line_chart
from layerjump.studies.compare_variants import Cost, Variants, VariantScores, announce_cost, small_batches
from layerjump.studies.formatting import number, percent, unique
from layerjump.studies.results import Column, Record, Result, Study, to_json
from layerjump.studies.setup import Setup, maps_of, r2_of_maps

Jump = tuple[int, int]

ALONE_SHARE = 0.5
"""Of `rerun_tokens`: validation tokens on which every jump is tried alone. Schedules are chosen on all of them."""
GOOD_AGREEMENT = 0.95
"""Agreement at which the headline states the blocks needed."""


class Schedule(Record):
    """Which blocks run and which are skipped.

    The jumps ((4, 6), (9, 12)) of 12 blocks run blocks 1 to 4, jump from level 4 to 6, run blocks 7 to 9 and jump from
    level 9 to 12. No jump starts where another ends: one fitted map over both does better.
    """

    jumps: tuple[Jump, ...]
    n_blocks: int

    @property
    def blocks_run(self) -> int:
        """How many blocks it runs."""
        return self.n_blocks - sum(target - source for source, target in self.jumps)

    @property
    def legs(self) -> list[tuple[int, int]]:
        """The levels between which blocks run, one pair before, between and after the jumps."""
        starts = [0, *(target for _, target in self.jumps)]
        ends = [*(source for source, _ in self.jumps), self.n_blocks]
        return list(zip(starts, ends, strict=True))

    def to_json(self) -> str:
        """Return the legs, such as `0-4 → 6-9 → 12`; a leg that runs no block is one number."""
        return " → ".join(f"{a}-{b}" if a < b else str(a) for a, b in self.legs)

    @classmethod
    def from_json(cls, saved: object) -> Schedule:
        """Read what `to_json` wrote."""
        if not isinstance(saved, str) or not re.fullmatch(r"\d+(-\d+)?( → \d+(-\d+)?)*", saved):
            raise BadArtifact(f"expected a schedule such as 0-4 → 6-9 → 12, got {str(saved)[:50]!r}")
        legs = [[int(level) for level in leg.split("-")] for leg in saved.split(" → ")]
        jumps = [(leg[-1], after[0]) for leg, after in zip(legs, legs[1:], strict=False)]
        return cls(tuple(jumps), legs[-1][-1])


def single_jumps(n_blocks: int) -> list[Schedule]:
    """Return the jump to the last level from every level."""
    return [Schedule(((level, n_blocks),), n_blocks) for level in range(n_blocks)]


def round_robins(n_blocks: int) -> dict[tuple[int, int], Schedule]:
    """Return (a, b) → run a blocks, skip b, and so on, for all a + b that divide the number of blocks.

    With a + b equal to the number of blocks there is only one jump: those are `single_jumps`, and left out here.
    """
    schedules = {}
    for period in range(2, n_blocks):
        if n_blocks % period == 0:
            for run in range(1, period):
                starts = range(run, n_blocks, period)
                jumps = tuple((level, level + period - run) for level in starts)
                schedules[run, period - run] = Schedule(jumps, n_blocks)
    return schedules


def cheapest(n_blocks: int, cost: Mapping[Jump, float]) -> dict[int, Schedule]:
    """Return, for each number of blocks run from 0 to all but one, the schedule with the least sum of costs.

    Dynamic programming over levels: the best path to a level with a given number of blocks run ends with a block or
    with a jump, and extends such a path to an earlier level.
    """
    # (level, blocks run) → (cost, jumps), kept apart for paths that end with a block and with a jump
    Paths = dict[tuple[int, int], tuple[float, tuple[Jump, ...]]]
    by_block: Paths = {(0, 0): (0.0, ())}
    by_jump: Paths = {}
    for level in range(1, n_blocks + 1):
        for run in range(level + 1):
            before = (level - 1, run - 1)
            paths = [ends[before] for ends in (by_block, by_jump) if before in ends]
            if paths:
                by_block[level, run] = min(paths, key=lambda path: path[0])
            jumps = [
                (by_block[source, run][0] + cost[source, level], source)
                for source in range(level)
                if (source, level) in cost and (source, run) in by_block
            ]
            if jumps:
                total, source = min(jumps)
                by_jump[level, run] = total, (*by_block[source, run][1], (source, level))
    schedules = {}
    for run in range(n_blocks):
        paths = [ends[n_blocks, run] for ends in (by_block, by_jump) if (n_blocks, run) in ends]
        if paths:
            total, path = min(paths, key=lambda path: path[0])
            if total < math.inf:
                schedules[run] = Schedule(path, n_blocks)
    return schedules


def most_explained(n_blocks: int, r2: Mapping[Jump, float]) -> dict[int, Schedule]:
    """Return, for each number of blocks run, the schedule with the largest product of R²."""
    floor = 1e-12  # an R² of 0 or less explains nothing, but a schedule may have to use it
    return cheapest(n_blocks, {jump: -math.log(max(value, floor)) for jump, value in r2.items()})


class ScheduleRow(Record):
    """One schedule of one rule."""

    rule: str
    a: int | None
    """Blocks run in a row, of a round robin."""
    b: int | None
    """Blocks skipped in a row, of a round robin."""
    blocks_run: Annotated[int, Column("blocks run")]
    schedule: Schedule
    scores: Annotated[VariantScores, Column("{}")]


class JumpRow(Record):
    """One jump alone, on validation documents."""

    source: Annotated[int, Column("from")]
    target: Annotated[int, Column("to")]
    r2: float
    kl: float


class Tables(Record):
    """All schedules, and the jumps that they are chosen by."""

    schedules: list[ScheduleRow]
    pairs: list[JumpRow]


class Headline(Record):
    """Per rule (with underscores): means over the schedules, and the blocks that a precision@1 of 0.95 takes."""

    mean_p1: Annotated[dict[str, float], Column("mean_p@1_{}")]
    mean_lead: Annotated[dict[str, float], Column("mean_lead_over_single_jump_{}")]
    blocks_for_good_agreement: Annotated[dict[str, int], Column("blocks_for_0.95_{}")]


def run(setup: Setup) -> Result[Tables, Headline]:
    """Measure every jump alone, choose the schedules, and score all of them on test documents."""
    setup, note = with_validation_documents(setup)
    estimator, n_blocks = setup.settings.estimators[0], setup.model.n_blocks
    jumps = setup.all_position_jumps(estimator, "all")
    moments = setup.all_position_moments("all").validation
    r2_of_jump = zip(jumps, r2_of_maps(maps_of(jumps), moments), strict=True)
    explained = {(source.index, target.index): score.uniform for (source, target), score in r2_of_jump}
    costs, alone_cost = _jump_costs(setup, jumps)
    rules = {
        "single jump": single_jumps(n_blocks),
        "round robin": list(round_robins(n_blocks).values()),
        "r2": list(most_explained(n_blocks, explained).values()),
        "kl": list(cheapest(n_blocks, costs).values()),
    }
    candidates = unique(schedule for schedules in rules.values() for schedule in schedules)
    selected, validation_cost = _run_schedules(
        setup, jumps, candidates, _validation_batches(setup), "choosing a schedule"
    )
    best: dict[int, Schedule] = {}
    for schedule in sorted(candidates, key=selected.mean_kl):
        best.setdefault(schedule.blocks_run, schedule)
    rules["ours"] = [best[count] for count in sorted(best)]
    tested, test_cost = _run_schedules(setup, jumps, candidates, small_batches(setup), "every schedule")
    periods = {schedule: period for period, schedule in round_robins(n_blocks).items()}
    rows = []
    for rule, schedules in rules.items():
        for schedule in schedules:
            a, b = periods[schedule] if rule == "round robin" else (None, None)
            scores = tested.scores(schedule, seed=setup.settings.seed)
            rows.append(ScheduleRow(rule, a, b, schedule.blocks_run, schedule, scores))
    pairs = [JumpRow(*jump, explained[jump], costs[jump]) for jump in sorted(costs)]
    facts = {
        "estimator": estimator,
        "n_fit": jumps.provenance.n_fit,
        "positions": jumps.provenance.positions,
        "budget": setup.settings.rerun_tokens,
        "blocks": n_blocks,
        "jumps alone": to_json(alone_cost),
        "choosing": to_json(validation_cost),
        "schedules": to_json(test_cost),
    }
    single = {row.blocks_run: row.scores.p1.mean for row in rows if row.rule == "single jump"}
    headline = Headline({}, {}, {})
    for rule in rules:
        name = rule.replace(" ", "_")
        p1 = [(row.blocks_run, row.scores.p1.mean) for row in rows if row.rule == rule]
        good = [count for count, value in p1 if value >= GOOD_AGREEMENT]
        if p1:
            headline.mean_p1[name] = sum(value for _, value in p1) / len(p1)
            headline.mean_lead[name] = sum(value - single[count] for count, value in p1) / len(p1)
            headline.blocks_for_good_agreement[name] = min(good, default=n_blocks)
    return Result("layer_skipping", Tables(rows, pairs), headline, [note] if note else [], facts)


def with_validation_documents(setup: Setup) -> tuple[Setup, str | None]:
    """Return a run that has validation documents, and a note where a tenth of the fit documents had to become them."""
    splits = setup.splits()
    if splits.validation:
        return setup, None
    held_out = max(1, len(splits.fit) // 10)
    split = f"{len(splits.fit) - held_out}/{held_out}/{len(splits.test)}"
    note = (
        f"The split {setup.settings.split} has no validation documents: {held_out} of the {len(splits.fit)} fit "
        f"documents were held out to choose on."
    )
    return setup.with_empty_cache(settings=replace(setup.settings, split=split)), note


def run_schedule(rerun: Rerun, schedule: Schedule, jumps: Jumps) -> Tensor:
    """Return the states at level L, at all positions; states before the first jump come from the ordinary run."""
    level = schedule.legs[0][1]
    states = rerun.levels[level]
    for source, target in schedule.jumps:
        states = rerun.from_level(level, states, to=source)
        states = apply_map(jumps[source, target], states)
        level = target
    return rerun.from_level(level, states)


def _validation_batches(setup: Setup, share: float = 1.0) -> Batches:
    # More than one position a document even in the paper's protocol: these numbers only choose.
    positions = setup.model.prediction_positions
    return small_batches(setup, share, part="validation", positions=positions)


def _jump_costs(setup: Setup, jumps: Jumps) -> tuple[dict[Jump, float], Cost]:
    """Return the KL divergence of the output for every jump when it is the only one."""
    n_blocks = setup.model.n_blocks
    alone = {(a.index, b.index): Schedule(((a.index, b.index),), n_blocks) for a, b in jumps}
    batches = _validation_batches(setup, ALONE_SHARE)
    variants, cost = _run_schedules(setup, jumps, list(alone.values()), batches, "each jump alone")
    return {jump: variants.mean_kl(schedule) for jump, schedule in alone.items()}, cost


def _run_schedules(
    setup: Setup, jumps: Jumps, schedules: Sequence[Schedule], batches: Batches, purpose: str
) -> tuple[Variants, Cost]:
    """Run every schedule over the batches."""
    cost = announce_cost(
        f"alternation, {purpose}",
        setup.model,
        batches,
        block_runs=sum(schedule.blocks_run - schedule.legs[0][1] for schedule in schedules),
        unembeddings=len(schedules) + 1,
    )
    variants = Variants(setup.model)
    for rerun in variants.reruns(batches, setup.progress):
        for schedule in schedules:
            variants.add(schedule, rerun.pick(run_schedule(rerun, schedule, jumps)))
    return variants, cost


def figures(result: Result[Tables, Headline]) -> list[Panel]:
    """Return precision@1 and KL of every rule against the blocks run, then the jumps alone."""
    rows, pairs = result.tables.schedules, result.tables.pairs
    n_blocks = rows[0].schedule.n_blocks
    within = [row for row in rows if row.blocks_run <= n_blocks / 2]
    reading = f"Every schedule runs more than half of the {n_blocks} blocks."
    if within:
        best = max(within, key=lambda row: row.scores.p1.mean)
        reading = (
            f"Of the schedules that run at most half of the blocks, the best is by the rule {best.rule} with "
            f"{best.blocks_run} of {n_blocks} blocks: it predicts the model's token in "
            f"{percent(best.scores.p1.mean)} of the cases."
        )

    def chart(title: str, scale: Literal["unit", "zero"], score: Callable[[ScheduleRow], Value]) -> go.Figure:
        """Draw, for every rule and number of blocks run, the schedule with the highest precision@1."""
        lines: dict[str, list[tuple[float, Value]]] = {}
        for rule in unique(row.rule for row in rows):
            best: dict[int, ScheduleRow] = {}
            for row in sorted(rows, key=lambda row: -row.scores.p1.mean):
                if row.rule == rule:
                    best.setdefault(row.blocks_run, row)
            lines[rule] = [(count, score(best[count])) for count in sorted(best)]
        return line_chart(title, lines, x="blocks run", scale=scale, whole_x=True, dotted=["round robin"], height=360)

    charts = [
        chart("precision@1", "unit", lambda row: row.scores.p1),
        chart("KL from the model, nats", "zero", lambda row: row.scores.kl),
    ]
    cheap, dear = (end(pairs, key=lambda row: row.kl) for end in (min, max))
    costs = (
        f"On validation documents, the jump from level {cheap.source} to {cheap.target} costs least (KL "
        f"{number(cheap.kl)}) and the jump from level {dear.source} to {dear.target} most (KL {number(dear.kl)})."
    )
    alone = [
        draw_heat_map({(row.target, row.source): row.r2 for row in pairs}, title="R²", span=(0.0, 1.0)),
        draw_heat_map({(row.target, row.source): row.kl for row in pairs}, title="KL from the model, nats"),
    ]
    return [
        Panel("Precision against blocks run", reading, ("schedules",), charts),
        Panel("Each jump alone", costs, ("pairs",), alone),
    ]


STUDY: Study[Tables, Headline] = Study(
    "layer_skipping", "which blocks to run, and which to skip?", run, figures, all_position_pairs="all"
)
