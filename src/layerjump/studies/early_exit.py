"""`exits`: early exit, replayed exactly as the authors of `mat` coded it (papers' section 6).

Every example is read at all levels once; each λ of the grid then says where it would have stopped. Cost is the mean
number of blocks run, accuracy how often the token given out is the model's own. Beside the rule: stopping at a fixed
level, and an oracle that stops at the first level whose best token is the model's.

Figures of `exits`: what stopping early costs and saves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
import torch
from torch import Tensor

from layerjump.generation.rules import FINE, GRID, SoftmaxGap
from layerjump.lens.evaluate import LensScores
from layerjump.metrics.bootstrap import mean_interval, statistic_interval
from layerjump.studies.charts import (
    GREY,
    Panel,
    Study,
    add_line,
    bars,
    colours,
    empty_figure,
    lenses_of,
    listed,
    number,
    percent,
    safe,
    unique,
    where,
)
from layerjump.studies.results import Result, Row
from layerjump.studies.setup import Setup
from layerjump.studies.tables import html_table

AUTHORS_BERT_POSITION = 3
"""The t that the authors' BERT code gives the rule for every example."""


def run(setup: Setup) -> Result:
    """Curves of agreement against blocks run, and what each saves at the target agreement."""
    readings, settings = setup.readings(), setup.settings
    given = _given_position(setup)
    position = readings.position if given is None else torch.full_like(readings.position, given)
    length = float((readings.position + 1).double().mean())
    curves: list[Row] = []
    saved: list[Row] = []
    for place, lens in enumerate(readings.lenses):
        grid = sorted({*GRID, *(FINE if lens == "identity" else ())})
        dynamic = [_replay(readings, place, position, value, length) for value in grid]
        fixed = _fixed(readings, place)
        curves += _rows(lens, "dynamic", grid, dynamic, readings, setup)
        curves += _rows(lens, "fixed", range(len(fixed)), fixed, readings, setup)
        for target in settings.targets:
            for kind, points in (("dynamic", dynamic), ("fixed", fixed)):
                saved.append(saved_row(lens, kind, points, target, readings.document, setup))
        saved.append(_oracle(readings, place, setup))
    result = Result("exits", {"curves": curves, "saved": saved})
    result.settings = {
        "rule": "stop at the first level ≥ 1 with p1 − p2 > 0.9 λ + 0.1 exp(−4 t / N)",
        "N": length,
        "t": "its own position" if given is None else given,
        "n_examples": readings.n_examples,
        "blocks": setup.model.n_blocks,
    }
    result.headline = {
        f"{row['kind']}_{row['lens']}_at_{row['target']:g}": row["blocks_saved"]
        for row in saved
        if row["target"] is not None
    }
    result.notes.append(
        "Blocks saved at a target are read off the curve by linear interpolation between neighbouring points of its "
        "upper envelope (the best agreement reached at no more cost); the paper does not say how it interpolates. "
        "They count blocks alone: not the map's product, nor the vocabulary product at every level."
    )
    return result


def _given_position(setup: Setup) -> int | None:
    """The t of every example; None: each has its own."""
    given = setup.settings.exit_position
    if given is None and setup.settings.paper and setup.model.masked:
        return AUTHORS_BERT_POSITION
    return given


def _replay(
    readings: LensScores, place: int, position: Tensor, strength: float, length: float
) -> tuple[Tensor, Tensor]:
    """Where each example stops under one λ, and whether it gives the model's token there."""
    levels = SoftmaxGap(strength, length).replay(readings.confidence[place], position)
    return levels, readings.hits(1)[place].gather(0, levels[None])[0]


def _fixed(readings: LensScores, place: int) -> list[tuple[Tensor, Tensor]]:
    hits = readings.hits(1)[place]
    return [(torch.full_like(readings.best, level), hits[level]) for level in range(len(hits))]


def _rows(
    lens: str,
    kind: str,
    grid: Sequence[float] | range,
    points: list[tuple[Tensor, Tensor]],
    readings: LensScores,
    setup: Setup,
) -> list[Row]:
    documents, seed = readings.document.numpy(), setup.settings.seed
    hits = np.stack([hit.double().numpy() for _, hit in points])
    _, low, high = mean_interval(hits, documents, seed=seed)
    return [
        {
            "lens": lens,
            "kind": kind,
            "at": float(at),
            "blocks": float(levels.double().mean()),
            "agreement": float(hit.double().mean()),
            "agreement low": float(low[index]),
            "agreement high": float(high[index]),
        }
        for index, (at, (levels, hit)) in enumerate(zip(grid, points, strict=True))
    ]


def blocks_needed(cost: np.ndarray, agreement: np.ndarray, target: float) -> float:
    """The blocks at which the curve's upper envelope first reaches the target; NaN if it never does."""
    order = np.lexsort((-agreement, cost))
    cost, best = cost[order], np.maximum.accumulate(agreement[order])
    reached = np.flatnonzero(best >= target)
    if not len(reached):
        return float("nan")
    index = int(reached[0])
    if index == 0:
        return float(cost[index])
    share = (target - best[index - 1]) / (best[index] - best[index - 1])
    return float(cost[index - 1] + share * (cost[index] - cost[index - 1]))


def saved_row(
    lens: str,
    kind: str,
    points: list[tuple[Tensor, Tensor]],
    target: float,
    documents: Tensor,
    setup: Setup,
) -> Row:
    """Blocks saved at a target agreement; points are (levels where examples leave, whether they are right there)."""
    levels = np.stack([level.double().numpy() for level, _ in points])
    hits = np.stack([hit.double().numpy() for _, hit in points])
    blocks = setup.model.n_blocks

    def saving(weights: np.ndarray) -> float:
        total = weights.sum()
        return blocks - blocks_needed(levels @ weights / total, hits @ weights / total, target)

    found = saving(np.ones(len(documents)))
    low, high = statistic_interval(saving, documents.numpy(), seed=setup.settings.seed)
    return _saved_row(lens, kind, target, found, low, high, blocks)


def _oracle(readings: LensScores, place: int, setup: Setup) -> Row:
    """The first level, from 1 on, whose best token is the model's: no rule that stops by then can save more."""
    right = readings.hits(1)[place].clone()
    right[0] = False
    first = right.int().argmax(0).double().numpy()
    blocks = setup.model.n_blocks
    mean, low, high = mean_interval(
        blocks - first, readings.document.numpy(), seed=setup.settings.seed
    )
    ends = float(mean), float(low), float(high)
    return _saved_row(readings.lenses[place], "oracle", None, *ends, blocks)


def _saved_row(
    lens: str, kind: str, target: float | None, found: float, low: float, high: float, blocks: int
) -> Row:
    return {
        "lens": lens,
        "kind": kind,
        "target": target,
        "blocks_saved": found,
        "low": low,
        "high": high,
        "share": found / blocks,
    }


RULES = {"dynamic": "confidence rule", "fixed": "fixed level", "oracle": "oracle"}
_CLOSE = 0.2
"""The second picture shows so much of the agreement below 1."""


def curves(study: Study) -> list[Panel]:
    """Agreement with the full model against the blocks run: the whole range, then near the target."""
    rows, saved = study["tables"].get("curves"), study["tables"].get("saved", [])
    if not rows:
        return []
    targets = targets_of(saved)
    low = 1 - _CLOSE
    figures = [
        _curves(rows, targets, "the whole range", (-0.02, 1.03)),
        _curves(rows, targets, "near the target", (min([low, *targets]) - 0.01, 1.01)),
    ]
    return [Panel("Agreement against blocks run", _half_cost(rows), ("curves",), figures)]


def _curves(
    rows: Sequence[Row], targets: Sequence[float], title: str, span: tuple[float, float]
) -> go.Figure:
    figure = empty_figure(title, x="blocks run, mean", y="agreement", height=360)
    lenses = lenses_of(rows)
    paint = colours(lenses)
    for lens in lenses:
        for kind, dash in (("dynamic", "solid"), ("fixed", "dot")):
            mine = sorted(where(rows, lens=lens, kind=kind), key=lambda row: row["blocks"])
            name = f"{lens}, {RULES[kind]}"
            add_line(
                figure,
                mine,
                "blocks",
                "agreement",
                name=name,
                colour=paint[lens],
                dash=dash,
                band=kind == "dynamic",
                hover="blocks",
            )
    for target in targets:
        figure.add_hline(
            y=target,
            line={"color": GREY, "width": 1.2, "dash": "dash"},
            annotation_text=f"{percent(target)} target",
            annotation_position="top left",
            annotation_font_size=11,
        )
    most = max(row["blocks"] for row in rows)
    figure.update_xaxes(range=[-0.03 * most, 1.03 * most])
    return figure.update_yaxes(range=list(span))


def _half_cost(rows: Sequence[Row]) -> str:
    """How much agreement half the blocks buy."""
    most = max(row["blocks"] for row in rows)
    parts = []
    for lens in lenses_of(rows):
        within = [
            row for row in where(rows, lens=lens, kind="dynamic") if row["blocks"] <= most / 2
        ]
        best = max(within, key=lambda row: row["agreement"], default=None)
        if best:
            parts.append(f"{percent(best['agreement'])} ({lens}, {number(best['blocks'])} blocks)")
    if not parts:
        return f"No strength of the confidence rule runs less than half of the {most:g} blocks."
    return (
        f"With no more than half of the {most:g} blocks, the confidence rule gives the full model's token in at "
        f"best {listed(parts)} of the cases."
    )


def savings(study: Study) -> list[Panel]:
    """Blocks saved at each target, with intervals, beside what an oracle would save."""
    rows = study["tables"].get("saved")
    if not rows:
        return []
    figures = [_bars(rows, target) for target in targets_of(rows)]
    return [
        Panel("Blocks saved", saved_sentence(study), ("saved",), figures, html=_saved_table(rows))
    ]


def _bars(rows: Sequence[Row], target: float) -> go.Figure:
    figure = empty_figure(f"at {percent(target)} agreement", x="blocks saved, mean", height=270)
    lenses = lenses_of(rows)
    paint = colours(lenses)
    for lens in lenses:
        mine = [
            row | {"rule": RULES[row["kind"]]}
            for row in where(rows, lens=lens)
            if row["target"] in (target, None)
        ]
        bars(
            mine,
            "rule",
            "blocks_saved",
            name=lens,
            colour=paint[lens],
            figure=figure,
            low="low",
            high="high",
        )
    figure.update_layout(barmode="group", bargap=0.3)
    figure.update_xaxes(rangemode="tozero")
    return figure.update_yaxes(
        categoryorder="array",
        categoryarray=[*RULES.values()],
        autorange="reversed",
        showgrid=False,
    )


def _saved_table(rows: Sequence[Row]) -> str:
    head = ["lens", "rule", "agreement kept", "blocks saved", "95 % interval", "share of all"]
    body = [
        [
            safe(row["lens"]),
            RULES[row["kind"]],
            "all" if row["target"] is None else percent(row["target"]),
            number(row["blocks_saved"]),
            f"{number(row['low'])} … {number(row['high'])}",
            "–" if row["share"] is None else percent(row["share"]),
        ]
        for lens in lenses_of(rows)
        for row in where(rows, lens=lens)
    ]
    return html_table(head, body, numeric=range(2, 6))


def targets_of(rows: Sequence[Row]) -> list[float]:
    """The agreements that were to be kept."""
    return unique(row["target"] for row in rows if row["target"] is not None)


def saved_sentence(study: Study) -> str:
    """Blocks saved at the first target by every map and by the identity, and what an oracle would save."""
    rows = study["tables"]["saved"]
    blocks, target = study["settings"]["blocks"], targets_of(rows)[0]
    parts = []
    for lens in lenses_of(rows):
        (row,) = where(rows, lens=lens, kind="dynamic", target=target)
        if row["blocks_saved"] is None:
            parts.append(f"{lens} never reaches it")
            continue
        parts.append(
            f"{lens} saves {number(row['blocks_saved'])} of {blocks} blocks ({percent(row['share'])}; 95 % interval "
            f"{number(row['low'])} to {number(row['high'])})"
        )
    best = max(where(rows, kind="oracle"), key=lambda row: row["blocks_saved"])
    return (
        f"At {percent(target)} agreement with the full model, {listed(parts)}; a rule that knew when to stop "
        f"would save {number(best['blocks_saved'])} ({best['lens']})."
    )
