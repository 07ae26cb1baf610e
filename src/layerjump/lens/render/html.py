"""Render a trajectory as a plotly heat map, or as a notebook table."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from torch import Tensor

from layerjump.data.token_text import escape_token
from layerjump.errors import BadText
from layerjump.lens.render.terminal import mark_unfitted, spread

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from layerjump.lens.attribution import Attribution
    from layerjump.lens.survey import Survey
    from layerjump.lens.trajectory import Trajectory

VALUES = ("probability", "confidence", "entropy", "kl", "cross_entropy", "jensen_shannon")
"""What the colour of the heat map can show."""
_PLOT_POSITIONS = 128  # the heat map shows the last positions
_TABLE_LEVELS, _TABLE_POSITIONS = 12, 16
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

_CLASS_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F858D", "#882255", "#8C6D31")


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
    labels = [f"{_escape(tokens[at])}{mark_unfitted(trajectory, at)}{_role(trajectory, at)}" for at in positions]
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
    roles = "".join(
        f"<th>{_escape(trajectory.roles[at])}</th>" for at in trajectory.positions[rows] if trajectory.roles
    )
    return (
        f'<table style="font-size:12px"><caption>{_title(trajectory, rows)}</caption><thead>'
        f"{f'<tr><th>role</th>{roles}</tr>' if roles else ''}"
        f"<tr><th>level</th>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )


def _role(trajectory: Trajectory, position: int) -> str:
    """The role of a position's token in a chat, on a line of its own."""
    return f"<br>{_escape(trajectory.roles[position])}" if trajectory.roles else ""


def _escape(text: str) -> str:
    """A text that plotly and browsers show as it is: both interpret `<` as markup."""
    return escape(escape_token(text), quote=True)


def plot_attribution(attribution: Attribution) -> go.Figure:
    """A bar for each part: blocks upwards, coloured by the kind of part."""
    import plotly.graph_objects as go

    figure = go.Figure()
    labels = [row.name for row in attribution.parts]
    for part in dict.fromkeys(row.part for row in attribution.parts):
        rows = [row for row in attribution.parts if row.part == part]
        figure.add_bar(name=part, orientation="h", y=[row.name for row in rows], x=[row.value for row in rows])
    at = f"level {attribution.level}, position {attribution.position}"
    figure.update_layout(
        template="plotly_white",
        font={"family": _FONT, "size": 12},
        title={"text": _escape(f"{attribution.what} = {attribution.reading:.2f} at {at}")},
        height=max(320, 140 + 18 * len(labels)),
        barmode="relative",
    )
    figure.update_xaxes(title_text="contribution to the logit")
    figure.update_yaxes(categoryorder="array", categoryarray=labels, type="category")
    return figure


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
            f"level {trajectory.levels[level]}, position {position} ({_escape(tokens[position])})"
            + (f", {_escape(trajectory.roles[position])}" if trajectory.roles else ""),
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


def plot_survey(survey: Survey) -> go.Figure:
    """Four charts with the levels across, and a line for each class of token."""
    from plotly.subplots import make_subplots

    charts = {
        "decided": "share of predictions decided",
        "agreement": "agreement with the model",
        "entropy": "entropy, nats",
        "surprisal": "surprisal of the text, nats",
    }
    figure = make_subplots(rows=2, cols=2, subplot_titles=list(charts.values()))
    for index, column in enumerate(charts):
        for number, (name, rows) in enumerate(survey.by_level().groupby("token_class", sort=False)):
            figure.add_scatter(
                x=rows["level"],
                y=rows[column],
                name=str(name),
                legendgroup=str(name),
                showlegend=index == 0,
                line={"color": _CLASS_COLOURS[number % len(_CLASS_COLOURS)]},
                row=index // 2 + 1,
                col=index % 2 + 1,
            )
    figure.update_xaxes(title_text="level")
    title = _escape(f"{survey.info.text} by {survey.info.model} through {survey.info.lens}")
    return figure.update_layout(template="plotly_white", font={"family": _FONT, "size": 12}, title=title, height=720)
