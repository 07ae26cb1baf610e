"""Render a trajectory in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from layerjump.data.tokenization import escape_token

if TYPE_CHECKING:
    from layerjump.lens.trajectory import Trajectory

_LEVEL_WIDTH = 9  # characters of a level's column in the grid
_TOKEN_WIDTH = 10  # characters of the grid's column of input tokens
_EDGE_WIDTH = 17  # characters of the grid's other columns and of the gaps
_GRID_POSITIONS = 40  # the grid shows the last positions
_TOP_WIDTH = 24  # characters of one of the top tokens
_BAR = " ▏▎▍▌▋▊▉█"
_BAR_WIDTH = 8
# Styles by probability, up to a bound; without colour the table reads the same.
_STYLES = ((0.1, "dim"), (0.35, ""), (0.7, "cyan"), (1.01, "bold green"))


def render(trajectory: Trajectory, width: int) -> RenderableType:
    """The grid of all positions, with as many levels as fit the width, then the top tokens at the last position."""
    position = trajectory.positions[-1]
    preposition = "After" if trajectory.model.causal else "At"
    return Group(
        Text(f"{escape_token(trajectory.model.name)} through {trajectory.name}, {trajectory.model.n_blocks} blocks"),
        grid(trajectory, width),
        Text(
            f"{preposition} position {position}{mark_unfitted(trajectory, position)}, "
            f"{escape_token(trajectory.tokens[position])}"
        ),
        top_table(trajectory),
    )


def grid(trajectory: Trajectory, width: int) -> Table:
    """Positions down, levels across: the top token in each cell, and the level at which the prediction settles."""
    n_levels = max(2, (width - _TOKEN_WIDTH - _EDGE_WIDTH) // (_LEVEL_WIDTH + 1))
    levels = spread(len(trajectory.levels), n_levels)
    first = max(0, len(trajectory.positions) - _GRID_POSITIONS)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in ("", "token", *(trajectory.levels[level] for level in levels), "settled at"):
        table.add_column(name, no_wrap=True)
    if first:
        table.add_row("…", Text(f"{first} before", style="dim"))
    tokens, settled = trajectory.tokens, trajectory.settled_level.tolist()
    for row in range(first, len(trajectory.positions)):
        position = trajectory.positions[row]
        cells = []
        for level in levels:
            (token,) = trajectory.decode([int(trajectory.top[level, row, 0])])
            style = _style(float(trajectory.probability[level, row, 0]))
            cells.append(Text(_truncate(escape_token(token), _LEVEL_WIDTH), style=style))
        table.add_row(
            f"{position}{mark_unfitted(trajectory, position)}",
            Text(_truncate(escape_token(tokens[position]), _TOKEN_WIDTH)),
            *cells,
            "–" if settled[row] < 0 else trajectory.levels[settled[row]],
        )
    if any(position < trajectory.first_fitted_position for position in trajectory.positions[first:]):
        table.caption = "* the lens was not fitted at this position"
        table.caption_justify = "left"
    return table


def top_table(trajectory: Trajectory, row: int = -1) -> Table:
    """Levels down, the k most probable tokens across, at one of the positions read (default: the last)."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in ("level", "", *(escape_token(track.text) for track in trajectory.tracked)):
        table.add_column(Text(name), no_wrap=True)
    kind = "tokens" if trajectory.model.labels is None else "labels"
    table.add_column(f"top {kind} and their probabilities")
    for level, name in enumerate(trajectory.levels):
        probabilities = trajectory.probability[level, row].tolist()
        tokens = trajectory.decode(trajectory.top[level, row].tolist())
        tracks = [
            f"{_short(float(track.probability[level, row]))} #{int(track.rank[level, row]) + 1}"
            for track in trajectory.tracked
        ]
        top = [
            Text(f"{_truncate(escape_token(token), _TOP_WIDTH)} {_short(p)}", style=_style(p))
            for token, p in zip(tokens, probabilities, strict=True)
        ]
        table.add_row(name, bar(probabilities[0]), *tracks, Text("  ").join(top))
    return table


def spread(count: int, limit: int) -> list[int]:
    """At most `limit` indices below `count`, evenly spaced, with the first and the last."""
    if count <= limit:
        return list(range(count))
    return sorted({round(step * (count - 1) / (limit - 1)) for step in range(limit)})


def bar(probability: float) -> str:
    """A bar whose length shows a probability, in eighths of a character; empty for NaN."""
    clipped = min(max(probability, 0.0), 1.0) if probability == probability else 0.0
    full, eighths = divmod(round(clipped * 8 * _BAR_WIDTH), 8)
    return ("█" * full + (_BAR[eighths] if eighths else "")).ljust(_BAR_WIDTH)


def mark_unfitted(trajectory: Trajectory, position: int) -> str:
    """An asterisk where the jumps were not fitted at a position."""
    return "*" if position < trajectory.first_fitted_position else ""


def _short(probability: float) -> str:
    """A probability in four characters."""
    return f"{probability:.2f}" if probability >= 0.005 else "<.01"


def _style(probability: float) -> str:
    return next((style for bound, style in _STYLES if probability < bound), "")


def _truncate(text: str, width: int) -> str:
    """The text, or as much of it as fits before an ellipsis."""
    return text if cell_len(text) <= width else f"{set_cell_size(text, width - 1).rstrip()}…"
