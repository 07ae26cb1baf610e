"""Figures of a model in training, or of a series of checkpoints: tables `steps`, `blocks` and `levels`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from layerjump.show.charts import add_line, heat_map
from layerjump.show.look import AMBER, BLUE, GREEN, GREY, ORANGE, PURPLE, empty_figure, number, safe
from layerjump.show.page import Drawer, Section, page
from layerjump.show.panel import Panel, Row, Study

_LINES = (
    ("perplexity", (("perplexity", "perplexity", BLUE, "solid"),)),
    (
        "linearity, mean over blocks",
        (
            ("with residual held out", "with residual", BLUE, "solid"),
            ("without residual held out", "without residual", GREEN, "solid"),
            ("identity", "identity", ORANGE, "dash"),
            ("chance floor", "noise would score (in sample)", GREY, "dot"),
        ),
    ),
    (
        "own token given by a lens, mean over levels",
        (
            ("agreement map", "map", AMBER, "solid"),
            ("agreement identity", "identity", ORANGE, "dash"),
        ),
    ),
    ("jump strength", (("jump strength", "jump strength", PURPLE, "solid"),)),
)


def over_steps(study: Study) -> list[Panel]:
    """What changes from step to step."""
    rows = study["tables"].get("steps")
    if not rows:
        return []
    figures = [_lines(rows, title, lines) for title, lines in _LINES]
    figures[0].update_yaxes(type="log", dtick="D2")
    first, last = rows[0], rows[-1]
    reading = (
        f"From step {number(first['step'])} to {number(last['step'])} held-out perplexity goes from "
        f"{number(first['perplexity'])} to {number(last['perplexity'])}; of what a block adds, a linear map explains "
        f"{number(first['without residual held out'])} on unseen text at first and "
        f"{number(last['without residual held out'])} at last; jump strength goes from "
        f"{number(first['jump strength'])} to {number(last['jump strength'])}."
    )
    return [Panel("From step to step", reading, ("steps",), figures)]


def _lines(
    rows: Sequence[Row], title: str, lines: Sequence[tuple[str, str, str, str]]
) -> go.Figure:
    figure = empty_figure(title, x="step")
    for column, name, colour, dash in lines:
        add_line(figure, rows, "step", column, name=name, colour=colour, dash=dash)
    return figure.update_traces(showlegend=len(lines) > 1)


def by_block(study: Study) -> list[Panel]:
    """Where in the model it changes: blocks and levels up, steps across."""
    blocks, levels = (study["tables"].get(name) for name in ("blocks", "levels"))
    if not blocks or not levels:
        return []
    column = "without residual held out"
    figures = [
        _over(blocks, "block", column, "linearity without residual, held out"),
        _over(levels, "level", "agreement map", "own token given by the map"),
    ]
    last = [row for row in blocks if row["step"] == blocks[-1]["step"]]
    least = min(last, key=lambda row: row[column])
    most = max(last, key=lambda row: row[column])
    reading = (
        f"At the end block {least['block']} is the least linear ({number(least[column])} without the residual stream) "
        f"and block {most['block']} the most ({number(most[column])})."
    )
    return [Panel("Block by block", reading, ("blocks", "levels"), figures)]


def _over(rows: Sequence[Row], up: str, column: str, title: str) -> go.Figure:
    named = [row | {"step": str(row["step"])} for row in rows]
    figure = heat_map(named, "step", up, column, title=title, x_title="step", y_title=up)
    # Steps are names here: as numbers they would be spaced, and cells squared, by their size.
    return figure.update_xaxes(type="category").update_yaxes(autorange=True, dtick=1)


def training_page(record: dict[str, Any], command: str) -> str:
    """One file that shows a pretraining run, from its record alone."""
    drawer, told = Drawer(), record["settings"]
    name = f"{told['arch']}, {told['shape_layers']} blocks, width {told['shape_hidden']}"
    penalty = (
        told["penalty"]
        if told["penalty"] == "none"
        else f"{told['penalty']} × {told['strength']:g}"
    )
    about = (
        f"{number(record['parameters'])} parameters; {number(told['steps'])} steps of {told['batch']} × "
        f"{told['length']} tokens of {record['text']['name']}; penalty: {penalty}; seed {told['seed']}"
    )
    html = "".join(
        drawer.panel(panel, record, files="training", command=command)
        for maker in (over_steps, by_block)
        for panel in maker(record)
    )
    return page(name, safe(about), "", [Section("training", "training", html)])
