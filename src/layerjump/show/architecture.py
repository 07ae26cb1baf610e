"""Figures of `architecture`: variants beside each other."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from layerjump.show.charts import bars
from layerjump.show.look import BLUE, colours, empty_figure, number
from layerjump.show.panel import Panel, Row, Study, unique

_SHOWN = (
    ("gain", "gain of the map over the identity in own tokens"),
    ("without residual held out", "linearity without residual, held out"),
    ("r2", "R² of the map to the last level"),
    ("perplexity", "held-out perplexity"),
)


def variants(study: Study) -> list[Panel]:
    """One bar a variant; the whiskers are a standard deviation over seeds."""
    rows = study["tables"].get("variants")
    if not rows:
        return []
    named = [row | {"name": f"{row['varies']}: {row['variant']}"} for row in rows]
    figures = [_bars(named, column, title) for column, title in _SHOWN]
    most, least = (end(rows, key=lambda row: row["gain"]) for end in (max, min))
    reading = (
        f"A map to the last level gains most over the identity with {most['varies']} {most['variant']} "
        f"({number(most['gain'])}), least with {least['varies']} {least['variant']} ({number(least['gain'])}); only "
        "variants of one kind differ in that alone."
    )
    return [Panel("Architectures", reading, ("variants", "runs"), figures)]


def _bars(rows: Sequence[Row], column: str, title: str) -> go.Figure:
    figure = empty_figure(title, height=360)
    kinds = unique(row["varies"] for row in rows)
    paint = colours(kinds) if len(kinds) > 1 else dict.fromkeys(kinds, BLUE)
    for kind in kinds:
        mine = [row for row in rows if row["varies"] == kind]
        bars(
            mine,
            "name",
            column,
            name=kind,
            colour=paint[kind],
            figure=figure,
            low=f"{column} low",
            high=f"{column} high",
        )
    return figure.update_yaxes(autorange="reversed")
