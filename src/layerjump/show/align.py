"""Give figures that stand beside each other the same axes, so that the eye compares like with like."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from layerjump.show.panel import Panel


def same_axes(panels: Sequence[Panel]) -> None:
    """Set one range for the values of each figure of a panel over all runs; x is left to each model's own depth."""
    for figures in zip(*[panel.figures for panel in panels], strict=False):
        lines = [figure for figure in figures if _has_free_y(figure)]
        values = [value for figure in lines for value in _values(figure)]
        if len(lines) == len(figures) and values:
            low, high = min(0.0, min(values)), max(values)
            for figure in figures:
                figure.update_yaxes(range=[low, high + 0.05 * (high - low or 1)])


def _has_free_y(figure: go.Figure) -> bool:
    traces = {trace.type for trace in figure.data}
    return traces == {"scatter"} and figure.layout.yaxis.range is None


def _values(figure: go.Figure) -> list[float]:
    return [value for trace in figure.data for value in trace.y if value is not None]
