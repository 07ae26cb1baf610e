"""Figures of `exits`: what stopping early costs and saves."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from layerjump.show.charts import add_line, bars
from layerjump.show.look import GREY, colours, empty_figure, number, percent, safe
from layerjump.show.panel import Panel, Row, Study, lenses_of, listed, unique, where
from layerjump.show.tables import html_table

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
