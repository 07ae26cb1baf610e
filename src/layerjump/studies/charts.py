"""Charts of studies in one style: line charts, heat maps, bar charts; and the panel of a report that shows them."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import plotly.graph_objects as go

from layerjump.studies.formatting import safe, unique
from layerjump.studies.results import Interval

# The colours of Okabe and Ito, which people with any kind of colour vision can tell apart, in the order of use. Their
# yellow is left out (it is lost on white) and their black is a grey (it would be lost on a dark page).
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
AMBER, SKY, GREY = "#E69F00", "#56B4E9", "#7F858D"
CYCLE = (BLUE, GREEN, PURPLE, AMBER, SKY, GREY)
SCALE = "Viridis"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_INK, _GRID = "#333333", "#D9DCE0"  # of a saved picture; in the page the style sheet decides
HEIGHT = 310
MAX_MARKERS = 60
"""A line with more points has no markers."""

Cell = TypeVar("Cell", tuple[int, int], tuple[float, float], tuple[str, str], tuple[str, int])
Value = float | Interval
"""A point of a chart, with or without a confidence interval."""


@dataclass(frozen=True)
class Panel:
    """One finding of a study as a report shows it: a sentence, figures or a table, and the data."""

    title: str
    reading: str
    """One sentence on what the numbers say; plain text."""
    tables: tuple[str, ...]
    """Names of the tables, as in results.json, that it is made from: their CSV files are linked."""
    figures: Sequence[go.Figure] = ()
    html: str = ""
    """Shown below the figures. The study escapes what comes from data."""


def empty_figure(title: str = "", *, x: str = "", y: str = "", height: int = HEIGHT) -> go.Figure:
    """Return a figure with our fonts, grid and margins and no data. The caller escapes the texts."""
    axis = {
        "gridcolor": _GRID,
        "zeroline": False,
        "showline": False,
        "ticks": "",
        "automargin": True,
        "ticklabelstandoff": 4,
        "title": {"standoff": 8, "font": {"size": 13}},
    }
    heading = {"text": title, "font": {"size": 14}, "x": 0.5, "xanchor": "center", "y": 0.97}
    figure = go.Figure(
        layout={
            "template": "none",
            "height": height,
            "margin": {"l": 8, "r": 12, "t": 40 if title else 14, "b": 8},
            "font": {"family": FONT, "size": 12, "color": _INK},
            "title": heading if title else None,
            "paper_bgcolor": "white",  # of a saved picture; the page makes it transparent
            "plot_bgcolor": "rgba(0,0,0,0)",
            "legend": {"orientation": "h", "y": -0.25},
            "hoverlabel": {"font": {"family": FONT, "size": 12}},
            "hovermode": "closest",
            "dragmode": False,  # a finger scrolls the page; the page's script lets a mouse zoom
            "xaxis": axis,
            "yaxis": axis,
        }
    )
    figure.update_xaxes(title_text=x)
    figure.update_yaxes(title_text=y)
    return figure


def line_chart(
    title: str,
    lines: Mapping[str, Sequence[tuple[float, Value]]],
    *,
    x: str,
    y: str = "",
    scale: Literal["free", "unit", "zero", "log"] = "free",
    whole_x: bool = False,
    dashed: Container[str] = (),
    dotted: Container[str] = (),
    paint: Mapping[str, str] | None = None,
    height: int = HEIGHT,
) -> go.Figure:
    """Return a figure with one line through the points (x, y) for each name; where y has intervals, with 95 % bands.

    Of `scale`, `unit` is that of `unit_axis` and `zero` begins at 0. `whole_x` is for levels and blocks; `paint` gives
    other colours by name. Points without a number are left out; a line alone has no entry in a legend.
    """
    figure = empty_figure(safe(title), x=safe(x), y=safe(y), height=height)
    paint = paint or colours(list(lines))
    for name, points in lines.items():
        points = [(at, value) for at, value in points if _mean(value) == _mean(value)]
        if not points:
            continue
        at = [x for x, _ in points]
        intervals = [value for _, value in points if isinstance(value, Interval)]
        low, high = [value.low for value in intervals], [value.high for value in intervals]
        has_band = len(intervals) == len(points) and all(map(math.isfinite, low + high))
        if has_band:
            red, green, blue = (int(paint[name][start : start + 2], 16) for start in (1, 3, 5))
            figure.add_scatter(
                x=at + at[::-1],
                y=high + low[::-1],
                fill="toself",
                fillcolor=f"rgba({red},{green},{blue},0.18)",
                line={"width": 0},
                mode="lines",
                hoverinfo="skip",
                showlegend=False,
                legendgroup=safe(name),
            )
        interval = "<br>95 %: %{customdata[0]:.3f} … %{customdata[1]:.3f}" if has_band else ""
        dash = "dash" if name in dashed else "dot" if name in dotted else "solid"
        figure.add_scatter(
            x=at,
            y=[_mean(value) for _, value in points],
            mode="lines+markers" if len(points) <= MAX_MARKERS else "lines",
            name=safe(name),
            legendgroup=safe(name),
            line={"color": paint[name], "dash": dash, "width": 2.2},
            marker={"size": 5, "color": paint[name]},
            customdata=list(zip(low, high, strict=True)) if has_band else None,
            hovertemplate=f"<b>{safe(name)}</b><br>{safe(x)} %{{x:.4~g}}: %{{y:.3f}}{interval}<extra></extra>",
        )
    if len(lines) == 1:
        figure.update_traces(showlegend=False)
    if scale == "unit":
        unit_axis(figure, [value for points in lines.values() for _, value in points])
    elif scale == "zero":
        figure.update_yaxes(rangemode="tozero")
    elif scale == "log":
        figure.update_yaxes(type="log", dtick="D2")
    if whole_x:
        values = [at for points in lines.values() for at, _ in points]
        margin = 0.03 * (max(values) - min(values)) or 0.5
        figure.update_xaxes(**whole_ticks(values), range=[min(values) - margin, max(values) + margin])
    return figure


def draw_bars(
    figure: go.Figure, labels: Sequence[str], values: Sequence[Value], *, name: str, colour: str = BLUE
) -> None:
    """Draw horizontal bars, with 95 % intervals where the values have them. Bars without a number are left out."""
    bars = [pair for pair in zip(labels, values, strict=True) if _mean(pair[1]) == _mean(pair[1])]
    ends = [value for _, value in bars if isinstance(value, Interval)]
    error = None
    if ends and len(ends) == len(bars) and all(math.isfinite(v.low + v.high) for v in ends):
        error = {
            "type": "data",
            "symmetric": False,
            "array": [max(0.0, value.high - value.mean) for value in ends],
            "arrayminus": [max(0.0, value.mean - value.low) for value in ends],
            "color": GREY,
            "thickness": 1.4,
            "width": 4,
        }
    figure.add_bar(
        orientation="h",
        y=[safe(label) for label, _ in bars],
        x=[_mean(value) for _, value in bars],
        name=safe(name),
        legendgroup=safe(name),
        marker={"color": colour},
        error_x=error,
        hovertemplate=f"<b>{safe(name)}</b><br>%{{y}}: %{{x:.3f}}<extra></extra>",
    )


def draw_heat_map(
    cells: Mapping[Cell, float],
    *,
    title: str,
    x: str = "to level",
    y: str = "from level",
    span: tuple[float, float] | None = None,
    unit: str = "",
    upwards: bool = False,
) -> go.Figure:
    """Return a heat map of (x, y) → value; colours are clipped to `span`, the numbers shown are not.

    Names along y read from the top, unless `upwards`.
    """
    values: dict[tuple[Any, Any], float] = {key: v for key, v in cells.items() if math.isfinite(v)}
    across: list[Any] = unique(key[0] for key in cells)
    up: list[Any] = unique(key[1] for key in cells)
    numeric = all(isinstance(value, int | float) for value in across + up)
    if numeric:
        across, up = sorted(across), sorted(up)
    grid = [[values.get((column, row)) for column in across] for row in up]
    low, high = span or (min(values.values(), default=0.0), max(values.values(), default=1.0))
    high = high if high > low else low + 1
    digits = 2 if high < 10 else 0
    figure = empty_figure(safe(title), x=safe(x), y=safe(y), height=370)
    figure.add_heatmap(
        x=[value if numeric else safe(value) for value in across],
        y=[value if numeric else safe(value) for value in up],
        z=[[None if v is None else min(max(v, low), high) for v in row] for row in grid],
        customdata=grid,
        zmin=low,
        zmax=high,
        colorscale=SCALE,
        xgap=1,
        ygap=1,
        hoverongaps=False,
        # Adding zero turns a rounded −0 into 0.
        text=[
            ["" if v is None else f"{round(v, digits) + 0.0:.{digits}f}".replace("-", "−") for v in row] for row in grid
        ],
        texttemplate="%{text}" if len(across) <= 8 and len(up) <= 8 else None,
        textfont={"size": 11},
        hovertemplate=f"{safe(y)} %{{y}}, {safe(x)} %{{x}}: %{{customdata:.3f}}{unit}<extra></extra>",
        colorbar={"thickness": 10, "len": 0.9, "outlinewidth": 0, "ticks": ""},
    )
    figure.update_xaxes(showgrid=False, constrain="domain")
    figure.update_yaxes(showgrid=False, constrain="domain")
    if numeric:
        figure.update_xaxes(**whole_ticks(across))
        figure.update_yaxes(**whole_ticks(up), scaleanchor="x")
    else:
        # Names that look like numbers would be spaced by their size.
        figure.update_xaxes(type="category")
        figure.update_yaxes(type="category", autorange=True if upwards else "reversed")
    return figure


def unit_axis(figure: go.Figure, values: Iterable[Value] = (), floor: float = -0.3) -> go.Figure:
    """Set y to 0 … 1, extended below 0 where values are negative, but not below `floor`."""
    means = [_mean(value) for value in values]
    lowest = max(floor, min([0.0, *(value for value in means if math.isfinite(value))]))
    return figure.update_yaxes(range=[lowest - 0.03, 1.03])


def whole_ticks(values: Sequence[float]) -> dict[str, Any]:
    """Return axis settings for levels and blocks: whole numbers only, at most ten of them."""
    span = int(max(values) - min(values)) if values else 0
    step = next((step for step in (1, 2, 4, 5, 10, 20) if span / step <= 9), 50)
    return {"tick0": 0, "dtick": step, "tickformat": "d"}


def colours(names: Sequence[str]) -> dict[str, str]:
    """Return a colour for each name; the identity is always orange, the others take the cycle in turn."""
    others = [name for name in names if name != "identity"]
    cycle = {name: CYCLE[index % len(CYCLE)] for index, name in enumerate(others)}
    return cycle | {"identity": ORANGE}


def _mean(value: Value) -> float:
    return value.mean if isinstance(value, Interval) else value
