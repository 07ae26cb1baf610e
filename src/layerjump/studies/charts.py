"""Figures of studies: line charts, heat maps, bars, and the panels they appear in.

What every figure and number of a report looks like: colours, fonts, digits.

A panel: what a report shows of one finding (a sentence, figures or a table, the data behind them).

The three kinds of figure a report knows: lines with bands, heat maps, bars with intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import plotly.graph_objects as go

from layerjump.studies.results import Row

# Okabe and Ito's colours, which all kinds of colour vision tell apart, in the order in which we give them out. Their
# yellow is left out (it is lost on white), their black is a grey (it would be lost in the dark).
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
AMBER, SKY, GREY = "#E69F00", "#56B4E9", "#7F858D"
CYCLE = (BLUE, GREEN, PURPLE, AMBER, SKY, GREY)
SCALE = "Viridis"
DASHES = ("solid", "dash", "dot", "dashdot")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_INK, _GRID = "#333333", "#D9DCE0"  # of a saved picture; in the page the style sheet decides
HEIGHT = 310


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name: the identity always has its own, the others take turns."""
    others = [name for name in names if name != "identity"]
    found = {name: CYCLE[place % len(CYCLE)] for place, name in enumerate(others)}
    return found | {"identity": ORANGE}


def faint(colour: str, share: float = 0.18) -> str:
    """The colour of a band around a line."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{share})"


def empty_figure(title: str = "", *, x: str = "", y: str = "", height: int = HEIGHT) -> go.Figure:
    """A figure with our fonts, grid and margins, and nothing in it yet. Words must be escaped by the caller."""
    axis = {
        "gridcolor": _GRID,
        "zeroline": False,
        "showline": False,
        "ticks": "",
        "automargin": True,
        "ticklabelstandoff": 4,
        "title": {"standoff": 8, "font": {"size": 13}},
    }
    figure = go.Figure(
        layout={
            "template": "none",
            "height": height,
            "margin": {"l": 8, "r": 12, "t": 40 if title else 14, "b": 8},
            "font": {"family": FONT, "size": 12, "color": _INK},
            "title": {"text": title, "font": {"size": 14}, "x": 0.5, "xanchor": "center", "y": 0.97}
            if title
            else None,
            "paper_bgcolor": "white",  # of a saved picture; the page makes it transparent
            "plot_bgcolor": "rgba(0,0,0,0)",
            "legend": {"orientation": "h", "y": -0.25},
            "hoverlabel": {"font": {"family": FONT, "size": 12}},
            "hovermode": "closest",
            "dragmode": False,  # a finger scrolls the page; the page's script turns zooming on for a mouse
            "xaxis": axis,
            "yaxis": axis,
        }
    )
    figure.update_xaxes(title_text=x)
    figure.update_yaxes(title_text=y)
    return figure


def whole_ticks(values: Sequence[float]) -> dict[str, Any]:
    """Axis settings for levels and blocks: whole numbers only, and not too many of them."""
    span = int(max(values) - min(values)) if values else 0
    step = next((step for step in (1, 2, 4, 5, 10, 20) if span / step <= 9), 50)
    return {"tick0": 0, "dtick": step, "tickformat": "d"}


def safe(value: object) -> str:
    """Text from data as a figure or a page may show it: plotly and browsers would take `<` for markup."""
    return escape(str(value), quote=True)


def number(value: Any, digits: int = 3) -> str:
    """A number as a reader wants it: thousands apart, no more than three digits that matter, a true minus."""
    if value is None or value != value:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (value == int(value) and abs(value) >= 1000):
        return f"{value:,.0f}".replace(",", "\u202f").replace("-", "−")
    size = abs(value)
    if size >= 1000:
        text = f"{value:,.0f}".replace(",", "\u202f")
    elif size >= 10:
        text = f"{value:.1f}"
    elif size >= 0.01 or size == 0:
        text = f"{value:.{digits - 1}f}"
    else:
        text = f"{value:.1g}"
    return text.replace("-", "−")


def percent(share: float) -> str:
    """0.953 as 95.3 %."""
    return f"{100 * share:.3g}\u00a0%".replace("-", "−")  # never broken between lines


def plain_words(name: str) -> str:
    """A key such as `pairs_where_map_beats_identity` as words."""
    return name.replace("_", " ")


Study = Mapping[str, Any]
"""One study as `results.json` holds it: tables, headline, notes, settings."""


@dataclass(frozen=True)
class Panel:
    """One finding of a study."""

    title: str
    reading: str
    """One sentence that says what the numbers say; plain text."""
    tables: tuple[str, ...]
    """The tables it is made from: their CSV stands beside it."""
    figures: Sequence[go.Figure] = field(default=())
    """Shown beside each other where the screen is wide enough."""
    html: str = ""
    """Shown below the figures; whoever makes it escapes what comes from data."""


Maker = Callable[[Study], list[Panel]]
"""Draws some of a study's tables; no panel where what it needs is not there."""


def unique(values: Iterable[Any]) -> list[Any]:
    """Each value once, in the order of first sight."""
    return list(dict.fromkeys(values))


def where(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """The rows that hold these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def mean(values: Iterable[float | None]) -> float:
    """The mean of what is there; NaN of nothing."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else float("nan")


def named(study: Study, start: str) -> list[str]:
    """The names of the tables that start so: a study makes one for each estimator."""
    return [name for name in study["tables"] if name.startswith(start) and study["tables"][name]]


def lenses_of(rows: Sequence[Row]) -> list[str]:
    """The lenses of a table: the fitted ones in their order, the identity last."""
    return sorted(unique(row["lens"] for row in rows), key=lambda name: bool(name == "identity"))


def listed(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([*([", ".join(parts[:-1])] if parts[1:] else []), *parts[-1:]])


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
