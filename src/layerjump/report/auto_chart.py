"""Give figures that stand beside each other the same axes, so that the eye compares like with like.

A figure for any table: what a study without figures of its own is shown with.

The columns say what a table is. Whole-number keys such as `level` or `block` become an axis, two of them a heat map;
two columns of names (say fit and test) become a matrix, one becomes bars. What fits nothing is shown as a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from layerjump.studies._untyped import (
    BLUE,
    DASHES,
    Panel,
    Row,
    add_line,
    bars,
    colours,
    empty_figure,
    heat_map,
    level_axis,
    number,
    plain_words,
    safe,
    unique,
)
from layerjump.studies.charts import _keys as columns_of
from layerjump.studies.charts import table_of_records as any_table

PLACES = ("level", "block", "layer", "from", "to", "head", "position")
AMOUNTS = (
    "positions",
    "tokens",
    "sentences",
    "documents",
    "size",
    "n_fit",
    "parameters",
    "rank",
    "step",
    "at",
)
_MOST_FIGURES, _MOST_GROUPS, _MOST_BARS, _LONGEST_NAME = 6, 12, 30, 40
_SHARES = ("r2", "p@", "precision", "agreement")


@dataclass(frozen=True)
class Shape:
    """What the columns of a table are for."""

    axes: list[str]
    """Numeric keys."""
    names: list[str]
    """Keys in words."""
    values: list[str]
    """What was measured."""


def fallback(title: str, rows: Sequence[Row]) -> Panel:
    """Draw a table by the look of its columns."""
    shape = shape_of(rows)
    figures = list(_figures(rows, shape)) if shape else []
    count = (
        "One row, shown as it is." if len(rows) == 1 else f"{len(rows)} rows, shown as they are."
    )
    reading = extremes(rows, shape) if shape else count
    html = "" if figures else any_table(rows)
    return Panel(plain_words(title), reading, (title,), figures, html)


def shape_of(rows: Sequence[Row]) -> Shape | None:
    """The roles of the columns; None where a picture would mislead, because rows are not told apart by their keys."""
    places: list[str] = []
    amounts: list[str] = []
    names: list[str] = []
    values: list[str] = []
    columns = columns_of(rows)
    for column in columns:
        known = [row[column] for row in rows if row.get(column) is not None]
        whole = len(known) == len(rows)
        if any(isinstance(value, bool) for value in known):
            continue
        if all(isinstance(value, int | float) for value in known):
            kind = places if column in PLACES else amounts if column in AMOUNTS else values
            (kind if whole else values).append(column)
        elif whole and _is_category(known):
            names.append(column)
        else:
            return None
    values = [name for name in values if not _is_interval_end(name, columns)]
    axes, values = places[:2], values + places[2:]
    if amounts and not _tell_apart(rows, axes + names):
        # The rows differ in how much there was: an axis where there is none yet, else one line for each amount.
        first = amounts.pop(0)
        axes, names = ([first], names) if not axes else (axes, [*names, first])
    if not values + amounts or not _tell_apart(rows, axes + names):
        return None
    return Shape(axes, names, values + amounts)


def _tell_apart(rows: Sequence[Row], keys: Sequence[str]) -> bool:
    return bool(keys) and len({tuple(row[key] for key in keys) for row in rows}) == len(rows)


def _is_category(known: Sequence[object]) -> bool:
    return all(isinstance(value, str) and len(value) <= _LONGEST_NAME for value in known)


def _is_interval_end(name: str, columns: Sequence[str]) -> bool:
    if name in ("low", "high"):
        return True
    return name.endswith((" low", " high")) and name.rsplit(" ", 1)[0] in columns


def _figures(rows: Sequence[Row], shape: Shape) -> Iterator[go.Figure]:
    """At most six figures; none where there would be too much in one."""
    groups = _groups(rows, shape.names)
    values = shape.values[:_MOST_FIGURES]
    if len(shape.axes) == 2 and len(groups) <= _MOST_FIGURES:
        for value in values[: _MOST_FIGURES // len(groups)]:
            for group, mine in groups.items():
                yield _matrix(mine, shape.axes[1], shape.axes[0], value, group)
    elif len(shape.axes) == 1 and len(groups) <= _MOST_GROUPS:
        yield from (_lines(groups, shape.axes[0], value) for value in values)
    elif not shape.axes and _is_matrix(rows, shape.names):
        yield from (_matrix(rows, shape.names[1], shape.names[0], value, "") for value in values)
    elif not shape.axes and len(rows) <= _MOST_BARS:
        yield from (_bars(groups, value) for value in values)


def _groups(rows: Sequence[Row], names: Sequence[str]) -> dict[str, list[Row]]:
    """The rows by what their names say; names that are the same everywhere go unsaid."""
    telling = [name for name in names if len({row[name] for row in rows}) > 1]
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(", ".join(_said(name, row[name]) for name in telling), []).append(row)
    return found


def _said(name: str, value: str | float) -> str:
    return value if isinstance(value, str) else f"{number(value)} {plain_words(name)}"


def _is_matrix(rows: Sequence[Row], names: Sequence[str]) -> bool:
    """Two columns of a few names each, most of whose combinations have a row."""
    if len(names) != 2:
        return False
    down, across = (len({row[name] for row in rows}) for name in names)
    return (
        min(down, across) > 1
        and max(down, across) <= _MOST_GROUPS
        and 2 * len(rows) >= down * across
    )


def _matrix(rows: Sequence[Row], x: str, y: str, value: str, group: str) -> go.Figure:
    return heat_map(
        rows,
        x,
        y,
        value,
        title=safe(", ".join(filter(None, [plain_words(value), group]))),
        x_title=safe(plain_words(x)),
        y_title=safe(plain_words(y)),
        span=(0.0, 1.0) if value.startswith(_SHARES) else None,
    )


def _lines(groups: dict[str, list[Row]], x: str, value: str) -> go.Figure:
    figure = empty_figure(safe(plain_words(value)), x=safe(plain_words(x)))
    paint = colours(list(groups))
    for place, (group, rows) in enumerate(groups.items()):
        name, dash = group or plain_words(value), DASHES[place // 6 % len(DASHES)]
        ordered = sorted(rows, key=lambda row: row[x])
        add_line(figure, ordered, x, value, name=name, colour=paint[group], dash=dash)
    if len(groups) == 1:
        figure.update_traces(showlegend=False)
    everything = [row for rows in groups.values() for row in rows]
    sizes = unique(row[x] for row in everything)
    if x in PLACES:
        return level_axis(figure, everything, x)
    if len(sizes) > 2 and min(sizes) > 0 and max(sizes) / min(sizes) > 30:
        figure.update_xaxes(type="log", dtick=1)
    return figure


def _bars(groups: dict[str, list[Row]], value: str) -> go.Figure:
    rows = [{**row, "which": name} for name, mine in groups.items() for row in mine]
    title = safe(plain_words(value))
    figure = empty_figure(title, height=110 + 26 * len(rows))
    low, high = (
        f"{value} {end}" if f"{value} {end}" in rows[0] else end for end in ("low", "high")
    )
    bars(rows, "which", value, name=value, colour=BLUE, figure=figure, low=low, high=high)
    figure.update_traces(showlegend=False)
    return figure.update_yaxes(autorange="reversed", showgrid=False)


def extremes(rows: Sequence[Row], shape: Shape) -> str:
    """Where the first value is highest and lowest, in a sentence."""
    value = shape.values[0]
    known = [row for row in rows if row.get(value) is not None]
    if not known:
        return f"No {plain_words(value)} could be measured."
    high, low = (choose(known, key=lambda row: row[value]) for choose in (max, min))
    if high[value] == low[value]:
        return f"The {plain_words(value)} is {number(high[value])} everywhere."
    return (
        f"The {plain_words(value)} is highest at {_place(high, shape)} ({number(high[value])}) and lowest at "
        f"{_place(low, shape)} ({number(low[value])})."
    )


def _place(row: Row, shape: Shape) -> str:
    named = [f"{plain_words(name)} {row[name]}" for name in shape.names]
    return ", ".join([f"{plain_words(axis)} {number(row[axis])}" for axis in shape.axes] + named)
