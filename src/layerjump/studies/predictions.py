"""`predictions`: what each level already predicts, through identity and through every fitted estimator.

Precision@k: the lens' best token is among the model's k best. Surprisal: −ln of the model's own probability of the
lens' best token. KL: from the model's distribution to the lens'. All hold the lens against the same model's output,
not against the text. A masked model is asked for the [MASK]ed token through its full head.

Figures of `r2` and `predictions`: what one level says about a later one, and about the next token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from layerjump.metrics.bootstrap import mean_interval
from layerjump.metrics.logits import KS
from layerjump.studies.charts import (
    BLUE,
    ORANGE,
    Panel,
    Study,
    add_line,
    colours,
    empty_figure,
    heat_map,
    lenses_of,
    level_axis,
    listed,
    mean,
    named,
    number,
    where,
)
from layerjump.studies.results import Result, Row
from layerjump.studies.setup import Setup


def run(setup: Setup) -> Result:
    """Score every lens at every level, with 95 % intervals by bootstrap over documents."""
    readings = setup.readings()
    scores = {f"p@{k}": readings.hits(k).double().numpy() for k in KS}
    scores |= {"surprisal": readings.surprisal.numpy(), "kl": readings.kl.numpy()}
    documents = readings.document.numpy()
    spans = {
        name: mean_interval(values, documents, seed=setup.settings.seed)
        for name, values in scores.items()
    }
    rows: list[Row] = []
    for place, lens in enumerate(readings.lenses):
        for level in range(readings.n_levels):
            row: Row = {"lens": lens, "level": level}
            for name, (centre, low, high) in spans.items():
                row[name] = float(centre[place, level])
                row[f"{name} low"] = float(low[place, level])
                row[f"{name} high"] = float(high[place, level])
            rows.append(row)
    result = Result("predictions", {"levels": rows})
    result.settings = {
        "n_examples": readings.n_examples,
        "n_documents": len(np.unique(documents)),
        "lenses": list(readings.lenses),
    }
    result.headline = _headline(rows, setup)
    return result


def _headline(rows: list[Row], setup: Setup) -> dict[str, object]:
    """Mean P@1 below the last level, and the first level that is right half the time, for each lens."""
    found: dict[str, object] = {}
    for lens in dict.fromkeys(row["lens"] for row in rows):
        mine = [row["p@1"] for row in rows if row["lens"] == lens]
        found[f"mean_p@1_{lens}"] = sum(mine[:-1]) / max(1, len(mine) - 1)
        found[f"half_right_from_level_{lens}"] = next(
            level for level, value in enumerate(mine) if value >= 0.5
        )
    best, plain = setup.settings.estimators[0], "identity"
    by = {(row["lens"], row["level"]): row["p@1"] for row in rows}
    found["levels_where_map_beats_identity"] = sum(
        by[best, level] > by[plain, level] for level in range(setup.model.n_blocks)
    )
    return found


def r2_pairs(study: Study) -> list[Panel]:
    """Two heat maps (map, identity) for each way to average R², for each estimator."""
    panels = []
    for table in named(study, "pairs "):
        estimator = table.removeprefix("pairs ")
        for kind, column in (
            ("averaged over coordinates", "r2"),
            ("weighted by variance", "r2_weighted"),
        ):
            panels.append(_r2_panel(study["tables"][table], table, estimator, kind, column))
    return panels


def _r2_panel(rows: Sequence[Row], table: str, estimator: str, kind: str, column: str) -> Panel:
    plain = f"{column}_identity"
    figures = [
        heat_map(
            rows,
            "to",
            "from",
            name,
            title=title,
            x_title="to level",
            y_title="from level",
            span=(0.0, 1.0),
        )
        for name, title in ((column, f"map ({estimator})"), (plain, "identity"))
    ]
    better = sum(row[column] > row[plain] for row in rows)
    best = max(rows, key=lambda row: row[column] - row[plain])
    reading = (
        f"On unseen text the map beats the identity for {better} of {len(rows)} pairs of levels: R² is "
        f"{number(mean(row[column] for row in rows))} on average against {number(mean(row[plain] for row in rows))}; "
        f"the gain is largest from level {best['from']} to level {best['to']}, {number(best[column])} against "
        f"{number(best[plain])}."
    )
    below = sum(row[plain] < 0 for row in rows) + sum(row[column] < 0 for row in rows)
    if below:
        reading += f" Colours stop at 0; {below} values lie below it."
    return Panel(f"R² of {estimator} and of the identity, {kind}", reading, (table,), figures)


def r2_composed(study: Study) -> list[Panel]:
    """Does a chain of maps between neighbours do what one direct map does?"""
    return [_composed_panel(study["tables"][table], table) for table in named(study, "composed ")]


def _composed_panel(rows: Sequence[Row], table: str) -> Panel:
    estimator = table.removeprefix("composed ")
    figures = []
    for start, title in (
        ("r2", "averaged over coordinates"),
        ("r2_weighted", "weighted by variance"),
    ):
        figure = empty_figure(title, x="from level", y="R² at the last level")
        for way, colour, dash in (("direct", BLUE, "solid"), ("composed", ORANGE, "dash")):
            add_line(figure, rows, "from", f"{start}_{way}", name=way, colour=colour, dash=dash)
        figures.append(unit_axis(level_axis(figure, rows, "from"), rows, f"{start}_"))
    worst = max(rows, key=lambda row: row["r2_direct"] - row["r2_composed"])
    gap = worst["r2_direct"] - worst["r2_composed"]
    if gap < 0.01:
        reading = (
            f"Going to the last level by all the maps between neighbours loses next to nothing: at most {number(gap)} "
            f"of R² against the one direct map."
        )
    else:
        reading = (
            f"The one direct map to the last level explains more than the chain of maps between neighbours: "
            f"{number(worst['r2_direct'])} against {number(worst['r2_composed'])} from level {worst['from']}, where "
            f"the gap is widest."
        )
    return Panel(f"One direct {estimator} jump, or one after another", reading, (table,), figures)


def unit_axis(figure: go.Figure, rows: Sequence[Row], start: str, floor: float = -0.3) -> go.Figure:
    """R² from 0 to 1; a little below where there are values below, but never so far that the rest is flattened."""
    values = [v for row in rows for k, v in row.items() if k.startswith(start) and v is not None]
    lowest = max(floor, min([0.0, *values]))
    return figure.update_yaxes(range=[lowest - 0.03, 1.03])


def predictions(study: Study) -> list[Panel]:
    """Precision@k of every lens by level, then surprisal and KL."""
    rows = study["tables"].get("levels")
    if not rows:
        return []
    precision = [_by_level(rows, f"p@{k}", f"precision@{k}", unit=True) for k in (1, 5, 10)]
    distance = [
        _by_level(rows, "surprisal", "surprisal, nats"),
        _by_level(rows, "kl", "KL from the model, nats"),
    ]
    return [
        Panel("How often each level is already right", _right_from(rows), ("levels",), precision),
        Panel("How far each level's prediction is off", _half_way(rows), ("levels",), distance),
    ]


def _by_level(rows: Sequence[Row], column: str, title: str, *, unit: bool = False) -> go.Figure:
    figure = empty_figure(title, x="level")
    names = lenses_of(rows)
    paint = colours(names)
    for place, name in enumerate(names):
        # Fitted lenses are often so close that one would hide the other if both were drawn solid.
        dash = "dash" if name == "identity" else ("solid", "dashdot", "dot")[place % 3]
        mine = where(rows, lens=name)
        add_line(
            figure, mine, "level", column, name=name, colour=paint[name], dash=dash, hover="level"
        )
    figure.update_yaxes(**({"range": [-0.02, 1.03]} if unit else {"rangemode": "tozero"}))
    return level_axis(figure, rows, "level")


def half_right(rows: Sequence[Row], lens: str) -> int:
    """The first level whose best token is the model's own at least half the time."""
    return next(row["level"] for row in where(rows, lens=lens) if row["p@1"] >= 0.5)


def _right_from(rows: Sequence[Row]) -> str:
    last = max(row["level"] for row in rows)
    first = [f"from level {half_right(rows, name)} on {how(name)}" for name in lenses_of(rows)]
    means = [
        f"{number(mean(row['p@1'] for row in where(rows, lens=name) if row['level'] < last))} ({name})"
        for name in lenses_of(rows)
    ]
    return (
        f"Of levels 0 to {last}, the best token is the model's own at least half the time {listed(first)}; on average "
        f"below the last level precision@1 is {listed(means)}."
    )


def how(lens: str) -> str:
    """The way a lens reads a level, in words."""
    return "as the level stands (identity)" if lens == "identity" else f"through {lens}"


def _half_way(rows: Sequence[Row]) -> str:
    last = max(row["level"] for row in rows)
    middle = last // 2
    found = {name: where(rows, lens=name, level=middle)[0] for name in lenses_of(rows)}
    kl = listed([f"{number(row['kl'])} ({name})" for name, row in found.items()])
    surprisal = listed([f"{number(row['surprisal'])} ({name})" for name, row in found.items()])
    least = where(rows, level=last)[0]["surprisal"]
    return (
        f"Half way, at level {middle} of {last}, the prediction is {kl} nats of KL away from the model's own, and the "
        f"model is surprised by the level's best token by {surprisal} nats, where its own best token has "
        f"{number(least)}."
    )
