"""`transfer`: a map fitted on one text, scored on another, for every pair of the texts given.

Each text is run once. Its fit split gives one set of maps, its test split one set of sums on which every text's maps
are scored, and one set of positions that they are read at. What is lost is told against the maps fitted on the test
text itself.
"""

from __future__ import annotations

from layerjump.data.corpus import Corpus
from layerjump.errors import argument
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.maps import Affine
from layerjump.jumps.pairs import Pair
from layerjump.jumps.scoring import R2
from layerjump.jumps.statistics import Moments
from layerjump.lens.evaluate import LensScores
from layerjump.lens.lens import Lens
from layerjump.metrics.bootstrap import mean_interval
from layerjump.studies._untyped import Result, Row, mean_r2
from layerjump.studies.setup import Setup, hits_below_last, maps_of, r2_of_maps


def unable(setup: Setup) -> str | None:
    """Why transfer cannot be studied; None where it can."""
    if setup.model.no_predictions:
        return setup.model.no_predictions
    return (
        None
        if setup.others
        else f"it compares texts, and got one; give {argument('text')} twice or more"
    )


def run(setup: Setup) -> Result:
    """Fit on every text, score on every text."""
    texts = named([setup.corpus, *setup.others])
    estimator = setup.settings.estimators[0]
    lenses: dict[str, Lens] = {}
    maps: dict[str, dict[Pair, Affine]] = {}
    tests: dict[str, Moments] = {}
    sizes: dict[str, Row] = {}
    for name, corpus in texts.items():
        first = corpus is setup.corpus
        sums = setup.moments("to-last") if first else setup.collect_moments(corpus, "to-last")
        jumps = solve_jumps(sums, estimator, model=setup.model)
        lenses[name], maps[name], tests[name] = Lens(setup.model, jumps), maps_of(jumps), sums.test
        sizes[name] = {"n_fit": sums.fit.n, "n_test": sums.test.n, "text": corpus.name}
    result = Result("transfer", {"matrix": [], "levels": []})
    for name, corpus in texts.items():
        readings = setup.score_lenses(lenses, setup.test_batches(corpus))
        sizes[name]["n_examples"] = readings.n_examples
        scores = {fit: r2_of_maps(mine, tests[name]) for fit, mine in maps.items()}
        result.tables["matrix"] += _cells(name, scores, readings, setup.settings.seed)
        result.tables["levels"] += _levels(name, scores, readings)
    result.settings = {"estimator": estimator, "texts": sizes}
    result.headline = _headline(result.tables["matrix"])
    result.notes.append(
        "A loss is what the map fitted on the test text itself scores, less what this map scores there; intervals "
        "resample the test text's documents. Texts that give fewer fit positions give worse maps, on any text."
    )
    return result


def named(texts: list[Corpus]) -> dict[str, Corpus]:
    """The texts by name; a name that comes up again is numbered."""
    found: dict[str, Corpus] = {}
    for corpus in texts:
        name, count = corpus.name, 1
        while name in found:
            count += 1
            name = f"{corpus.name} ({count})"
        found[name] = corpus
    return found


def _cells(test: str, scores: dict[str, list[R2]], readings: LensScores, seed: int) -> list[Row]:
    """One row for each fit text: its scores on a test text, and what it loses there."""
    hits = hits_below_last(readings).numpy()
    own = readings.lenses.index(test)
    lost, low, high = mean_interval(hits[own] - hits, readings.document.numpy(), seed=seed)
    best = mean_r2(scores[test])
    rows: list[Row] = []
    for place, fit in enumerate(readings.lenses):
        score = mean_r2(scores[fit])
        row: Row = {"fit": fit, "test": test, **score, "p@1": float(hits[place].mean())}
        row |= {f"{name} lost": best[name] - value for name, value in score.items()}
        row["p@1 lost"] = float(lost[place])
        row |= {"p@1 lost low": float(low[place]), "p@1 lost high": float(high[place])}
        rows.append(row)
    return rows


def _levels(test: str, scores: dict[str, list[R2]], readings: LensScores) -> list[Row]:
    hits = readings.hits(1).double().mean(-1)
    return [
        {
            "fit": fit,
            "test": test,
            "level": level,
            "r2": score.uniform,
            "r2 weighted": score.weighted,
            "p@1": float(hits[place, level]),
        }
        for place, fit in enumerate(readings.lenses)
        for level, score in enumerate(scores[fit])
    ]


def _headline(matrix: list[Row]) -> Row:
    moved = [row for row in matrix if row["fit"] != row["test"]]
    worst = max(moved, key=lambda row: row["p@1 lost"])
    return {
        "mean_p@1_at_home": _mean([row["p@1"] for row in matrix if row["fit"] == row["test"]]),
        "mean_p@1_lost": _mean([row["p@1 lost"] for row in moved]),
        "mean_r2_lost": _mean([row["r2 lost"] for row in moved]),
        "most_p@1_lost": worst["p@1 lost"],
        "most_lost_from": worst["fit"],
        "most_lost_on": worst["test"],
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
