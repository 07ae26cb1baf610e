"""`text_transfer`: does a map fitted on one text also serve another?

Protocol: for every pair of texts, the maps to the last level fitted on one text are scored on the other. Each text is
run once: its fit split gives one set of maps, its test split the second moments and the positions on which the maps of
all texts are scored. A loss is the score of the maps fitted on the test text itself, minus the score of the given maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from layerjump.data.corpus import Corpus
from layerjump.errors import argument
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.maps import Affine
from layerjump.jumps.moments import Moments
from layerjump.lens.lens import Lens
from layerjump.metrics.bootstrap import mean_interval
from layerjump.models.sites import Pair
from layerjump.studies.charts import Panel, draw_heat_map, line_chart
from layerjump.studies.formatting import mean, number, unique
from layerjump.studies.results import Column, Interval, Record, Result, Study
from layerjump.studies.setup import Setup, hits_below_last, maps_of, mean_r2, r2_of_maps


class PairRow(Record):
    """Maps of one text on another, averaged over the levels below the last."""

    fit: str
    test: str
    r2: float
    r2_weighted: Annotated[float, Column("r2 weighted")]
    p1: Annotated[float, Column("p@1")]
    r2_lost: Annotated[float, Column("r2 lost")]
    r2_weighted_lost: Annotated[float, Column("r2 weighted lost")]
    p1_lost: Annotated[Interval, Column("p@1 lost{}")]


class LevelRow(Record):
    """Maps of one text on another, at one level."""

    fit: str
    test: str
    level: int
    r2: float
    r2_weighted: Annotated[float, Column("r2 weighted")]
    p1: Annotated[float, Column("p@1")]


class Tables(Record):
    """Rows for every pair of texts."""

    matrix: list[PairRow]
    levels: list[LevelRow]


class Headline(Record):
    """Mean scores on the text of the fit, and mean and largest losses on other texts."""

    p1_at_home: Annotated[float, Column("mean_p@1_at_home")]
    p1_lost: Annotated[float, Column("mean_p@1_lost")]
    r2_lost: Annotated[float, Column("mean_r2_lost")]
    most_p1_lost: Annotated[float, Column("most_p@1_lost")]
    most_lost_from: str
    most_lost_on: str


def cannot_run(setup: Setup) -> str | None:
    """Return why transfer cannot be studied, or None."""
    missing = None if setup.others else f"it compares texts; pass {argument('text')} more than once"
    return setup.model.no_predictions or missing


def run(setup: Setup) -> Result[Tables, Headline]:
    """Fit on every text, score on every text."""
    texts = name_texts([setup.corpus, *setup.others])
    estimator = setup.settings.estimators[0]
    lenses: dict[str, Lens] = {}
    maps: dict[str, dict[Pair, Affine]] = {}
    tests: dict[str, Moments] = {}
    sizes: dict[str, dict[str, int | str]] = {}
    for name, corpus in texts.items():
        is_first = corpus is setup.corpus
        moments = setup.moments("to-last") if is_first else setup.collect_moments(corpus, "to-last")
        jumps = solve_jumps(moments, estimator, model=setup.model)
        lenses[name], maps[name], tests[name] = (Lens(setup.model, jumps), maps_of(jumps), moments.test)
        sizes[name] = {"n_fit": moments.fit.n, "n_test": moments.test.n, "text": corpus.name}
    tables = Tables([], [])
    for name, corpus in texts.items():
        scores = setup.score_lenses(lenses, setup.test_batches(corpus))
        sizes[name]["n_examples"] = scores.n_examples
        r2 = {fit: r2_of_maps(maps[fit], tests[name]) for fit in texts}
        hits, documents = hits_below_last(scores).numpy(), scores.document.numpy()
        precision, home, home_r2 = scores.hits(1).double().mean(-1), hits[[*texts].index(name)], mean_r2(r2[name])
        losses = zip(*mean_interval(home - hits, documents, seed=setup.settings.seed), strict=True)
        for index, (fit, lost) in enumerate(zip(texts, losses, strict=True)):
            means = mean_r2(r2[fit])
            tables.matrix.append(
                PairRow(
                    fit,
                    name,
                    r2=means.uniform,
                    r2_weighted=means.weighted,
                    p1=float(hits[index].mean()),
                    r2_lost=home_r2.uniform - means.uniform,
                    r2_weighted_lost=home_r2.weighted - means.weighted,
                    p1_lost=Interval(*map(float, lost)),
                )
            )
            tables.levels.extend(
                LevelRow(fit, name, level, score.uniform, score.weighted, float(precision[index, level]))
                for level, score in enumerate(r2[fit])
            )
    away = [row for row in tables.matrix if row.fit != row.test]
    worst = max(away, key=lambda row: row.p1_lost.mean)
    headline = Headline(
        p1_at_home=mean(row.p1 for row in tables.matrix if row.fit == row.test),
        p1_lost=mean(row.p1_lost.mean for row in away),
        r2_lost=mean(row.r2_lost for row in away),
        most_p1_lost=worst.p1_lost.mean,
        most_lost_from=worst.fit,
        most_lost_on=worst.test,
    )
    notes = [
        "A loss is the score of the map fitted on the test text itself, minus the score of this map; intervals "
        "resample documents of the test text. A text with fewer fit positions gives worse maps on any text."
    ]
    return Result("text_transfer", tables, headline, notes, {"estimator": estimator, "texts": sizes})


def name_texts(texts: Sequence[Corpus]) -> dict[str, Corpus]:
    """Return the texts by name; a name that occurs again is numbered."""
    names: dict[str, Corpus] = {}
    for corpus in texts:
        name, count = corpus.name, 1
        while name in names:
            count += 1
            name = f"{corpus.name} ({count})"
        names[name] = corpus
    return names


def figures(result: Result[Tables, Headline]) -> list[Panel]:
    """Return heat maps of fit text × test text, then precision@1 by level for each test text."""
    matrix, head = result.tables.matrix, result.headline
    heat_maps = [
        draw_heat_map({(row.test, row.fit): score(row) for row in matrix}, title=title, x="tested on", y="fitted on")
        for title, score in (
            ("precision@1, mean over levels", lambda row: row.p1),
            ("precision@1 lost", lambda row: row.p1_lost.mean),
            ("R² lost", lambda row: row.r2_lost),
        )
    ]
    worst = next(r for r in matrix if (r.fit, r.test) == (head.most_lost_from, head.most_lost_on))
    reading = (
        f"A map tested on the text of its fit reaches a precision@1 of {number(head.p1_at_home)}, mean over levels and "
        f"texts; on another text it loses {number(head.p1_lost)} of it and {number(head.r2_lost)} of R². The largest "
        f"loss is {number(worst.p1_lost.mean)} (95 % interval {number(worst.p1_lost.low)} to "
        f"{number(worst.p1_lost.high)}), of maps fitted on {worst.fit} and tested on {worst.test}."
    )
    panels, rows = [Panel("From text to text", reading, ("matrix",), heat_maps)], result.tables.levels
    if not rows:
        return panels

    levels, charts = sorted({row.level for row in rows}), []
    for test in unique(row.test for row in rows):
        lines = {
            f"fitted on {fit}": [(row.level, row.p1) for row in rows if (row.fit, row.test) == (fit, test)]
            for fit in unique(row.fit for row in rows)
        }
        title = f"tested on {test}"
        charts.append(line_chart(title, lines, x="level", y="precision@1", scale="unit", whole_x=True))
    loss = {
        level: mean(r.p1 for r in rows if r.level == level and r.fit == r.test)
        - mean(r.p1 for r in rows if r.level == level and r.fit != r.test)
        for level in levels
    }
    level = max(levels, key=loss.__getitem__)
    reading = (
        f"The mean loss of precision@1 on another text is largest at level {level} ({number(loss[level])}) and "
        f"{number(loss[levels[-1]])} at level {levels[-1]}."
    )
    return [*panels, Panel("From text to text, level by level", reading, ("levels",), charts)]


STUDY = Study("text_transfer", "does a map fitted on one text also serve another?", run, figures, cannot_run=cannot_run)
