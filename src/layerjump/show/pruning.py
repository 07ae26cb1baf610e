"""Figures of `pruning`: what dropping blocks costs, in loss and in tasks, and what it buys."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from layerjump.show.charts import add_line, level_axis
from layerjump.show.look import colours, empty_figure, number, safe
from layerjump.show.panel import Panel, Row, Study, mean, unique, where


def pruned(study: Study) -> list[Panel]:
    """Perplexity over the whole model's against blocks dropped, and the front over parameters and time."""
    rows = study["tables"].get("pruned")
    if not rows or len(rows) < 2:
        return []
    methods = [name for name in unique(row["method"] for row in rows) if name != "whole model"]
    figures = [_ratios(rows, methods), _front(rows, methods)]
    return [Panel("Fewer blocks", _reading(rows, methods), ("pruned",), figures)]


def tasks(study: Study) -> list[Panel]:
    """Each task's score against blocks dropped."""
    rows = study["tables"].get("tasks")
    if not rows:
        return []
    figures = []
    for task in unique(row["task"] for row in rows):
        mine = where(rows, task=task)
        figures.append(_task(where(mine, metric=mine[0]["metric"])))
    return [Panel("Tasks", _task_reading(rows), ("tasks",), figures)]


def _task(rows: Sequence[Row]) -> go.Figure:
    title = f"{rows[0]['task']}: {rows[0]['metric']} of {rows[0]['items']:,} items"
    figure = empty_figure(title, x="blocks dropped", height=300)
    methods = [name for name in unique(row["method"] for row in rows) if name != "whole model"]
    paint, whole = colours(methods), where(rows, method="whole model")
    for name in methods:
        mine = whole + where(rows, method=name)
        add_line(figure, mine, "dropped", "score", name=name, colour=paint[name], band=False)
    return level_axis(figure, rows, "dropped")


def _task_reading(rows: Sequence[Row]) -> str:
    """The mean accuracy over tasks of the whole model, and of the best method with the most blocks out."""
    first = [row for row in rows if row["metric"] == "acc"]
    most = max(row["dropped"] for row in first)
    means = {
        name: mean(row["score"] for row in where(first, method=name, dropped=most))
        for name in unique(row["method"] for row in first if row["dropped"] == most)
    }
    whole = mean(row["score"] for row in where(first, method="whole model"))
    if not most:
        return f"The whole model is right in {number(whole)} of items, on average over tasks."
    best = max(means, key=lambda name: means[name])
    return (
        f"The whole model is right in {number(whole)} of items, on average over tasks; with {most} blocks dropped "
        f"{best} keeps {number(means[best])}."
    )


def _ratios(rows: Sequence[Row], methods: Sequence[str]) -> go.Figure:
    figure = empty_figure("perplexity over the whole model's", x="blocks dropped", height=360)
    paint = colours(methods)
    whole = where(rows, method="whole model")
    for name in methods:
        mine = whole + where(rows, method=name)
        add_line(figure, mine, "dropped", "ratio", name=name, colour=paint[name])
    worst = max(row["ratio"] for row in rows)
    if worst > 4:
        figure.update_yaxes(type="log")
    return level_axis(figure, rows, "dropped")


def _front(rows: Sequence[Row], methods: Sequence[str]) -> go.Figure:
    figure = empty_figure(
        "loss against time; full marks: no other is better in parameters, time and loss",
        x="time of a forward pass over the whole model's",
        y="loss, nats a token",
        height=360,
    )
    names = ["whole model", *methods]
    paint = colours(names)
    for name in names:
        mine = where(rows, method=name)
        figure.add_scatter(
            x=[row["time"] for row in mine],
            y=[row["loss"] for row in mine],
            mode="markers",
            name=safe(name),
            marker={
                "color": paint[name],
                "size": 9,
                "symbol": ["circle" if row["front"] else "circle-open" for row in mine],
            },
            customdata=[[row["dropped"], row["parameters"]] for row in mine],
            hovertemplate=f"<b>{safe(name)}</b><br>%{{customdata[0]}} blocks dropped, %{{customdata[1]:,}} parameters"
            "<br>time %{x:.2f}, loss %{y:.3f}<extra></extra>",
        )
    return figure


def _reading(rows: Sequence[Row], methods: Sequence[str]) -> str:
    most = max(row["dropped"] for row in rows)
    last = [row for row in rows if row["dropped"] == most and row["method"] in methods]
    best, removed = min(last, key=lambda row: row["ratio"]), where(last, method="remove")
    beside = (
        f" against {number(removed[0]['ratio'])} with nothing in their place" if removed else ""
    )
    return (
        f"With {most} blocks dropped, perplexity is {number(best['ratio'])} times the whole model's through "
        f"{best['method']}{beside}; a forward pass takes {number(best['time'])} of the time."
    )
