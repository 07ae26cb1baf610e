"""The figure of `alternation`: what running some blocks and jumping over others keeps."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from layerjump.show.charts import add_line, level_axis
from layerjump.show.look import colours, empty_figure, number, percent
from layerjump.show.panel import Panel, Row, Study, unique, where


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
