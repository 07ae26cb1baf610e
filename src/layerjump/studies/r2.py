"""`r2`: how much of each level a linear map from each earlier level explains on held-out text.

For all pairs of levels: R² of the map and of the identity, as the paper averages it (uniformly over coordinates) and
weighted by variance; and the product of adjacent maps beside the direct map: does the shortcut compose?
"""

from __future__ import annotations

import torch

from layerjump.jumps.collect import SplitMoments
from layerjump.jumps.fit import TO_PREDICTIONS
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import Affine, to_affine
from layerjump.jumps.scoring import r2
from layerjump.models.structure import Site
from layerjump.studies.results import Result, Row
from layerjump.studies.setup import Setup


def run(setup: Setup) -> Result:
    """Score every pair on the test split's sums: no second pass, nothing stored."""
    setup.documents("test")  # an error now, not after the pass, where there are none
    collected = setup.collected("all")
    tables: dict[str, list[Row]] = {}
    result = Result("r2", tables)
    for name in setup.settings.estimators:
        if name == TO_PREDICTIONS:
            continue  # it does not lead to levels
        jumps = setup.jumps(name, "all")
        tables[f"pairs {name}"] = [_pair_row(jumps, a.index, b.index) for a, b in jumps]
        tables[f"composed {name}"] = _composed(jumps, collected)
    first = tables[f"pairs {setup.settings.estimators[0]}"]
    better = sum(row["r2"] > row["r2_identity"] for row in first)
    ahead = [row for row in first if row["to"] == setup.model.n_blocks]
    result.headline = {
        "pairs": len(first),
        "pairs_where_map_beats_identity": better,
        "mean_r2": sum(row["r2"] for row in first) / len(first),
        "mean_r2_identity": sum(row["r2_identity"] for row in first) / len(first),
        "half_way_to_last_r2": ahead[len(ahead) // 2]["r2"],
    }
    result.settings = {
        "n_fit": collected.fit.n,
        "n_test": collected.test.n,
        "width": setup.model.d_model,
    }
    return result


def _pair_row(jumps: Jumps, source: int, target: int) -> Row:
    info = jumps.info[source, target]
    assert info.r2 is not None
    assert info.r2_identity is not None
    return {
        "from": source,
        "to": target,
        "r2": info.r2[0],
        "r2_identity": info.r2_identity[0],
        "r2_weighted": info.r2[1],
        "r2_weighted_identity": info.r2_identity[1],
    }


def _composed(jumps: Jumps, collected: SplitMoments) -> list[Row]:
    """Level l to the last by all the adjacent maps one after the other, beside the direct map."""
    last = jumps.provenance.n_blocks
    rows: list[Row] = []
    product = Affine((jumps.provenance.width,) * 2)
    for level in range(last - 1, -1, -1):
        product = _after(product, to_affine(jumps[level, level + 1]))
        x, y = collected.test.source(Site(level)), collected.test.target(Site(level), Site(last))
        composed, direct = r2(product, x, y), jumps.info[level, last].r2
        assert direct is not None
        rows.append(
            {
                "from": level,
                "r2_direct": direct[0],
                "r2_composed": composed.uniform,
                "r2_weighted_direct": direct[1],
                "r2_weighted_composed": composed.weighted,
            }
        )
    return rows[::-1]


def _after(outer: Affine, inner: Affine) -> Affine:
    """x ↦ outer(inner(x)), multiplied out in float64."""
    inner = inner.to(torch.float64)
    weight = outer.linear(inner.weight)
    bias = outer.bias
    if inner.bias is not None:
        moved = outer.linear(inner.bias)
        bias = moved if bias is None else moved + bias
    return Affine.of(weight, bias=bias)
