"""`predictions`: what each level already predicts, through the identity and through every fitted estimator.

Precision@k: the lens's best token is among the model's k best. Surprisal: −ln of the model's probability of the lens's
best token. KL: from the model's distribution to the lens's. All compare the lens with the output of the same model, not
with the text. A masked model predicts [MASK] tokens through its full prediction head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import numpy as np
import plotly.graph_objects as go

from layerjump.metrics.bootstrap import mean_interval
from layerjump.studies.charts import Panel, line_chart
from layerjump.studies.formatting import identity_last, listed, mean, number
from layerjump.studies.results import Column, Finding, Interval, Record, Result, Study
from layerjump.studies.setup import Setup


class LevelRow(Record):
    """One lens at one level."""

    lens: str
    level: int
    p1: Annotated[Interval, Column("p@1{}")]
    p5: Annotated[Interval, Column("p@5{}")]
    p10: Annotated[Interval, Column("p@10{}")]
    surprisal: Annotated[Interval, Column("surprisal{}")]
    kl: Annotated[Interval, Column("kl{}")]


class Tables(Record):
    """The rows of all lenses and levels."""

    levels: list[LevelRow]


class Headline(Record):
    """Per lens: the mean precision@1 below the last level, and the first level with a precision@1 of one half."""

    mean_p1: Annotated[dict[str, float], Column("mean_p@1_{}")]
    half_right_from_level: Annotated[dict[str, int], Column("half_right_from_level_{}")]
    levels_where_map_beats_identity: int


def run(setup: Setup) -> Result[Tables, Headline]:
    """Score every lens at every level, with 95 % intervals by bootstrap over documents."""
    scores = setup.lens_scores()
    documents = scores.document.numpy()

    def intervals(values: np.ndarray) -> Callable[[int, int], Interval]:
        centre, low, high = mean_interval(values, documents, seed=setup.settings.seed)
        return lambda *at: Interval(float(centre[at]), float(low[at]), float(high[at]))

    p1, p5, p10 = (intervals(scores.hits(k).double().numpy()) for k in (1, 5, 10))
    surprisal, kl = intervals(scores.surprisal.numpy()), intervals(scores.kl.numpy())
    rows = [
        LevelRow(lens, level, *(score(index, level) for score in (p1, p5, p10, surprisal, kl)))
        for index, lens in enumerate(scores.lenses)
        for level in range(scores.n_levels)
    ]
    facts = {"n_examples": scores.n_examples, "n_documents": len(np.unique(documents)), "lenses": list(scores.lenses)}
    p1_of = {lens: [row.p1.mean for row in rows if row.lens == lens] for lens in scores.lenses}
    below = {lens: values[:-1] for lens, values in p1_of.items()}
    gains = zip(below[setup.settings.estimators[0]], below["identity"], strict=True)
    headline = Headline(
        mean_p1={lens: sum(values) / max(1, len(values)) for lens, values in below.items()},
        half_right_from_level={
            lens: next(level for level, value in enumerate(values) if value >= 0.5) for lens, values in p1_of.items()
        },
        levels_where_map_beats_identity=sum(fitted > identity for fitted, identity in gains),
    )
    return Result("predictions", Tables(rows), headline, settings=facts)


def figures(result: Result[Tables, Headline]) -> list[Panel]:
    """Return precision@k of every lens by level, then surprisal and KL."""
    rows, head = result.tables.levels, result.headline
    lenses, last = identity_last(row.lens for row in rows), max(row.level for row in rows)
    first = [f"from level {head.half_right_from_level[lens]} on ({lens})" for lens in lenses]
    means = [f"{number(head.mean_p1[lens])} ({lens})" for lens in lenses]

    def chart(title: str, scale: Literal["unit", "zero"], score: Callable[[LevelRow], Interval]) -> go.Figure:
        lines = {lens: [(row.level, score(row)) for row in rows if row.lens == lens] for lens in lenses}
        # Fitted lenses are often so close that one would hide the other if both were solid.
        dotted = lenses[1:-1:2]
        return line_chart(title, lines, x="level", scale=scale, whole_x=True, dashed=["identity"], dotted=dotted)

    precision = Panel(
        "How often each level predicts the model's token",
        f"The best token is the model's at least half the time {listed(first)}, of {last}. Below the last level the "
        f"mean precision@1 is {listed(means)}.",
        ("levels",),
        [
            chart("precision@1", "unit", lambda row: row.p1),
            chart("precision@5", "unit", lambda row: row.p5),
            chart("precision@10", "unit", lambda row: row.p10),
        ],
    )
    middle = {row.lens: row for row in rows if row.level == last // 2}
    kl = listed([f"{number(middle[lens].kl.mean)} ({lens})" for lens in lenses])
    surprisal = listed([f"{number(middle[lens].surprisal.mean)} ({lens})" for lens in lenses])
    least = mean(row.surprisal.mean for row in rows if row.level == last)
    distance = Panel(
        "How far each level's prediction is from the model's",
        f"At level {last // 2} of {last}, the KL divergence from the model's distribution is {kl} nats. The surprisal "
        f"of the level's best token is {surprisal} nats; that of the model's own best token is {number(least)}.",
        ("levels",),
        [
            chart("surprisal, nats", "zero", lambda row: row.surprisal),
            chart("KL from the model, nats", "zero", lambda row: row.kl),
        ],
    )
    return [precision, distance]


def finding(result: Result[Tables, Headline]) -> Finding:
    """Return the level from which on the best token is the model's half the time."""
    first = result.headline.half_right_from_level
    best = identity_last(first)[0]
    last = max(row.level for row in result.tables.levels)
    return Finding(
        "Predicts the model's token half the time from",
        f"level {first[best]} of {last}",
        f"with {best}; with the identity, from level {first['identity']}.",
    )


STUDY = Study("predictions", "what does each level already predict?", run, figures, finding)
