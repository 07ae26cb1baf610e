"""`early_exit`: early exit, replayed with the rule of the authors of `mat` (section 6 of the paper).

Every example is scored at all levels once; λ then determines its exit level. The cost is the mean number of blocks
run; the accuracy is how often the token at the exit level is the model's. The exact curve has a point for every λ at
which an exit level changes, for every lens alike; the paper's grid of λ reads a few points of it. For comparison: exits
at a fixed level, and an oracle that exits at the first level whose best token is the model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
import plotly.graph_objects as go
import torch
from numpy.typing import NDArray
from torch import Tensor

from layerjump.generation.exit_rules import FINE, GRID, SoftmaxGap
from layerjump.metrics.bootstrap import mean_interval, statistic_interval
from layerjump.studies.charts import GREY, Panel, Value, colours, draw_bars, empty_figure, line_chart
from layerjump.studies.formatting import html_table, identity_last, listed, number, percent, safe, unique
from layerjump.studies.results import Column, Finding, Interval, Record, Result, Study
from layerjump.studies.setup import Setup

AUTHORS_BERT_POSITION = 3
"""The position t that the authors' BERT code passes to the rule for every example."""
LISTED_POINTS = 100
"""Points of an exact curve that are listed and drawn; the blocks saved are read from all of them."""

Floats = NDArray[np.float64]
Curve = Callable[[Floats], tuple[Floats, Floats]]
"""Mean blocks run and agreement at every threshold, from the weight of each example."""


class CurveRow(Record):
    """One threshold of a rule, or one fixed level."""

    lens: str
    kind: str
    """`exact` (the rule at every λ), `dynamic` (at the paper's λ) or `fixed`."""
    at: float
    """λ of the rule, or the level."""
    blocks: float
    """Blocks run, on average."""
    agreement: Annotated[Interval, Column("agreement{}")]


class SavedRow(Record):
    """Blocks saved at a target agreement."""

    lens: str
    kind: str
    """`exact`, `dynamic`, `fixed` or `oracle`."""
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
    """Blocks saved by kind, lens and target, such as `exact_mat_at_0.95`."""

    blocks_saved: Annotated[dict[str, float], Column("{}")]


class Exits(NamedTuple):
    """Where examples exit under one threshold."""

    level: Tensor
    right: Tensor
    """Whether the token at that level is the model's."""


@dataclass(frozen=True)
class ExactCurve:
    """Exits under every λ at which the exit level of any example changes.

    With a falling λ, examples leave level L one after another and exit earlier and earlier. Each event is one example
    that exits at an earlier level than before; events at the same λ happen together.
    """

    n_blocks: int
    right_at_last: Floats
    """(examples,)"""
    lam: Floats
    """(events,), falling: the event happens below this λ."""
    example: NDArray[np.int64]
    level_change: Floats
    right_change: Floats

    @classmethod
    def of(cls, confidence: Tensor, hits: Tensor, rule: SoftmaxGap, position: Tensor) -> ExactCurve:
        """The curve of examples from their gaps and hits at every level, (levels, examples) each."""
        n_blocks, right = len(confidence) - 1, hits.double().numpy()
        # A gap g passes at level l if g > 0.9 λ + decay, so below λ = (g − decay) / 0.9.
        decay = rule.threshold(position) - 0.9 * rule.lam
        critical = ((confidence.double() - decay) / 0.9).numpy()
        highest = np.maximum.accumulate(critical[1:-1])
        earlier = np.vstack([np.full_like(highest[:1], -np.inf), highest[:-1]])[: len(highest)]
        exits_at = critical[1:-1] > earlier  # a level is the first to pass at some λ if it exceeds all before it
        level_after = np.full(critical.shape[1], n_blocks)
        events = []
        for level in range(n_blocks - 1, 0, -1):
            (examples,) = np.nonzero(exits_at[level - 1])
            after = level_after[examples]
            change = right[level, examples] - right[after, examples]
            events.append(np.stack([critical[level, examples], examples, level - after, change]))
            level_after[examples] = level
        lam, example, level_change, right_change = np.concatenate([np.empty((4, 0)), *events], 1)
        order = np.argsort(-lam, kind="stable")
        columns = lam[order], example[order].astype(np.int64), level_change[order], right_change[order]
        return cls(n_blocks, right[-1], *columns)

    @property
    def lams(self) -> Floats:
        """One λ inside every interval in which nothing changes, falling; under the first, the full model runs."""
        if not len(self.lam):
            return np.zeros(1)
        changes = np.unique(self.lam)[::-1]
        return np.concatenate([[changes[0] + 1], (changes[:-1] + changes[1:]) / 2, [changes[-1] - 1]])

    def __call__(self, weights: Floats) -> tuple[Floats, Floats]:
        """Mean blocks run and agreement in every such interval, in the order of `lams`."""
        total, of_example = weights.sum(), weights[self.example]
        # The state after the last event of each λ: those at the same λ happen together.
        ends = np.flatnonzero(np.append(np.diff(self.lam) != 0, True))[: len(self.lam)]
        blocks = self.n_blocks + np.append(0, np.cumsum(of_example * self.level_change)[ends]) / total
        right = weights @ self.right_at_last + np.append(0, np.cumsum(of_example * self.right_change)[ends])
        return blocks, right / total

    def listed_lams(self) -> Floats:
        """Up to `LISTED_POINTS` of the λ, evenly spaced in blocks run."""
        blocks, _ = self(np.ones(len(self.right_at_last)))
        wanted = np.linspace(blocks[0], blocks[-1], LISTED_POINTS)
        return self.lams[np.unique(np.searchsorted(-blocks, -wanted).clip(0, len(blocks) - 1))]


def curve_of(exits: Sequence[Exits]) -> Curve:
    """The curve of a few thresholds."""
    levels = np.stack([point.level.double().numpy() for point in exits])
    right = np.stack([point.right.double().numpy() for point in exits])
    return lambda weights: (levels @ weights / weights.sum(), right @ weights / weights.sum())


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

        def replay(lam: float, index: int = index, hits: Tensor = hits) -> Exits:
            level = SoftmaxGap(lam, length).replay(scores.confidence[index], position)
            return Exits(level, hits.gather(0, level[None])[0])

        grid = sorted({*GRID, *(FINE if lens == "identity" else ())})
        exact = ExactCurve.of(scores.confidence[index], hits, SoftmaxGap(0, length), position)
        lams = sorted(map(float, exact.listed_lams()))
        exact_exits, dynamic = ([replay(lam) for lam in values] for values in (lams, grid))
        fixed = [Exits(torch.full_like(scores.model_top, k), right) for k, right in enumerate(hits)]
        for kind, points, exits in (
            ("exact", lams, exact_exits),
            ("dynamic", grid, dynamic),
            ("fixed", range(len(fixed)), fixed),
        ):
            right = np.stack([point.right.double().numpy() for point in exits])
            intervals = zip(*mean_interval(right, documents, seed=seed), strict=True)
            for at, point, interval in zip(points, exits, intervals, strict=True):
                blocks = float(point.level.double().mean())
                curves.append(CurveRow(lens, kind, float(at), blocks, Interval(*map(float, interval))))
        by_kind: dict[str, Curve] = {"exact": exact, "dynamic": curve_of(dynamic), "fixed": curve_of(fixed)}
        for target in setup.settings.targets:
            for kind, curve in by_kind.items():
                saved.append(saved_row(lens, kind, curve, target, scores.document, setup))
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
        "Blocks saved at a target are read from the exact curve, which has a point for every λ at which anything "
        "changes, alike for every lens; `dynamic` rows read the paper's λ grid (ten steps, nine more near 1 for the "
        "identity). Between neighbouring points of a curve's upper envelope (the best agreement at no more cost) they "
        "are interpolated linearly; the paper does not say how it interpolates. Only blocks are counted, not the map "
        "and the unembedding at every level."
    )
    return Result("early_exit", Tables(curves, saved), headline_of(saved), [note], facts)


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


def saved_row(lens: str, kind: str, curve: Curve, target: float, documents: Tensor, setup: Setup) -> SavedRow:
    """Return the blocks that a rule saves at a target agreement, from its curve."""
    n_blocks = setup.model.n_blocks

    def saving(weights: np.ndarray) -> float:
        return n_blocks - blocks_needed(*curve(weights), target)

    saved = saving(np.ones(len(documents)))
    low, high = statistic_interval(saving, documents.numpy(), seed=setup.settings.seed)
    return SavedRow(lens, kind, target, saved, low, high, saved / n_blocks)


RULES = {
    "exact": "confidence rule",
    "dynamic": "confidence rule, the paper's grid",
    "fixed": "fixed level",
    "oracle": "oracle",
}


def _rule_kind(rows: Sequence[CurveRow] | Sequence[SavedRow]) -> str:
    """The kind of rows that state the confidence rule: the exact curve; in results of earlier versions, the grid."""
    return "exact" if any(row.kind == "exact" for row in rows) else "dynamic"


def figures(result: Result[Tables, Headline]) -> list[Panel]:
    """Return agreement against blocks run, then the blocks saved at each target."""
    curves, saved = result.tables.curves, result.tables.saved
    targets, most, rule = _targets(saved), max(row.blocks for row in curves), _rule_kind(curves)
    cheap = []
    for lens in identity_last(row.lens for row in curves):
        rows = [row for row in curves if (row.lens, row.kind) == (lens, rule) and row.blocks <= most / 2]
        if rows:
            best = max(rows, key=lambda row: row.agreement.mean)
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
    lenses, rule = identity_last(row.lens for row in rows), _rule_kind(rows)
    lines: dict[str, list[tuple[float, Value]]] = {}
    paint = {}
    for lens in lenses:
        curves = sorted((r for r in rows if r.lens == lens), key=lambda row: row.blocks)
        dynamic, fixed = (f"{lens}, {RULES[kind]}" for kind in ("exact", "fixed"))
        lines[dynamic] = [(r.blocks, r.agreement) for r in curves if r.kind == rule]
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
    target, first = _targets(rows)[0], _rule_rows(rows)
    n_blocks = max(row.blocks for row in result.tables.curves)
    parts = [
        f"{_subject(row.lens)} never reaches it"
        if math.isnan(row.blocks_saved)
        else f"{_subject(row.lens)} saves {number(row.blocks_saved)} of {n_blocks:g} blocks ({percent(row.share)}; "
        f"95 % interval {number(row.low)} to {number(row.high)})"
        for row in first
    ]
    oracles = [row for row in rows if row.kind == "oracle"]
    best = max(oracles, key=lambda row: row.blocks_saved)
    return (
        f"At {percent(target)} agreement with the full model, {listed(parts)}; an oracle would save "
        f"{number(best.blocks_saved)} ({best.lens})."
    )


def _subject(lens: str) -> str:
    return "the identity" if lens == "identity" else lens


def _rule_rows(rows: Sequence[SavedRow]) -> list[SavedRow]:
    """Return the rows of the confidence rule at the first target, the identity last."""
    target, rule = _targets(rows)[0], _rule_kind(rows)
    by_lens = {row.lens: row for row in rows if (row.kind, row.target) == (rule, target)}
    return [by_lens[lens] for lens in identity_last(by_lens)]


def finding(result: Result[Tables, Headline]) -> Finding:
    """Return the blocks that the first lens and the identity save at the first target."""
    rows = result.tables.saved
    best, identity = _rule_rows(rows)[0], _rule_rows(rows)[-1]
    n_blocks = max(row.blocks for row in result.tables.curves)

    def share(row: SavedRow) -> str:
        return "never reached" if math.isnan(row.share) else percent(row.share)

    return Finding(
        f"Blocks saved at {percent(_targets(rows)[0])} agreement",
        f"{number(best.blocks_saved)} of {n_blocks:g}",
        f"with {best.lens} ({share(best)}); with the identity {number(identity.blocks_saved)} ({share(identity)}).",
    )


STUDY = Study("early_exit", "how many blocks does early exit save?", run, figures, finding)
