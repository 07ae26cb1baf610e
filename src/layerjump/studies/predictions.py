"""`predictions`: what each level already predicts, through identity and through every fitted estimator.

Precision@k: the lens' best token is among the model's k best. Surprisal: −ln of the model's own probability of the
lens' best token. KL: from the model's distribution to the lens'. All hold the lens against the same model's output,
not against the text. A masked model is asked for the [MASK]ed token through its full head.
"""

from __future__ import annotations

import numpy as np

from layerjump.measure.bootstrap import mean_interval
from layerjump.measure.metrics import KS
from layerjump.studies.result import Result, Row
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
            for name, (mean, low, high) in spans.items():
                row[name] = float(mean[place, level])
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
