"""Charts of untyped rows, for studies that do not declare typed tables yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

from layerjump.jumps.scoring import R2
from layerjump.studies import results
from layerjump.studies.charts import AMBER as AMBER
from layerjump.studies.charts import BLUE as BLUE
from layerjump.studies.charts import DASHES as DASHES
from layerjump.studies.charts import GREEN as GREEN
from layerjump.studies.charts import GREY as GREY
from layerjump.studies.charts import ORANGE as ORANGE
from layerjump.studies.charts import PURPLE as PURPLE
from layerjump.studies.charts import SCALE, faint, whole_ticks
from layerjump.studies.charts import Panel as Panel
from layerjump.studies.charts import colours as colours
from layerjump.studies.charts import empty_figure as empty_figure
from layerjump.studies.charts import mean as mean
from layerjump.studies.charts import number as number
from layerjump.studies.charts import percent as percent
from layerjump.studies.charts import plain_words as plain_words
from layerjump.studies.charts import safe as safe
from layerjump.studies.charts import unique as unique
from layerjump.studies.results import Finding
from layerjump.studies.results import Study as TypedStudy
from layerjump.studies.results import to_json as to_json
from layerjump.studies.setup import mean_r2 as typed_mean_r2

Row = dict[str, Any]
UntypedTables = dict[str, list[Row]]


@dataclass
class Result(results.Result[UntypedTables, dict[str, Any]]):
    """A result without declared types."""

    tables: UntypedTables = field(default_factory=dict)
    headline: dict[str, Any] = field(default_factory=dict)


def mean_r2(scores: Sequence[R2]) -> Row:
    """Both averages of R², each averaged over the levels."""
    both = typed_mean_r2(scores)
    return {"r2": both.uniform, "r2 weighted": both.weighted}


def untyped_study(
    name: str,
    question: str,
    run: Callable[[Any], Result],
    *makers: Callable[[Study], list[Panel]],
    finding: Callable[[Any], Finding | None] = lambda result: None,
    cannot_run: Callable[[Any], str | None] = lambda setup: setup.model.no_predictions,
) -> TypedStudy[Any, Any]:
    """Return a study whose makers draw JSON tables."""

    def figures(result: results.Result[Any, Any]) -> list[Panel]:
        saved = result.to_json()
        return [panel for maker in makers for panel in maker(saved)]

    tables: Any = UntypedTables
    headline: Any = dict[str, Any]
    return TypedStudy(
        name, question, run, tables, headline, figures, finding, cannot_run=cannot_run
    )


Study = Mapping[str, Any]
"""One study as `results.json` holds it: tables, headline, notes, settings."""


Maker = Callable[[Study], list[Panel]]


def where(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """The rows that hold these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def add_line(
    figure: go.Figure,
    rows: Sequence[Row],
    x: str,
    y: str,
    *,
    name: str,
    colour: str,
    dash: str = "solid",
    band: bool = True,
    hover: str = "",
) -> None:
    """One line; where the rows hold `y low` and `y high` and a band is wanted, with its 95 % band."""
    rows = [row for row in rows if row.get(y) is not None]
    if not rows:
        return
    at = [row[x] for row in rows]
    low, high = ([row.get(f"{y} {end}") for row in rows] for end in ("low", "high"))
    has_band = None not in low and None not in high
    if band and has_band:
        figure.add_scatter(
            x=at + at[::-1],
            y=high + low[::-1],
            fill="toself",
            fillcolor=faint(colour),
            line={"width": 0},
            mode="lines",
            hoverinfo="skip",
            showlegend=False,
            legendgroup=safe(name),
        )
    interval = "<br>95 %: %{customdata[0]:.3f} … %{customdata[1]:.3f}" if has_band else ""
    figure.add_scatter(
        x=at,
        y=[row[y] for row in rows],
        mode="lines+markers" if len(rows) <= 60 else "lines",
        name=safe(name),
        legendgroup=safe(name),
        line={"color": colour, "dash": dash, "width": 2.2},
        marker={"size": 5, "color": colour},
        customdata=list(zip(low, high, strict=True)) if has_band else None,
        hovertemplate=f"<b>{safe(name)}</b><br>{safe(hover or x)} %{{x:.4~g}}: %{{y:.3f}}{interval}<extra></extra>",
    )


def level_axis(figure: go.Figure, rows: Sequence[Row], x: str) -> go.Figure:
    """Whole numbers along x, with a little room at the ends."""
    values = [row[x] for row in rows]
    room = 0.03 * (max(values) - min(values)) or 0.5
    return figure.update_xaxes(
        **whole_ticks(values), range=[min(values) - room, max(values) + room]
    )


def heat_map(
    rows: Sequence[Row],
    x: str,
    y: str,
    z: str,
    *,
    title: str,
    x_title: str,
    y_title: str,
    span: tuple[float, float] | None = None,
    factor: float = 1.0,
    unit: str = "",
) -> go.Figure:
    """A cell for each (x, y) that has a row; the colour is cut off at `span`, the number shown is not."""
    across, up, true = _cells(rows, x, y, z, factor)
    low, high = span or _span([value for line in true for value in line if value is not None])
    few = len(across) <= 8 and len(up) <= 8
    figure = empty_figure(title, x=x_title, y=y_title, height=370)
    figure.add_heatmap(
        x=[safe(value) if isinstance(value, str) else value for value in across],
        y=[safe(value) if isinstance(value, str) else value for value in up],
        z=[[None if v is None else min(max(v, low), high) for v in line] for line in true],
        customdata=true,
        zmin=low,
        zmax=high,
        colorscale=SCALE,
        xgap=1,
        ygap=1,
        hoverongaps=False,
        text=[[_digits(v, 2 if high < 10 else 0) for v in line] for line in true],
        texttemplate="%{text}" if few else None,
        textfont={"size": 11},
        hovertemplate=f"{safe(y)} %{{y}} → {safe(x)} %{{x}}: %{{customdata:.3f}}{unit}<extra></extra>",
        colorbar={"thickness": 10, "len": 0.9, "outlinewidth": 0, "ticks": ""},
    )
    _cell_axes(figure, across, up)
    return figure


def _cells(
    rows: Sequence[Row], x: str, y: str, z: str, factor: float
) -> tuple[list[Any], list[Any], list[list[float | None]]]:
    """What stands along both axes, numbers in order, and the value of each cell."""
    across, up = ([*dict.fromkeys(row[key] for row in rows)] for key in (x, y))
    if _numbers(across + up):
        across, up = sorted(across), sorted(up)
    found = {(row[x], row[y]): row[z] for row in rows if row[z] is not None}
    true = [[found[a, b] * factor if (a, b) in found else None for a in across] for b in up]
    return across, up, true


def _cell_axes(figure: go.Figure, across: list[Any], up: list[Any]) -> None:
    figure.update_xaxes(showgrid=False, constrain="domain")
    figure.update_yaxes(showgrid=False, constrain="domain")
    if _numbers(across + up):
        figure.update_xaxes(**whole_ticks(across))
        figure.update_yaxes(**whole_ticks(up), scaleanchor="x")
    else:
        figure.update_yaxes(autorange="reversed")  # names read from the top


def _numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _digits(value: float | None, places: int) -> str:
    # Adding zero turns a rounded −0 into 0.
    return "" if value is None else f"{round(value, places) + 0.0:.{places}f}".replace("-", "−")


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    return (low, high) if high > low else (low, low + 1)


def bars(
    rows: Sequence[Row],
    category: str,
    value: str,
    *,
    name: str,
    colour: str,
    figure: go.Figure,
    low: str,
    high: str,
) -> None:
    """Horizontal bars, one a row, with a 95 % interval where the rows hold one."""
    rows = [row for row in rows if row[value] is not None]
    ends = [(row.get(low), row.get(high)) for row in rows]
    known = bool(ends) and all(None not in pair for pair in ends)
    error = None
    if known:
        error = {
            "type": "data",
            "symmetric": False,
            "array": [max(0.0, e[1] - row[value]) for row, e in zip(rows, ends, strict=True)],
            "arrayminus": [max(0.0, row[value] - e[0]) for row, e in zip(rows, ends, strict=True)],
            "color": "#7F858D",
            "thickness": 1.4,
            "width": 4,
        }
    figure.add_bar(
        orientation="h",
        y=[safe(row[category]) for row in rows],
        x=[row[value] for row in rows],
        name=safe(name),
        legendgroup=safe(name),
        marker={"color": colour},
        error_x=error,
        hovertemplate=f"<b>{safe(name)}</b><br>%{{y}}: %{{x:.3f}}<extra></extra>",
    )
