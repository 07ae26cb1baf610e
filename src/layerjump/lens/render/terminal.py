"""Render a trajectory in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from layerjump.data.token_text import escape_token
from layerjump.lens.prepare_prompt import GENERATED

if TYPE_CHECKING:
    from layerjump.lens.attribution import Attribution, Detail
    from layerjump.lens.concepts import ConceptRace
    from layerjump.lens.trajectory import TokenTrack, Trajectory

_LEVEL_WIDTH = 9  # characters of a level's column in the grid
_TOKEN_WIDTH = 10  # characters of the grid's column of input tokens
_EDGE_WIDTH = 17  # characters of the grid's other columns and of the gaps
_GRID_POSITIONS = 40  # the grid shows the last positions
_TOP_WIDTH = 24  # characters of one of the top tokens
_COMPARED = 3  # top tokens on each side of a comparison
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
        Text(f"{preposition} position {name_position(trajectory, position)}"),
        top_table(trajectory),
    )


def name_position(trajectory: Trajectory, position: int) -> str:
    """A position, its token and its role in a chat: `4, ␣is (user)`."""
    role = f" ({trajectory.roles[position]})" if trajectory.roles else ""
    return f"{position}{mark_unfitted(trajectory, position)}, {escape_token(trajectory.tokens[position])}{role}"


def render_change(before: Trajectory, after: Trajectory) -> RenderableType:
    """The readings of one prompt before and after a change of the model, side by side.

    First the model's own prediction at every position, then every level at the prompt's last position.
    """
    rows = [row for row, at in enumerate(before.positions) if not before.roles or before.roles[at] != GENERATED]
    position = before.positions[rows[-1]]
    parts: list[RenderableType] = [
        Text(f"{escape_token(before.model.name)} through {before.name}, {before.model.n_blocks} blocks"),
        _compare_positions(before, after, rows),
        Text(f"After position {name_position(before, position)}"),
        _compare_levels(before, after, rows[-1]),
    ]
    if GENERATED in before.roles:
        parts += [Text(f"{when}: {_generated_text(one)}") for when, one in (("before", before), ("after", after))]
    return Group(*parts)


def _compare_positions(before: Trajectory, after: Trajectory, rows: list[int]) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    roles = before.roles
    for name in ("", *(("role",) if roles else ()), "token", "model before", "model after"):
        table.add_column(name, no_wrap=True)
    hidden = rows[:-_GRID_POSITIONS]
    if hidden:
        table.add_row("…", Text(f"{len(hidden)} before", style="dim"))
    for row in rows[len(hidden) :]:
        position = before.positions[row]
        texts = [escape_token(one.decode([int(one.model_top[row])])[0]) for one in (before, after)]
        table.add_row(
            str(position),
            *([Text(roles[position], style="dim")] if roles else []),
            Text(_truncate(escape_token(before.tokens[position]), _TOKEN_WIDTH)),
            Text(_truncate(texts[0], _TOP_WIDTH)),
            Text(_truncate(texts[1], _TOP_WIDTH), style="" if texts[0] == texts[1] else "bold"),
        )
    return table


def _compare_levels(before: Trajectory, after: Trajectory, row: int) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    tracks = [(track, after.track(track.id)) for track in before.tracked]
    tracked = (f"{escape_token(track.text)} {when}" for track, _ in tracks for when in ("before", "after"))
    for name in ("level", *tracked):
        table.add_column(Text(name), no_wrap=True)
    for name in ("before", "after"):
        table.add_column(name)
    for level, name in enumerate(before.levels):
        cells = [_track_cell(track, level, row) for pair in tracks for track in pair]
        table.add_row(name, *cells, *(_top_cell(one, level, row, _COMPARED) for one in (before, after)))
    return table


def _generated_text(trajectory: Trajectory) -> str:
    new = [token for token, role in zip(trajectory.prompt.ids, trajectory.roles, strict=True) if role == GENERATED]
    return escape_token("".join(trajectory.model.token_texts(new)))


def grid(trajectory: Trajectory, width: int) -> Table:
    """Positions down, levels across: the top token in each cell, and the level at which the prediction settles."""
    n_levels = max(2, (width - _TOKEN_WIDTH - _EDGE_WIDTH) // (_LEVEL_WIDTH + 1))
    levels = spread(len(trajectory.levels), n_levels)
    first = max(0, len(trajectory.positions) - _GRID_POSITIONS)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    roles = trajectory.roles
    names = ("", *(("role",) if roles else ()), "token", *(trajectory.levels[level] for level in levels), "settled at")
    for name in names:
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
            *([Text(roles[position], style="dim")] if roles else []),
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
        tracks = [_track_cell(track, level, row) for track in trajectory.tracked]
        best = float(trajectory.probability[level, row, 0])
        table.add_row(name, bar(best), *tracks, _top_cell(trajectory, level, row, trajectory.top.shape[-1]))
    return table


def _top_cell(trajectory: Trajectory, level: int, row: int, k: int) -> Text:
    """The k most probable tokens of a cell with their probabilities."""
    tokens = trajectory.decode(trajectory.top[level, row, :k].tolist())
    probabilities = trajectory.probability[level, row, :k].tolist()
    top = [
        Text(f"{_truncate(escape_token(token), _TOP_WIDTH)} {_short(p)}", style=_style(p))
        for token, p in zip(tokens, probabilities, strict=True)
    ]
    return Text("  ").join(top)


def _track_cell(track: TokenTrack, level: int, row: int) -> str:
    """Probability and rank of a tracked token."""
    return f"{_short(float(track.probability[level, row]))} #{int(track.rank[level, row]) + 1}"


def render_attribution(attribution: Attribution, n_rows: int = 12) -> RenderableType:
    """The largest contributions of parts, of attention heads, and of the positions that heads read from."""
    at = f"level {attribution.level}, position {attribution.position} {_source(attribution, attribution.position)}"
    tables: list[RenderableType] = [
        Text(
            f"{escape_token(attribution.model)} through {attribution.lens}: {attribution.what} = "
            f"{attribution.reading:.3f} at {at}"
        )
    ]
    titles: dict[Detail, str] = {
        "parts": "parts, which add up to it",
        "heads": "attention heads",
        "sources": "positions that heads read from",
    }
    for detail, title in titles.items():
        rows = attribution.top(n_rows, detail)
        if not rows:
            continue
        table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), title=title, title_justify="left")
        for name in ("part", "logit", ""):
            table.add_column(name, no_wrap=True, justify="right" if name == "logit" else "left")
        largest = max(abs(row.value) for row in rows) or 1.0
        for row in rows:
            name = (
                row.name if row.source is None else f"{row.name} from {row.source} {_source(attribution, row.source)}"
            )
            style = "green" if row.value > 0 else "red"
            table.add_row(Text(name), f"{row.value:+.3f}", Text(bar(abs(row.value) / largest), style=style))
        tables.append(table)
    note = "norms are frozen at this state" + "".join(f"; {note}" for note in attribution.notes)
    return Group(*tables, Text(f"{note}; rounding {attribution.error:.0e}", style="dim"))


def _source(attribution: Attribution, position: int) -> str:
    role = f" ({attribution.roles[position]})" if attribution.roles else ""
    return f"{_truncate(escape_token(attribution.tokens[position]), _TOKEN_WIDTH)}{role}"


def render_race(race: ConceptRace) -> RenderableType:
    """Levels down, concepts across: their probabilities, and which of them leads."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), title=f"At position {race.position}", title_justify="left")
    races = len(race.concepts) > 1
    for name in ("level", *race.concepts, *(("leads",) if races else ())):
        table.add_column(Text(name), no_wrap=True)
    for level, probabilities, leader in zip(race.levels, race.probability.tolist(), race.leaders, strict=True):
        table.add_row(level, *(f"{bar(p)} {_digits(p)}" for p in probabilities), *([leader] if races else []))
    sentence = f"{race.leaders[-1]} leads from level {race.crossing_level} on"
    return Group(table, *([Text(sentence)] if races else []))


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


def _digits(probability: float) -> str:
    """A probability with two digits, however small: concepts race long before they are likely."""
    return f"{probability:.2f}" if probability >= 0.005 else f"{probability:.0e}"


def _style(probability: float) -> str:
    return next((style for bound, style in _STYLES if probability < bound), "")


def _truncate(text: str, width: int) -> str:
    """The text, or as much of it as fits before an ellipsis."""
    return text if cell_len(text) <= width else f"{set_cell_size(text, width - 1).rstrip()}…"
