"""Render a trajectory as a plotly heat map, an HTML page, or a notebook table."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from layerjump.errors import BadText
from layerjump.io import write_text
from layerjump.lens.render.token_text import visible
from layerjump.lens.trajectory import Trajectory

if TYPE_CHECKING:
    import plotly.graph_objects as go

VALUES = ("probability", "confidence", "entropy", "kl", "cross_entropy", "jensen_shannon")
"""What colour may stand for."""
POSITIONS = 128
"""Positions that a picture shows: the last ones."""
_TABLE_LEVELS, _TABLE_POSITIONS = 12, 16
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def plot(found: Trajectory, value: str = "probability") -> go.Figure:
    """Levels upwards, positions across; cells say the best token, hovering shows the k best."""
    import plotly.graph_objects as go

    shown = slice(max(0, len(found.positions) - POSITIONS), None)
    places = found.positions[shown]
    tokens = found.tokens
    words = [[safe(word) for word in row] for row in _top(found, shown)]
    figure = go.Figure(
        go.Heatmap(
            z=_values(found, value)[:, shown].tolist(),
            x=list(range(len(places))),
            y=list(range(len(found.levels))),
            text=words,
            texttemplate="%{text}",
            hovertext=_hovers(found, shown),
            hoverinfo="text",
            colorscale="Viridis",
            colorbar={"title": {"text": value.replace("_", " ")}},
            xgap=1,
            ygap=1,
        )
    )
    figure.update_layout(
        template="plotly_white",
        font={"family": _FONT, "size": 12},
        title={
            "text": f"{safe(found.model.name)} through {safe(found.name)}{_notes(found, shown)}"
        },
        width=max(640, 90 + 78 * len(places)),
        height=max(320, 140 + 24 * len(found.levels)),
    )
    labels = [f"{safe(tokens[place])}{_mark(found, place)}" for place in places]
    figure.update_xaxes(title_text="token", tickvals=list(range(len(places))), ticktext=labels)
    figure.update_yaxes(
        title_text="level", tickvals=list(range(len(found.levels))), ticktext=list(found.levels)
    )
    return figure


def to_html(found: Trajectory, path: str | Path | None = None) -> str:
    """The heat map as one page that carries its own script."""
    page: str = plot(found).to_html(include_plotlyjs=True, full_html=True)
    if path is not None:
        write_text(Path(path).expanduser(), page)
    return page


def to_table(found: Trajectory) -> str:
    """A plain HTML table of some levels and the last positions; a cell's title holds the k best."""
    from layerjump.lens.render.terminal import spread

    shown = slice(max(0, len(found.positions) - _TABLE_POSITIONS), None)
    words, hovers = _top(found, shown), _hovers(found, shown, line="\n")
    tokens, shares = found.tokens, found.probability[:, shown, 0].tolist()
    head = "".join(
        f"<th>{safe(tokens[place])}{_mark(found, place)}</th>" for place in found.positions[shown]
    )
    rows = []
    for level in reversed(spread(len(found.levels), _TABLE_LEVELS)):
        cells = "".join(
            f'<td title="{hover}" style="background:rgba(0,114,178,{0.6 * share:.2f})">{safe(word)}</td>'
            for word, hover, share in zip(words[level], hovers[level], shares[level], strict=True)
        )
        rows.append(f"<tr><th>{found.levels[level]}</th>{cells}</tr>")
    caption = f"{safe(found.model.name)} through {safe(found.name)}{_notes(found, shown)}"
    return (
        f'<table style="font-size:12px"><caption>{caption}</caption><thead><tr><th>level</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def safe(text: str) -> str:
    """A text that plotly and browsers show as it is: they would take `<` for markup."""
    return escape(visible(text), quote=True)


def _values(found: Trajectory, value: str) -> Tensor:
    if value not in VALUES:
        raise BadText(f"colour was to stand for {value!r}; give one of {', '.join(VALUES)}")
    if value == "jensen_shannon":
        return found.jensen_shannon()
    tensor: Tensor = getattr(found, value)
    return tensor[:, :, 0] if value == "probability" else tensor


def _top(found: Trajectory, shown: slice) -> list[list[str]]:
    """The best token of each cell, by level."""
    return [found.decode(level) for level in found.top[:, shown, 0].tolist()]


def _hovers(found: Trajectory, shown: slice, line: str = "<br>") -> list[list[str]]:
    """What is said about each cell: where it is, and its k best tokens."""
    tokens, rows = found.tokens, range(len(found.positions))[shown]
    return [
        [line.join(_lines(found, level, row, tokens[found.positions[row]])) for row in rows]
        for level in range(len(found.levels))
    ]


def _lines(found: Trajectory, level: int, row: int, token: str) -> list[str]:
    where = f"level {found.levels[level]}, position {found.positions[row]} ({safe(token)})"
    words = found.decode(found.top[level, row].tolist())
    shares = found.probability[level, row].tolist()
    best = [f"{share:.3f} {safe(word)}" for word, share in zip(words, shares, strict=True)]
    entropy, kl = (float(each[level, row]) for each in (found.entropy, found.kl))
    return [where, *best, f"entropy {entropy:.2f}, KL to the model {kl:.2f}"]


def _mark(found: Trajectory, place: int) -> str:
    return "*" if place < found.fitted_from else ""


def _notes(found: Trajectory, shown: slice) -> str:
    """What a reader must know of what is not shown as the rest is."""
    notes = ""
    if any(place < found.fitted_from for place in found.positions[shown]):
        notes += " (* not fitted at this position)"
    if shown.start:
        notes += f" (the last {len(found.positions) - shown.start} positions)"
    return notes
