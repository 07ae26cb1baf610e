"""`exits`: early exit, replayed with the rule of the authors of `mat` (section 6 of the paper).

Every example is scored at all levels once; each λ of the grid then determines its exit level. The cost is the mean
number of blocks run; the accuracy is how often the token at the exit level is the model's. For comparison: exits at a
fixed level, and an oracle that exits at the first level whose best token is the model's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import numpy as np
import plotly.graph_objects as go
import torch
from torch import Tensor

from layerjump.generation.rules import FINE, GRID, SoftmaxGap
from layerjump.metrics.bootstrap import mean_interval, statistic_interval
from layerjump.studies.display import (
    GREY,
    Panel,
    Value,
    colours,
    draw_bars,
    empty_figure,
    html_table,
    identity_last,
    line_chart,
    listed,
    number,
    percent,
    safe,
    unique,
)
from layerjump.studies.results import Column, Finding, Interval, Record, Result, Study
from layerjump.studies.setup import Setup

AUTHORS_BERT_POSITION = 3
"""The position t that the authors' BERT code passes to the rule for every example."""


class CurveRow(Record):
    """One threshold of a rule, or one fixed level."""

    lens: str
    kind: str
    """`dynamic` (the rule) or `fixed`."""
    at: float
    """λ of the rule, or the level."""
    blocks: float
    """Blocks run, on average."""
    agreement: Annotated[Interval, Column("agreement{}")]


class SavedRow(Record):
    """Blocks saved at a target agreement."""

    lens: str
    kind: str
    """`dynamic`, `fixed` or `oracle`."""
    target: float | None
    """None for the oracle, which always agrees."""
    blocks_saved: float
    """NaN where the curve never reaches the target."""
    low: float
    high: float
    share: float
    """Of all blocks."""


class Tables(Record):
    """Agreement against blocks run, and blocks saved at the targets."""

    curves: list[CurveRow]
    saved: list[SavedRow]


class Headline(Record):
    """Blocks saved by kind, lens and target, such as `dynamic_mat_at_0.95`."""

    blocks_saved: Annotated[dict[str, float], Column("{}")]


class Exits(NamedTuple):
    """Where examples exit under one threshold."""

    level: Tensor
    right: Tensor
    """Whether the token at that level is the model's."""


def run(setup: Setup) -> Result[Tables, Headline]:
    """Replay the rule, compare it with fixed levels, and state the blocks saved at the target agreements."""
    scores, n_blocks, seed = setup.lens_scores(), setup.model.n_blocks, setup.settings.seed
    position, documents = scores.position, scores.document.numpy()
    fixed_position = setup.settings.exit_position
    if fixed_position is None and setup.settings.paper and setup.model.masked:
        fixed_position = AUTHORS_BERT_POSITION
    if fixed_position is not None:
        position = torch.full_like(position, fixed_position)
    length = float((scores.position + 1).double().mean())
    curves: list[CurveRow] = []
    saved: list[SavedRow] = []
    for index, lens in enumerate(scores.lenses):
        hits = scores.hits(1)[index]
        grid = sorted({*GRID, *(FINE if lens == "identity" else ())})
        dynamic = []
        for strength in grid:
            level = SoftmaxGap(strength, length).replay(scores.confidence[index], position)
            dynamic.append(Exits(level, hits.gather(0, level[None])[0]))
        fixed = [Exits(torch.full_like(scores.model_top, k), right) for k, right in enumerate(hits)]
        for kind, points, exits in (("dynamic", grid, dynamic), ("fixed", range(len(fixed)), fixed)):
            right = np.stack([point.right.double().numpy() for point in exits])
            intervals = zip(*mean_interval(right, documents, seed=seed), strict=True)
            for at, point, interval in zip(points, exits, intervals, strict=True):
                blocks = float(point.level.double().mean())
                curves.append(CurveRow(lens, kind, float(at), blocks, Interval(*map(float, interval))))
        for target in setup.settings.targets:
            for kind, exits in (("dynamic", dynamic), ("fixed", fixed)):
                saved.append(saved_row(lens, kind, exits, target, scores.document, setup))
        # An oracle exits at the first level ≥ 1 whose best token is the model's: no rule can save more.
        first = hits[1:].int().argmax(0).double().numpy() + 1
        mean, low, high = map(float, mean_interval(n_blocks - first, documents, seed=seed))
        saved.append(SavedRow(lens, "oracle", None, mean, low, high, mean / n_blocks))
    facts = {
        "rule": "exit at the first level ≥ 1 with p1 − p2 > 0.9 λ + 0.1 exp(−4 t / N)",
        "N": length,
        "t": "its own position" if fixed_position is None else fixed_position,
        "n_examples": scores.n_examples,
        "blocks": n_blocks,
    }
    note = (
        "Blocks saved at a target are interpolated linearly between neighbouring points of the curve's upper envelope "
        "(the best agreement at no more cost); the paper does not say how it interpolates. Only blocks are counted, "
        "not the map and the unembedding at every level."
    )
    return Result("exits", Tables(curves, saved), headline_of(saved), [note], facts)


def headline_of(saved: Sequence[SavedRow]) -> Headline:
    """Return the blocks saved at every target."""
    return Headline(
        {f"{row.kind}_{row.lens}_at_{row.target:g}": row.blocks_saved for row in saved if row.target is not None}
    )


def blocks_needed(cost: np.ndarray, agreement: np.ndarray, target: float) -> float:
    """Return the blocks at which the upper envelope of a curve first reaches the target; NaN if it never does."""
    order = np.lexsort((-agreement, cost))
    cost, best = cost[order], np.maximum.accumulate(agreement[order])
    reached = np.flatnonzero(best >= target)
    if not len(reached):
        return math.nan
    index = int(reached[0])
    if index == 0:
        return float(cost[index])
    share = (target - best[index - 1]) / (best[index] - best[index - 1])
    return float(cost[index - 1] + share * (cost[index] - cost[index - 1]))


def saved_row(lens: str, kind: str, exits: Sequence[Exits], target: float, documents: Tensor, setup: Setup) -> SavedRow:
    """Return the blocks that a rule saves at a target agreement, from its exits under every threshold."""
    levels = np.stack([point.level.double().numpy() for point in exits])
    right = np.stack([point.right.double().numpy() for point in exits])
    n_blocks = setup.model.n_blocks

    def saving(weights: np.ndarray) -> float:
        total = weights.sum()
        return n_blocks - blocks_needed(levels @ weights / total, right @ weights / total, target)

    saved = saving(np.ones(len(documents)))
    low, high = statistic_interval(saving, documents.numpy(), seed=setup.settings.seed)
    return SavedRow(lens, kind, target, saved, low, high, saved / n_blocks)


RULES = {"dynamic": "confidence rule", "fixed": "fixed level", "oracle": "oracle"}


def figures(result: Result[Tables, Headline]) -> list[Panel]:
    """Return agreement against blocks run, then the blocks saved at each target."""
    curves, saved = result.tables.curves, result.tables.saved
    targets, most = _targets(saved), max(row.blocks for row in curves)
    cheap = []
    for lens in identity_last(row.lens for row in curves):
        dynamic = [row for row in curves if (row.lens, row.kind) == (lens, "dynamic") and row.blocks <= most / 2]
        if dynamic:
            best = max(dynamic, key=lambda row: row.agreement.mean)
            cheap.append(f"{percent(best.agreement.mean)} of the cases ({lens}, {number(best.blocks)} blocks)")
    reading = f"At every λ the confidence rule runs more than half of the {most:g} blocks."
    if cheap:
        reading = (
            f"With at most half of the {most:g} blocks, the confidence rule predicts the full model's token in at best "
            f"{listed(cheap)}."
        )
    charts = [
        _curves_chart(curves, targets, "full range", (-0.02, 1.03)),
        _curves_chart(curves, targets, "near the target", (min([0.8, *targets]) - 0.01, 1.01)),
    ]
    head = ["lens", "rule", "agreement", "blocks saved", "95 % interval", "share of all blocks"]
    body = [
        [
            safe(row.lens),
            RULES[row.kind],
            "all" if row.target is None else percent(row.target),
            number(row.blocks_saved),
            f"{number(row.low)} … {number(row.high)}",
            percent(row.share),
        ]
        for lens in identity_last(row.lens for row in saved)
        for row in saved
        if row.lens == lens
    ]
    bars, table = [saved_chart(saved, target, RULES) for target in targets], html_table(head, body, numeric=range(2, 6))
    return [
        Panel("Agreement against blocks run", reading, ("curves",), charts),
        Panel("Blocks saved", saved_sentence(result), ("saved",), bars, html=table),
    ]


def _targets(saved: Sequence[SavedRow]) -> list[float]:
    return unique(row.target for row in saved if row.target is not None)


def _curves_chart(
    rows: Sequence[CurveRow], targets: Sequence[float], title: str, span: tuple[float, float]
) -> go.Figure:
    lenses = identity_last(row.lens for row in rows)
    lines: dict[str, list[tuple[float, Value]]] = {}
    paint = {}
    for lens in lenses:
        curves = sorted((r for r in rows if r.lens == lens), key=lambda row: row.blocks)
        dynamic, fixed = (f"{lens}, {RULES[kind]}" for kind in ("dynamic", "fixed"))
        lines[dynamic] = [(r.blocks, r.agreement) for r in curves if r.kind == "dynamic"]
        lines[fixed] = [(r.blocks, r.agreement.mean) for r in curves if r.kind == "fixed"]
        paint[dynamic] = paint[fixed] = colours(lenses)[lens]
    figure = line_chart(
        title,
        lines,
        x="blocks run, mean",
        y="agreement",
        dotted=[name for name in lines if name.endswith(RULES["fixed"])],
        paint=paint,
        height=360,
    )
    for target in targets:
        figure.add_hline(
            y=target,
            line={"color": GREY, "width": 1.2, "dash": "dash"},
            annotation_text=f"{percent(target)} target",
            annotation_position="top left",
            annotation_font_size=11,
        )
    most = max(row.blocks for row in rows)
    figure.update_xaxes(range=[-0.03 * most, 1.03 * most])
    return figure.update_yaxes(range=list(span))


def saved_chart(rows: Sequence[SavedRow], target: float, labels: Mapping[str, str]) -> go.Figure:
    """Draw the blocks saved at a target agreement (or always), one group of bars for each kind of rule."""
    figure = empty_figure(f"at {percent(target)} agreement", x="blocks saved, mean", height=270)
    lenses = identity_last(row.lens for row in rows)
    for lens in lenses:
        bars = [row for row in rows if row.lens == lens and row.target in (target, None)]
        draw_bars(
            figure,
            [labels[row.kind] for row in bars],
            [Interval(row.blocks_saved, row.low, row.high) for row in bars],
            name=lens,
            colour=colours(lenses)[lens],
        )
    figure.update_layout(barmode="group", bargap=0.3)
    figure.update_xaxes(rangemode="tozero")
    order = {"categoryorder": "array", "categoryarray": [*labels.values()]}
    return figure.update_yaxes(**order, autorange="reversed", showgrid=False)


def saved_sentence(result: Result[Tables, Headline]) -> str:
    """Say how many blocks every lens saves at the first target, and how many the oracle saves."""
    rows = result.tables.saved
    target, first = _targets(rows)[0], _dynamic(rows)
    n_blocks = max(row.blocks for row in result.tables.curves)
    parts = [
        f"{row.lens} never reaches it"
        if math.isnan(row.blocks_saved)
        else f"{row.lens} saves {number(row.blocks_saved)} of {n_blocks:g} blocks ({percent(row.share)}; 95 % interval "
        f"{number(row.low)} to {number(row.high)})"
        for row in first
    ]
    oracles = [row for row in rows if row.kind == "oracle"]
    best = max(oracles, key=lambda row: row.blocks_saved)
    return (
        f"At {percent(target)} agreement with the full model, {listed(parts)}; an oracle would save "
        f"{number(best.blocks_saved)} ({best.lens})."
    )


def _dynamic(rows: Sequence[SavedRow]) -> list[SavedRow]:
    """Return the rows of the confidence rule at the first target, the identity last."""
    target = _targets(rows)[0]
    by_lens = {row.lens: row for row in rows if (row.kind, row.target) == ("dynamic", target)}
    return [by_lens[lens] for lens in identity_last(by_lens)]


def finding(result: Result[Tables, Headline]) -> Finding:
    """Return the blocks that the first lens and the identity save at the first target."""
    rows = result.tables.saved
    best, identity = _dynamic(rows)[0], _dynamic(rows)[-1]
    n_blocks = max(row.blocks for row in result.tables.curves)

    def share(row: SavedRow) -> str:
        return "never reached" if math.isnan(row.share) else percent(row.share)

    return Finding(
        f"Blocks saved at {percent(_targets(rows)[0])} agreement",
        f"{number(best.blocks_saved)} of {n_blocks:g}",
        f"with {best.lens} ({share(best)}); with the identity {number(identity.blocks_saved)} ({share(identity)}).",
    )


STUDY = Study("exits", "how many blocks does early exit save?", run, figures, finding)
