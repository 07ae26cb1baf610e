"""Render a trajectory as a plotly heat map, or as a notebook table."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from torch import Tensor

from layerjump.data.tokenization import escape_token
from layerjump.errors import BadText
from layerjump.lens.render.terminal import mark_unfitted, spread

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from layerjump.lens.trajectory import Trajectory

VALUES = ("probability", "confidence", "entropy", "kl", "cross_entropy", "jensen_shannon")
"""What the colour of the heat map can show."""
_PLOT_POSITIONS = 128  # the heat map shows the last positions
_TABLE_LEVELS, _TABLE_POSITIONS = 12, 16
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def plot(trajectory: Trajectory, value: str = "probability") -> go.Figure:
    """A heat map: levels upwards, positions across, the top token in each cell, the k top tokens on hovering."""
    import plotly.graph_objects as go

    if value not in VALUES:
        raise BadText(f"expected a value to plot of {', '.join(VALUES)}, got {value!r}")
    values: Tensor = trajectory.jensen_shannon() if value == "jensen_shannon" else getattr(trajectory, value)
    values = values[:, :, 0] if value == "probability" else values
    rows = _last_rows(trajectory, _PLOT_POSITIONS)
    positions, tokens = trajectory.positions[rows], trajectory.tokens
    figure = go.Figure(
        go.Heatmap(
            z=values[:, rows].tolist(),
            x=list(range(len(positions))),
            y=list(range(len(trajectory.levels))),
            text=[[_escape(token) for token in level] for level in _top_tokens(trajectory, rows)],
            texttemplate="%{text}",
            hovertext=_hover_texts(trajectory, rows),
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
        title={"text": _title(trajectory, rows)},
        width=max(640, 90 + 78 * len(positions)),
        height=max(320, 140 + 24 * len(trajectory.levels)),
    )
    labels = [f"{_escape(tokens[at])}{mark_unfitted(trajectory, at)}" for at in positions]
    levels = list(trajectory.levels)
    figure.update_xaxes(title_text="token", tickvals=list(range(len(positions))), ticktext=labels)
    figure.update_yaxes(title_text="level", tickvals=list(range(len(levels))), ticktext=levels)
    return figure


def to_table(trajectory: Trajectory) -> str:
    """A plain HTML table of some levels and the last positions; the title of a cell lists its k top tokens."""
    rows = _last_rows(trajectory, _TABLE_POSITIONS)
    top, hovers = _top_tokens(trajectory, rows), _hover_texts(trajectory, rows, separator="\n")
    tokens, probabilities = trajectory.tokens, trajectory.probability[:, rows, 0].tolist()
    head = "".join(
        f"<th>{_escape(tokens[at])}{mark_unfitted(trajectory, at)}</th>" for at in trajectory.positions[rows]
    )
    body = []
    for level in reversed(spread(len(trajectory.levels), _TABLE_LEVELS)):
        cells = "".join(
            f'<td title="{hover}" style="background:rgba(0,114,178,{0.6 * p:.2f})">{_escape(token)}</td>'
            for token, hover, p in zip(top[level], hovers[level], probabilities[level], strict=True)
        )
        body.append(f"<tr><th>{trajectory.levels[level]}</th>{cells}</tr>")
    return (
        f'<table style="font-size:12px"><caption>{_title(trajectory, rows)}</caption>'
        f"<thead><tr><th>level</th>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )


def _escape(text: str) -> str:
    """A text that plotly and browsers show as it is: both interpret `<` as markup."""
    return escape(escape_token(text), quote=True)


def _last_rows(trajectory: Trajectory, limit: int) -> slice:
    return slice(max(0, len(trajectory.positions) - limit), None)


def _top_tokens(trajectory: Trajectory, rows: slice) -> list[list[str]]:
    """The top token at each position, by level."""
    return [trajectory.decode(level) for level in trajectory.top[:, rows, 0].tolist()]


def _hover_texts(trajectory: Trajectory, rows: slice, separator: str = "<br>") -> list[list[str]]:
    """By level and position: where the cell is, its k top tokens, its entropy and KL."""
    tokens = trajectory.tokens

    def lines(level: int, row: int) -> list[str]:
        position = trajectory.positions[row]
        top = trajectory.decode(trajectory.top[level, row].tolist())
        probabilities = trajectory.probability[level, row].tolist()
        entropy, kl = float(trajectory.entropy[level, row]), float(trajectory.kl[level, row])
        return [
            f"level {trajectory.levels[level]}, position {position} ({_escape(tokens[position])})",
            *(f"{p:.3f} {_escape(token)}" for token, p in zip(top, probabilities, strict=True)),
            f"entropy {entropy:.2f}, KL to the model {kl:.2f}",
        ]

    row_indices = range(len(trajectory.positions))[rows]
    return [[separator.join(lines(level, row)) for row in row_indices] for level in range(len(trajectory.levels))]


def _title(trajectory: Trajectory, rows: slice) -> str:
    """Model and lens, with notes on unfitted positions and on positions that are not shown."""
    title = f"{_escape(trajectory.model.name)} through {_escape(trajectory.name)}"
    if any(position < trajectory.first_fitted_position for position in trajectory.positions[rows]):
        title += " (* not fitted at this position)"
    if rows.start:
        title += f" (the last {len(trajectory.positions) - rows.start} positions)"
    return title
