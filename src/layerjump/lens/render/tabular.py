"""Render a trajectory as JSON or a pandas table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from layerjump.lens.trajectory import Trajectory

if TYPE_CHECKING:
    import pandas

DIGITS = 5


def to_dict(found: Trajectory) -> dict[str, Any]:
    """The trajectory as JSON holds it: lists by level, then by position, then by place among the best."""
    top, followed = found.top.tolist(), found.tracked
    ids = sorted(
        {token for level in top for row in level for token in row} | {*found.query.tracked}
    )
    return {
        "model": found.model.name,
        "lens": found.name,
        "task": found.model.task,
        "levels": list(found.levels),
        "n_blocks": found.model.n_blocks,
        "tokens": [
            {"id": token, "text": text}
            for token, text in zip(found.prompt.ids, found.tokens, strict=True)
        ],
        "positions": list(found.positions),
        "fitted_from": found.fitted_from,
        "k": found.query.k,
        "words": {str(token): text for token, text in zip(ids, found.decode(ids), strict=True)},
        "top": top,
        "probability": _rounded(found.probability),
        "entropy": _rounded(found.entropy),
        "kl": _rounded(found.kl),
        "confidence": _rounded(found.confidence),
        "cross_entropy": _rounded(found.cross_entropy),
        "js": _rounded(found.cells.js) if found.query.jensen_shannon else None,
        "decided_at": [None if level < 0 else level for level in found.settled_level.tolist()],
        "followed": [
            {
                "id": each.id,
                "text": each.text,
                "probability": _rounded(each.probability),
                "rank": each.rank.tolist(),
            }
            for each in followed
        ],
    }


def _rounded(tensor: Tensor) -> Any:
    """Nested lists of numbers with five digits; None for what is no number."""
    return _rounded_list(tensor.tolist())


def _rounded_list(values: Any) -> Any:
    if isinstance(values, list):
        return [_rounded_list(value) for value in values]
    return float(f"{values:.{DIGITS}g}") if math.isfinite(values) else None


def to_pandas(found: Trajectory) -> pandas.DataFrame:
    """A row for every cell, levels slowest; tokens that were followed add two columns each."""
    import pandas

    n_levels, n_positions = len(found.levels), len(found.positions)
    tokens, decided = found.tokens, found.settled_level
    words = found.decode(found.top.flatten().tolist())
    k = found.query.k
    cells = n_levels * n_positions
    columns: dict[str, Any] = {
        "level": [level for level in found.levels for _ in found.positions],
        "position": [*found.positions] * n_levels,
        "token": [tokens[place] for place in found.positions] * n_levels,
        "fitted": [place >= found.fitted_from for place in found.positions] * n_levels,
        "top": words[::k],
        "settled": [bool(0 <= at <= level) for level in range(n_levels) for at in decided.tolist()],
        "best": [words[k * cell : k * (cell + 1)] for cell in range(cells)],
        "probabilities": found.probability.reshape(cells, k).tolist(),
    }
    numbers = {
        "probability": found.probability[:, :, 0],
        "confidence": found.confidence,
        "entropy": found.entropy,
        "kl": found.kl,
        "cross_entropy": found.cross_entropy,
    }
    if found.query.jensen_shannon:
        numbers["jensen_shannon"] = found.cells.js
    for each in found.tracked:
        numbers |= {f"p({each.text!r})": each.probability, f"rank({each.text!r})": each.rank}
    columns |= {name: value.flatten().numpy() for name, value in numbers.items()}
    return pandas.DataFrame(columns)
