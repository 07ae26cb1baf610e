"""Figures of `finetune`: linearity of each block before and after."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from layerjump.show.charts import add_line, level_axis
from layerjump.show.look import BLUE, GREY, empty_figure, number
from layerjump.show.panel import Panel, Row, Study, mean


def blocks(study: Study) -> list[Panel]:
    """With and without the residual stream, on unseen text; after is the mean over runs."""
    rows, runs = (study["tables"].get(name) for name in ("blocks", "runs"))
    if not rows or not runs:
        return []
    figures = [_scores(rows, stream) for stream in ("with residual", "without residual")]
    change = [row["without residual change"] for row in runs]
    spread = study["headline"].get("without_residual_change_sd")
    beside = f" ± {number(spread)} over {len(runs)} runs" if spread is not None else " in one run"
    reading = (
        f"Fine-tuning on {study['settings']['task']} changes linearity without the residual stream by "
        f"{number(mean(change))}{beside} (mean over blocks, in sample, as in the paper); accuracy on items not learnt "
        f"goes from {number(mean(row['accuracy before'] for row in runs))} to "
        f"{number(mean(row['accuracy after'] for row in runs))}."
    )
    return [Panel("Before and after fine-tuning", reading, ("blocks", "runs"), figures)]


def _scores(rows: Sequence[Row], stream: str) -> go.Figure:
    figure = empty_figure(f"{stream}, held out", x="block", y="R², weighted by variance")
    column = f"{stream} held out"
    add_line(figure, rows, "block", f"{column} before", name="before", colour=GREY, dash="dash")
    add_line(figure, rows, "block", f"{column} after", name="after", colour=BLUE)
    return level_axis(figure, rows, "block")
