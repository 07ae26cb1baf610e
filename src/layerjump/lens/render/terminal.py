"""Render a trajectory in the terminal."""

from __future__ import annotations

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from layerjump.lens.render.token_text import visible
from layerjump.lens.trajectory import Trajectory

COLUMN = 9
"""Cells of a column of the grid."""
_TOKEN = 10  # cells of the column that names the position's token
_EDGE = 17  # cells that the other columns and the gaps take
POSITIONS = 40
"""Positions that the grid shows: the last ones."""
_LONGEST = 24  # cells of a token among the best
_BAR = " ▏▎▍▌▋▊▉█"
_BAR_WIDTH = 8
# Unsure to sure; on a terminal without colour the table reads the same.
_SHADES = ((0.1, "dim"), (0.35, ""), (0.7, "cyan"), (1.01, "bold green"))


def whole(found: Trajectory) -> RenderableType:
    """The grid of all positions, then the best tokens at the last."""
    place = found.positions[-1]
    where = f"{'After' if found.model.causal else 'At'} position {place}{_mark(found, place)}, "
    return Group(
        Text(f"{visible(found.model.name)} through {found.name}, {found.model.n_blocks} blocks"),
        Grid(found),
        Text(where + visible(found.tokens[place])),
        best(found),
    )


class Grid:
    """The best token at every position, at as many levels as the terminal is wide enough for."""

    def __init__(self, found: Trajectory) -> None:
        self._found = found

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield grid(self._found, options.max_width)


def grid(found: Trajectory, width: int) -> Table:
    """Positions down, levels across: the best token in each cell, and the level at which the answer is decided."""
    levels = spread(len(found.levels), max(2, (width - _TOKEN - _EDGE) // (COLUMN + 1)))
    first = max(0, len(found.positions) - POSITIONS)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in ("", "token", *(found.levels[level] for level in levels), "settled at"):
        table.add_column(name, no_wrap=True)
    if first:
        table.add_row("…", Text(f"{first} before", style="dim"))
    tokens, decided = found.tokens, found.settled_level.tolist()
    for row in range(first, len(found.positions)):
        place = found.positions[row]
        cells = [_cell(found, level, row) for level in levels]
        level = "–" if decided[row] < 0 else found.levels[decided[row]]
        token = Text(_cut(visible(tokens[place]), _TOKEN))
        table.add_row(f"{place}{_mark(found, place)}", token, *cells, level)
    if any(place < found.fitted_from for place in found.positions[first:]):
        table.caption = "* the lens was not fitted at this position"
        table.caption_justify = "left"
    return table


def best(found: Trajectory, position: int = -1) -> Table:
    """Levels down, the k best tokens across, at one of the positions read (the last unless told)."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in ("level", "", *(visible(each.text) for each in found.tracked)):
        table.add_column(Text(name), no_wrap=True)
    table.add_column("best tokens and their probabilities")
    for level, name in enumerate(found.levels):
        shares = found.probability[level, position].tolist()
        words = found.decode(found.top[level, position].tolist())
        followed = [
            f"{share(float(each.probability[level, position]))} #{int(each.rank[level, position]) + 1}"
            for each in found.tracked
        ]
        said = Text("  ").join(map(_word, words, shares))
        table.add_row(name, bar(shares[0]), *followed, said)
    return table


def spread(count: int, most: int) -> list[int]:
    """At most so many indices below `count`, evenly spaced, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(step * (count - 1) / (most - 1)) for step in range(most)})


def bar(part: float) -> str:
    """A bar as long as a share of the whole, in eighths of a cell."""
    eighths = round(min(max(part, 0.0), 1.0) * 8 * _BAR_WIDTH) if part == part else 0
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_BAR[rest] if rest else "")).ljust(_BAR_WIDTH)


def share(part: float) -> str:
    """A probability in four characters."""
    return f"{part:.2f}" if part >= 0.005 else "<.01"


def _cell(found: Trajectory, level: int, row: int) -> Text:
    part = float(found.probability[level, row, 0])
    (word,) = found.decode([int(found.top[level, row, 0])])
    return Text(_cut(visible(word), COLUMN), style=_shade(part))


def _word(word: str, part: float) -> Text:
    # Unbreakable, so that a line ends between tokens.
    return Text(f"{_cut(visible(word), _LONGEST)}\u00a0{share(part)}", style=_shade(part))


def _mark(found: Trajectory, place: int) -> str:
    return "*" if place < found.fitted_from else ""


def _shade(part: float) -> str:
    return next((style for below, style in _SHADES if part < below), "")


def _cut(text: str, cells: int) -> str:
    """The text, or as much of it as fits with a sign that there is more."""
    return text if cell_len(text) <= cells else f"{set_cell_size(text, cells - 1).rstrip()}…"
