"""Figures of `linearity`: how linear each block is, and why."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from layerjump.show.charts import add_line, heat_map, level_axis
from layerjump.show.levels import unit_axis
from layerjump.show.look import AMBER, BLUE, GREEN, GREY, ORANGE, PURPLE, empty_figure, number
from layerjump.show.panel import Panel, Row, Study, mean

_WITHOUT = " without position 0"
_SERIES = (
    ("", "in sample (the paper's)", BLUE, "solid"),
    (" held out", "held out", GREEN, "solid"),
)


def scores(study: Study) -> list[Panel]:
    """With and without the residual stream, with and without position 0."""
    rows = study["tables"].get("blocks")
    if not rows:
        return []
    figures = [
        _scores(rows, stream, which, f"{stream}, {title}")
        for stream in ("with residual", "without residual")
        for which, title in (("", "all positions"), (_WITHOUT, "without position 0"))
    ]
    held_out = f"without residual held out{_WITHOUT}"
    least = min(rows, key=lambda row: row[held_out])
    reading = (
        f"With the residual stream the blocks score {_mean(rows, 'with residual')} on average, the identity alone "
        f"{_mean(rows, 'identity')}; of what a block itself adds, a linear map explains "
        f"{_mean(rows, 'without residual')} in sample and {number(mean(row[held_out] for row in rows))} on unseen text "
        f"without position 0, where noise would score {_mean(rows, f'chance floor{_WITHOUT}')}; the least linear is "
        f"block {least['block']} ({number(least[held_out])})."
    )
    return [Panel("How linear each block is", reading, ("blocks",), figures)]


def _mean(rows: Sequence[Row], column: str) -> str:
    return number(mean(row[column] for row in rows))


def _scores(rows: Sequence[Row], stream: str, which: str, title: str) -> go.Figure:
    figure = empty_figure(title, x="block", y="R², weighted by variance")
    for suffix, name, colour, dash in _SERIES:
        column = f"{stream}{suffix}{which}"
        add_line(figure, rows, "block", column, name=name, colour=colour, dash=dash)
    if stream == "with residual":
        column = f"identity{which}"
        add_line(figure, rows, "block", column, name="identity", colour=ORANGE, dash="dash")
    column = f"chance floor{which}"
    add_line(figure, rows, "block", column, name="noise would score", colour=GREY, dash="dot")
    return unit_axis(level_axis(figure, rows, "block"), rows, stream)


def steps(study: Study) -> list[Panel]:
    """Why a block looks linear: its step is short, or hardly turns the stream."""
    rows = study["tables"].get("blocks")
    if not rows:
        return []
    ratio, influence = "step norm over stream norm", "block influence"
    figures = [
        _single(rows, "block", ratio, "length of the step over the stream's", BLUE),
        _single(rows, "block", influence, "block influence: 1 − cosine", GREEN),
    ]
    longest = max(rows, key=lambda row: row[ratio])
    least = min(rows, key=lambda row: row[influence])
    reading = (
        f"What a block adds is {_mean(rows, ratio)} times as long as the stream it is added to on average, most at "
        f"block {longest['block']} ({number(longest[ratio])}); block {least['block']} turns the stream least "
        f"(influence {number(least[influence])})."
    )
    return [Panel("How much each block changes", reading, ("blocks",), figures)]


def angles(study: Study) -> list[Panel]:
    """The mean angle between the states of two levels."""
    rows = study["tables"].get("angles")
    if not rows:
        return []
    figure = heat_map(
        rows,
        "to",
        "from",
        "angle",
        title="mean angle, degrees",
        x_title="to level",
        y_title="from level",
        factor=180,
        unit="°",
    )
    steps = [row for row in rows if row["to"] == row["from"] + 1]
    widest = max(steps, key=lambda row: row["angle"])
    first_last = max(rows, key=lambda row: row["to"] - row["from"])
    reading = (
        f"From one level to the next the stream turns by {number(180 * mean(row['angle'] for row in steps))}° on "
        f"average, most from level {widest['from']} to {widest['to']} ({number(180 * widest['angle'])}°); from the "
        f"first level to the last it is {number(180 * first_last['angle'])}°."
    )
    return [Panel("How far the stream turns", reading, ("angles",), [figure])]


def shape(study: Study) -> list[Panel]:
    """Norm, anisotropy and intrinsic dimension by level."""
    rows = study["tables"].get("levels")
    if not rows:
        return []
    columns = (
        ("mean norm", "mean norm", AMBER),
        ("anisotropy", "anisotropy", PURPLE),
        ("intrinsic dimension", "intrinsic dimension", BLUE),
    )
    figures = [_single(rows, "level", name, title, colour) for name, title, colour in columns]
    flattest = max(rows, key=lambda row: row["anisotropy"] or 0)
    widest = max(rows, key=lambda row: row["intrinsic dimension"] or 0)
    reading = (
        f"States are most stretched along one direction at level {flattest['level']} (anisotropy "
        f"{number(flattest['anisotropy'])}) and need most dimensions at level {widest['level']} "
        f"({number(widest['intrinsic dimension'])}); their mean norm goes from {number(rows[0]['mean norm'])} to "
        f"{number(rows[-1]['mean norm'])}."
    )
    return [Panel("The shape of the states", reading, ("levels",), figures)]


def _single(rows: Sequence[Row], x: str, y: str, title: str, colour: str) -> go.Figure:
    figure = empty_figure(title, x=x)
    add_line(figure, rows, x, y, name=y, colour=colour)
    figure.update_traces(showlegend=False)
    figure.update_yaxes(rangemode="tozero")
    return level_axis(figure, rows, x)
