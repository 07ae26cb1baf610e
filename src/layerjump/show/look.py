"""What every figure and number of a report looks like: colours, fonts, digits."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

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
