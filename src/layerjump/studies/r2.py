"""`r2`: how much of each level a linear map from each earlier level explains on held-out text.

For every pair of levels: R² of the map and of the identity, averaged uniformly over coordinates (as in the paper) and
weighted by variance. For every level: R² at the last level of the product of adjacent maps and of the direct map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import torch

from layerjump.jumps.estimators.registry import find_estimator
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import Affine, to_affine
from layerjump.jumps.moments_of_splits import SplitMoments
from layerjump.jumps.score_from_moments import r2
from layerjump.models.sites import Site
from layerjump.studies.charts import Panel, draw_heat_map, line_chart
from layerjump.studies.formatting import mean, number
from layerjump.studies.results import Column, Finding, Record, Result, Study
from layerjump.studies.setup import Setup


class PairRow(Record):
    """One pair of levels."""

    source: Annotated[int, Column("from")]
    target: Annotated[int, Column("to")]
    r2: float
    r2_identity: float
    r2_weighted: float
    r2_weighted_identity: float


class ComposedRow(Record):
    """From one level to the last: the direct map, and the product of the adjacent maps."""

    source: Annotated[int, Column("from")]
    r2_direct: float
    r2_composed: float
    r2_weighted_direct: float
    r2_weighted_composed: float


class Tables(Record):
    """Rows by estimator."""

    pairs: Annotated[dict[str, list[PairRow]], Column("pairs {}")]
    composed: Annotated[dict[str, list[ComposedRow]], Column("composed {}")]


class Headline(Record):
    """Means over all pairs of levels, of the first estimator."""

    pairs: int
    pairs_where_map_beats_identity: int
    mean_r2: float
    mean_r2_identity: float
    half_way_to_last_r2: float


def run(setup: Setup) -> Result[Tables, Headline]:
    """Score every pair on the second moments of the test split; this needs no second pass."""
    setup.documents("test")  # raises now, not after the pass, where there are none
    moments = setup.moments("all")
    # Calibrated maps do not lead to levels.
    names = setup.settings.estimators
    estimators = [name for name in names if "+" not in name and find_estimator(name).targets != "predictions"]
    jumps = {name: setup.jumps(name, "all") for name in estimators}
    tables = Tables({name: _pair_rows(jumps[name]) for name in estimators}, {})
    for name in estimators:
        tables.composed[name] = _composed_rows(jumps[name], moments)
    rows = tables.pairs[estimators[0]]
    to_last = [row for row in rows if row.target == setup.model.n_blocks]
    headline = Headline(
        pairs=len(rows),
        pairs_where_map_beats_identity=sum(row.r2 > row.r2_identity for row in rows),
        mean_r2=sum(row.r2 for row in rows) / len(rows),
        mean_r2_identity=sum(row.r2_identity for row in rows) / len(rows),
        half_way_to_last_r2=to_last[len(to_last) // 2].r2,
    )
    facts = {"n_fit": moments.fit.n, "n_test": moments.test.n, "width": setup.model.d_model}
    return Result("r2", tables, headline, settings=facts)


def _pair_rows(jumps: Jumps) -> list[PairRow]:
    rows = []
    for source, target in jumps:
        info = jumps.info[source, target]
        assert info.r2 is not None
        assert info.r2_identity is not None
        (r2, r2_weighted), (identity, identity_weighted) = info.r2, info.r2_identity
        rows.append(PairRow(source.index, target.index, r2, identity, r2_weighted, identity_weighted))
    return rows


def _composed_rows(jumps: Jumps, moments: SplitMoments) -> list[ComposedRow]:
    last = jumps.provenance.n_blocks
    rows = []
    product = Affine((jumps.provenance.width,) * 2)
    for level in range(last - 1, -1, -1):
        # x ↦ outer(inner(x)) as one map in float64.
        inner, bias = to_affine(jumps[level, level + 1]).to(torch.float64), product.bias
        if inner.bias is not None:
            moved = product.linear(inner.bias)
            bias = moved if bias is None else moved + bias
        product = Affine.of(product.linear(inner.weight), bias=bias)
        x, y = moments.test.source(Site(level)), moments.test.target(Site(level), Site(last))
        composed, direct = r2(product, x, y), jumps.info[level, last].r2
        assert direct is not None
        rows.append(ComposedRow(level, direct[0], composed.uniform, direct[1], composed.weighted))
    return rows[::-1]


def figures(result: Result[Tables, Headline]) -> list[Panel]:
    """Return heat maps of the map and the identity for both kinds of R², then direct against composed maps."""
    panels = []
    for estimator, rows in result.tables.pairs.items():
        uniform = {(row.target, row.source): (row.r2, row.r2_identity) for row in rows}
        weighted = {(row.target, row.source): (row.r2_weighted, row.r2_weighted_identity) for row in rows}
        panels.append(_pairs_panel(uniform, estimator, "averaged over coordinates"))
        panels.append(_pairs_panel(weighted, estimator, "weighted by variance"))
    return panels + [_composed_panel(*item) for item in result.tables.composed.items()]


def _pairs_panel(scores: Mapping[tuple[int, int], tuple[float, float]], estimator: str, average: str) -> Panel:
    """Draw the scores of the map and of the identity, by (target, source)."""
    figures = [
        draw_heat_map({pair: score[index] for pair, score in scores.items()}, title=title, span=(0.0, 1.0))
        for index, title in enumerate((f"map ({estimator})", "identity"))
    ]
    better = sum(fitted > identity for fitted, identity in scores.values())
    target, source = max(scores, key=lambda pair: scores[pair][0] - scores[pair][1])
    best, best_identity = scores[target, source]
    reading = (
        f"On held-out text the map beats the identity for {better} of {len(scores)} pairs of levels. The mean R² is "
        f"{number(mean(fitted for fitted, _ in scores.values()))} for the map and "
        f"{number(mean(identity for _, identity in scores.values()))} for the identity. The gain is largest from level "
        f"{source} to level {target}: {number(best)} against {number(best_identity)}."
    )
    below = sum(score < 0 for pair in scores.values() for score in pair)
    if below:
        reading += f" Colours stop at 0; {below} values are below it."
    title = f"R² of {estimator} and of the identity, {average}"
    return Panel(title, reading, (f"pairs {estimator}",), figures)


def _composed_panel(estimator: str, rows: Sequence[ComposedRow]) -> Panel:
    figures = []
    for title, scores in (
        ("averaged over coordinates", [(row.source, row.r2_direct, row.r2_composed) for row in rows]),
        ("weighted by variance", [(row.source, row.r2_weighted_direct, row.r2_weighted_composed) for row in rows]),
    ):
        lines = {
            name: [(score[0], score[index]) for score in scores] for index, name in ((1, "direct"), (2, "composed"))
        }
        axis = "R² at the last level"
        figures.append(
            line_chart(title, lines, x="from level", y=axis, scale="unit", whole_x=True, dashed=["composed"])
        )

    worst = max(rows, key=lambda row: row.r2_direct - row.r2_composed)
    gap = worst.r2_direct - worst.r2_composed
    if gap < 0.01:
        reading = f"The product of the adjacent maps loses at most {number(gap)} of R² against the direct map."
    else:
        reading = (
            f"The direct map to the last level explains more than the product of the adjacent maps: "
            f"{number(worst.r2_direct)} against {number(worst.r2_composed)} from level {worst.source}, where the gap "
            f"is largest."
        )
    title = f"Direct {estimator} jumps and products of adjacent ones"
    return Panel(title, reading, (f"composed {estimator}",), figures)


def finding(result: Result[Tables, Headline]) -> Finding:
    """Return the mean R² of the map and of the identity."""
    head = result.headline
    better = head.pairs_where_map_beats_identity
    return Finding(
        "R² of a map between two levels",
        number(head.mean_r2),
        f"on average over {number(head.pairs)} pairs (the identity: {number(head.mean_r2_identity)}); the map is "
        f"better for {'all' if better == head.pairs else number(better)} of them.",
    )


STUDY = Study(
    "r2",
    "how much of each level does a linear map from an earlier level explain?",
    run,
    figures,
    finding,
    cannot_run=lambda setup: None,
    level_pairs="all",
)
