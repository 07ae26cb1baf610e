"""`map_size`: what do maps and shortcuts cost, and what do they give?

Protocol: maps to the last level of several kinds are scored on the same second moments and test positions: full-rank
maps, low-rank maps, one map for all levels, and full-rank maps stored in half precision or int8 (written, read back,
then scored). Then the cost of an early exit at each level, and of each layer-skipping schedule if `layer_skipping` ran
before in the same run.

Floating-point operations are counted per token from the weights: a multiply and an add are two operations. Norms,
activation functions and the products of attention with earlier tokens, which grow with the context and not with the
weights, are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple, get_args

import plotly.graph_objects as go
from torch import Tensor, nn

from layerjump.errors import BadEstimator
from layerjump.jumps.estimators.low_rank import low_rank, truncate_rank
from layerjump.jumps.estimators.n_njtc import njtc_rank
from layerjump.jumps.estimators.registry import EstimatorSettings, Pooling
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.jumps import JumpInfo, Jumps
from layerjump.jumps.maps import STORAGES, Affine, quantize_map, to_affine
from layerjump.jumps.moments_of_splits import SplitMoments
from layerjump.lens.lens import Lens
from layerjump.models.model import Model
from layerjump.models.sites import Pair, Site
from layerjump.models.structure import unembedding_metric
from layerjump.studies import layer_skipping
from layerjump.studies.charts import Panel, colours, empty_figure, line_chart, unit_axis
from layerjump.studies.formatting import number, percent, safe, unique
from layerjump.studies.layer_skipping import Schedule
from layerjump.studies.results import Column, Record, Result, Study
from layerjump.studies.setup import Setup, hits_below_last, maps_of, mean_r2, r2_of_maps

RANK_DIVISORS = (2, 4, 8, 16, 32, 100)
"""Low ranks are d_model divided by these."""
FULL_RANK, LOW_RANK, LOW_RANK_METRIC = ("full rank", "low-rank", "low-rank in the unembedding's metric")
POOLED, STORED = "one map for all levels", "full rank, stored in fewer bits"


class MapRow(Record):
    """One kind of map, for all levels."""

    name: Annotated[str, Column("map")]
    rank: int | None
    parameters: int
    bytes: int
    r2: float
    r2_weighted: Annotated[float, Column("r2 weighted")]
    p1: Annotated[float, Column("p@1")]
    family: Annotated[str | None, Column(optional=True)] = None
    """What kinds of map are drawn as one line; older results do not have it."""


class ExitRow(Record):
    """An early exit at one level: the blocks up to it, the jump and the LM head."""

    level: int
    blocks: int
    flops: Annotated[int, Column("flops per token")]
    flops_share: Annotated[float, Column("share of flops")]
    map_bytes: Annotated[int, Column("map bytes")]
    p1: Annotated[float, Column("p@1")]


class ScheduleRow(Record):
    """A layer-skipping schedule; `single jump` with few blocks skipped is a pruned model."""

    rule: str
    schedule: Schedule
    blocks: int
    flops: Annotated[int, Column("flops per token")]
    flops_share: Annotated[float, Column("share of flops")]
    map_bytes: Annotated[int, Column("map bytes")]
    p1: Annotated[float, Column("p@1")]


class Tables(Record):
    """Costs of maps, of early exits and of schedules."""

    maps: list[MapRow]
    exits: list[ExitRow]
    schedules: Annotated[list[ScheduleRow] | None, Column(optional=True)] = None


class Headline(Record):
    """The smallest maps that lose at most one point of precision@1 against the first kind."""

    full_bytes: int
    full_p1: Annotated[float, Column("full_p@1")]
    smallest_within_a_point: str
    smallest_bytes: int
    smallest_p1: Annotated[float, Column("smallest_p@1")]


def block_flops(model: Model) -> list[int]:
    """Return the operations of each block."""
    return [_matrix_flops(block) for block in model.structure.blocks]


def unembedding_flops(model: Model) -> int:
    """Return the operations from the last level to the logits."""
    steps = [step for step in model.structure.final_steps if isinstance(step, nn.Module)]
    return sum(map(_matrix_flops, [*steps, model.structure.unembedding]))


def jump_flops(jump: nn.Module) -> int:
    """Return the operations of one jump without its bias."""
    return 2 * sum(factor.numel() for factor in to_affine(jump).factors)


def jump_bytes(jump: nn.Module) -> int:
    """Return the bytes of one jump in memory."""
    return sum(parameter.nbytes for parameter in jump.parameters())


def _matrix_flops(module: nn.Module) -> int:
    """Return two operations for each entry of each matrix: every token is multiplied with every entry once."""
    return 2 * sum(weight.numel() for weight in module.parameters() if weight.dim() == 2)


def run(setup: Setup) -> Result[Tables, Headline]:
    """Score every kind of map, then count what exits and schedules cost."""
    moments = setup.moments("to-last", use_validation=True)
    kinds, notes = _map_kinds(setup, moments)
    provenance = solve_jumps(moments, "identity").provenance
    lenses = {}
    for kind in kinds:
        infos = {pair: JumpInfo(*pair, kind.name) for pair in kind.maps}
        lenses[kind.name] = Lens(setup.model, Jumps.from_maps(kind.maps, infos, provenance))
    few = setup.few_test_batches()
    maps = []
    for kind, p1 in zip(kinds, hits_below_last(setup.score_lenses(lenses, few)).mean(-1).tolist(), strict=True):
        r2 = mean_r2(r2_of_maps(kind.maps, moments.test))
        maps.append(MapRow(kind.name, kind.rank, kind.n_parameters, kind.n_bytes, *r2, p1, kind.family))

    estimator, last = setup.settings.estimators[0], setup.model.n_blocks
    scores, jumps = setup.lens_scores(), setup.jumps(estimator)
    precision = scores.hits(1)[scores.lenses.index(estimator)].double().mean(-1).tolist()
    blocks, head = block_flops(setup.model), unembedding_flops(setup.model)
    exits = []
    for level in range(last + 1):
        flops = sum(blocks[:level]) + head + jump_flops(jumps[level, last])
        share = flops / (sum(blocks) + head)
        exits.append(ExitRow(level, level, flops, share, jump_bytes(jumps[level, last]), precision[level]))
    alternation, schedules = setup.result_of(layer_skipping.STUDY), None
    if alternation is None:
        notes.append(
            "Layer-skipping schedules are listed here if the study `layer_skipping` runs before this one in a run."
        )
    else:
        schedules, jump = [], jumps[0, last]
        for row in alternation.tables.schedules:
            legs, n_jumps, p1 = row.schedule.legs, len(row.schedule.jumps), row.scores.p1.mean
            flops = sum(sum(blocks[start:end]) for start, end in legs) + n_jumps * jump_flops(jump) + head
            cost = flops, flops / (sum(blocks) + head), n_jumps * jump_bytes(jump)
            schedules.append(ScheduleRow(row.rule, row.schedule, row.blocks_run, *cost, p1))
    notes.append(
        "Operations are two for each weight that a token is multiplied with (blocks, jump and LM head); the products "
        "of attention with earlier tokens are not counted. int8 has one float32 scale a row. Where states hardly vary "
        "in some directions, least squares has huge weights that cancel, and rounding ruins them; ridge has none."
    )
    facts = {
        "n_fit": moments.fit.n,
        "n_test": moments.test.n,
        "n_examples": few.n_picks,
        "exits_by": estimator,
        "n_examples_exits": scores.n_examples,
    }
    full = maps[0]
    smallest = min((row for row in maps if row.p1 >= full.p1 - 0.01), key=lambda row: row.bytes)
    headline = Headline(full.bytes, full.p1, smallest.name, smallest.bytes, smallest.p1)
    return Result("map_size", Tables(maps, exits, schedules), headline, notes, facts)


class _MapKind(NamedTuple):
    """One way to represent the maps of all levels."""

    name: str
    family: str
    maps: dict[Pair, Affine]
    n_parameters: int
    n_bytes: int

    @classmethod
    def in_float32(cls, name: str, family: str, maps: dict[Pair, Affine]) -> _MapKind:
        """Count a map that serves several levels once."""
        distinct = {id(jump): jump.n_parameters for jump in maps.values()}
        return cls(name, family, maps, sum(distinct.values()), 4 * sum(distinct.values()))

    @property
    def rank(self) -> int | None:
        factors = next(iter(self.maps.values())).factors
        return factors[0].shape[1] if len(factors) == 2 else None


def _map_kinds(setup: Setup, moments: SplitMoments) -> tuple[list[_MapKind], list[str]]:
    """Return every kind of map that this model and text allow, and notes on those that are left out."""
    notes: list[str] = []
    has_select = bool(moments.validation.n)
    names = ("mat", "affine", "ridge") if has_select else ("mat", "affine")
    full = {name: maps_of(solve_jumps(moments, name)) for name in names}
    kinds = [_MapKind.in_float32(name, FULL_RANK, maps) for name, maps in full.items()]
    low_ranks = unique(max(1, setup.model.d_model // divisor) for divisor in RANK_DIVISORS)  # falling
    kinds += _low_rank_kinds(LOW_RANK, moments, low_ranks)
    try:
        metric = unembedding_metric(setup.model, Site(setup.model.n_blocks))
        kinds += _low_rank_kinds(LOW_RANK_METRIC, moments, low_ranks, metric)
    except BadEstimator as error:
        notes.append(f"Low rank in the unembedding's metric is left out: {error}.")
    njtc = maps_of(solve_jumps(moments, "n-njtc"))
    kinds.append(_MapKind.in_float32("n-njtc", "n-njtc", njtc))
    if has_select:
        for pooling in get_args(Pooling):
            rank = njtc_rank(moments.info.width)
            jumps = maps_of(solve_jumps(moments, "ojfa", EstimatorSettings(rank=rank, ojfa_pooling=pooling)))
            shared = dict.fromkeys(jumps, next(iter(jumps.values())))
            kinds.append(_MapKind.in_float32(f"ojfa {pooling}", POOLED, shared))
    else:
        notes.append("ridge and ojfa are left out: they are tuned on validation documents, and this split has none.")
    del full["affine"]  # stored in fewer bits it is much like mat
    for name, maps in full.items():
        n_parameters = sum(jump.n_parameters for jump in maps.values())
        for storage in STORAGES[1:]:
            stored = {pair: quantize_map(jump, storage) for pair, jump in maps.items()}
            affine = {pair: jump.affine for pair, jump in stored.items()}
            n_bytes = sum(jump.n_bytes for jump in stored.values())
            kinds.append(_MapKind(f"{name} in {storage}", STORED, affine, n_parameters, n_bytes))
    return kinds, notes


def _low_rank_kinds(
    family: str, moments: SplitMoments, low_ranks: Sequence[int], metric: Tensor | None = None
) -> list[_MapKind]:
    """Return maps of falling ranks, all from the solution of the highest rank."""
    maps: dict[int, dict[Pair, Affine]] = {rank: {} for rank in low_ranks}
    for a, b in moments.fit.pairs:
        source, target = moments.fit.source(a), moments.fit.target(a, b)
        (highest,) = low_rank(source, [target], rank=low_ranks[0], metric=metric)
        for rank in low_ranks:
            maps[rank][a, b] = truncate_rank(highest, rank, source, target)
    return [_MapKind.in_float32(f"{family} {rank}", family, maps[rank]) for rank in low_ranks]


def figures(result: Result[Tables, Headline]) -> list[Panel]:
    """Return quality against bytes for maps, and against operations for exits and schedules."""
    rows, exits, schedules = result.tables.maps, result.tables.exits, result.tables.schedules or []
    head = result.headline

    def family(row: MapRow) -> str:
        return row.family or (FULL_RANK if row.rank is None else LOW_RANK)

    families = unique(map(family, rows))

    def chart(title: str, score: Callable[[MapRow], float]) -> go.Figure:
        figure = empty_figure(title, x="bytes of the maps of all levels", height=360)
        for name in families:
            group = sorted((row for row in rows if family(row) == name), key=lambda row: row.bytes)
            # Rows of older results have no family: a line through them would mix several kinds.
            has_line = group[0].family in (LOW_RANK, LOW_RANK_METRIC)
            figure.add_scatter(
                x=[row.bytes for row in group],
                y=[score(row) for row in group],
                mode="lines+markers" if has_line else "markers",
                name=safe(name),
                legendgroup=safe(name),
                line={"color": colours(families)[name]},
                marker={"size": 8, "color": colours(families)[name]},
                customdata=[[safe(row.name)] for row in group],
                hovertemplate="<b>%{customdata[0]}</b><br>%{x:,} bytes: %{y:.3f}<extra></extra>",
            )
        return figure.update_xaxes(type="log", dtick=1, tickformat="~s")

    charts = [
        unit_axis(chart("precision@1, mean over levels", lambda row: row.p1)),
        unit_axis(chart("R², mean over levels", lambda row: row.r2), [row.r2 for row in rows]),
    ]
    reading = (
        f"The maps of {rows[0].name} take {number(head.full_bytes)} bytes at a precision@1 of {number(head.full_p1)}; "
        f"the smallest maps within one point of it, {head.smallest_within_a_point}, take {number(head.smallest_bytes)} "
        f"bytes ({percent(head.smallest_bytes / head.full_bytes)}) at {number(head.smallest_p1)}."
    )
    panels = [Panel("Quality and size of maps", reading, ("maps",), charts)]

    lines = {"early exit": [(row.flops_share, row.p1) for row in exits]}
    for rule in unique(row.rule for row in schedules):
        # Of the schedules of one cost, the best.
        best: dict[float, float] = {}
        for schedule in schedules:
            if schedule.rule == rule:
                best[schedule.flops_share] = max(schedule.p1, best.get(schedule.flops_share, 0.0))
        lines[f"schedule: {rule}"] = sorted(best.items())
    title = "operations per token, share of the model's"
    figure = line_chart("", lines, x=title, y="precision@1", scale="unit")
    half = [exit_row for exit_row in exits if exit_row.flops_share <= 0.5]
    reading = f"The cheapest exit takes {percent(exits[0].flops_share)} of the model's operations."
    if half:
        best_exit = max(half, key=lambda row: row.p1)
        reading = (
            f"Of the exits that take at most half of the model's operations, level {best_exit.level} is the best: a "
            f"precision@1 of {number(best_exit.p1)} for {percent(best_exit.flops_share)} of the operations."
        )
    tables = ("exits", "schedules") if schedules else ("exits",)
    return [*panels, Panel("Quality and operations of shortcuts", reading, tables, [figure])]


STUDY = Study("map_size", "what do maps and shortcuts cost, and what do they give?", run, figures)
