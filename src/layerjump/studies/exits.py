"""`exits`: early exit, replayed exactly as the authors of `mat` coded it (papers' section 6).

Every example is read at all levels once; each λ of the grid then says where it would have stopped. Cost is the mean
number of blocks run, accuracy how often the token given out is the model's own. Beside the rule: stopping at a fixed
level, and an oracle that stops at the first level whose best token is the model's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from layerjump.decode.rules import FINE, GRID, SoftmaxGap
from layerjump.lens.readings import Readings
from layerjump.measure.bootstrap import mean_interval, statistic_interval
from layerjump.studies.result import Result, Row
from layerjump.studies.setup import Setup

AUTHORS_BERT_POSITION = 3
"""The t that the authors' BERT code gives the rule for every example."""


def run(setup: Setup) -> Result:
    """Curves of agreement against blocks run, and what each saves at the target agreement."""
    readings, settings = setup.readings(), setup.settings
    given = _given_position(setup)
    position = readings.position if given is None else torch.full_like(readings.position, given)
    length = float((readings.position + 1).double().mean())
    curves: list[Row] = []
    saved: list[Row] = []
    for place, lens in enumerate(readings.lenses):
        grid = sorted({*GRID, *(FINE if lens == "identity" else ())})
        dynamic = [_replay(readings, place, position, value, length) for value in grid]
        fixed = _fixed(readings, place)
        curves += _rows(lens, "dynamic", grid, dynamic, readings, setup)
        curves += _rows(lens, "fixed", range(len(fixed)), fixed, readings, setup)
        for target in settings.targets:
            for kind, points in (("dynamic", dynamic), ("fixed", fixed)):
                saved.append(saved_row(lens, kind, points, target, readings.document, setup))
        saved.append(_oracle(readings, place, setup))
    result = Result("exits", {"curves": curves, "saved": saved})
    result.settings = {
        "rule": "stop at the first level ≥ 1 with p1 − p2 > 0.9 λ + 0.1 exp(−4 t / N)",
        "N": length,
        "t": "its own position" if given is None else given,
        "n_examples": readings.n_examples,
        "blocks": setup.model.n_blocks,
    }
    result.headline = {
        f"{row['kind']}_{row['lens']}_at_{row['target']:g}": row["blocks_saved"]
        for row in saved
        if row["target"] is not None
    }
    result.notes.append(
        "Blocks saved at a target are read off the curve by linear interpolation between neighbouring points of its "
        "upper envelope (the best agreement reached at no more cost); the paper does not say how it interpolates. "
        "They count blocks alone: not the map's product, nor the vocabulary product at every level."
    )
    return result


def _given_position(setup: Setup) -> int | None:
    """The t of every example; None: each has its own."""
    given = setup.settings.exit_position
    if given is None and setup.settings.paper and setup.model.masked:
        return AUTHORS_BERT_POSITION
    return given


def _replay(
    readings: Readings, place: int, position: Tensor, strength: float, length: float
) -> tuple[Tensor, Tensor]:
    """Where each example stops under one λ, and whether it gives the model's token there."""
    levels = SoftmaxGap(strength, length).replay(readings.confidence[place], position)
    return levels, readings.hits(1)[place].gather(0, levels[None])[0]


def _fixed(readings: Readings, place: int) -> list[tuple[Tensor, Tensor]]:
    hits = readings.hits(1)[place]
    return [(torch.full_like(readings.best, level), hits[level]) for level in range(len(hits))]


def _rows(
    lens: str,
    kind: str,
    grid: Sequence[float] | range,
    points: list[tuple[Tensor, Tensor]],
    readings: Readings,
    setup: Setup,
) -> list[Row]:
    documents, seed = readings.document.numpy(), setup.settings.seed
    hits = np.stack([hit.double().numpy() for _, hit in points])
    _, low, high = mean_interval(hits, documents, seed=seed)
    return [
        {
            "lens": lens,
            "kind": kind,
            "at": float(at),
            "blocks": float(levels.double().mean()),
            "agreement": float(hit.double().mean()),
            "agreement low": float(low[index]),
            "agreement high": float(high[index]),
        }
        for index, (at, (levels, hit)) in enumerate(zip(grid, points, strict=True))
    ]


def blocks_needed(cost: np.ndarray, agreement: np.ndarray, target: float) -> float:
    """The blocks at which the curve's upper envelope first reaches the target; NaN if it never does."""
    order = np.lexsort((-agreement, cost))
    cost, best = cost[order], np.maximum.accumulate(agreement[order])
    reached = np.flatnonzero(best >= target)
    if not len(reached):
        return float("nan")
    index = int(reached[0])
    if index == 0:
        return float(cost[index])
    share = (target - best[index - 1]) / (best[index] - best[index - 1])
    return float(cost[index - 1] + share * (cost[index] - cost[index - 1]))


def saved_row(
    lens: str,
    kind: str,
    points: list[tuple[Tensor, Tensor]],
    target: float,
    documents: Tensor,
    setup: Setup,
) -> Row:
    """Blocks saved at a target agreement; points are (levels where examples leave, whether they are right there)."""
    levels = np.stack([level.double().numpy() for level, _ in points])
    hits = np.stack([hit.double().numpy() for _, hit in points])
    blocks = setup.model.n_blocks

    def saving(weights: np.ndarray) -> float:
        total = weights.sum()
        return blocks - blocks_needed(levels @ weights / total, hits @ weights / total, target)

    found = saving(np.ones(len(documents)))
    low, high = statistic_interval(saving, documents.numpy(), seed=setup.settings.seed)
    return _saved_row(lens, kind, target, found, low, high, blocks)


def _oracle(readings: Readings, place: int, setup: Setup) -> Row:
    """The first level, from 1 on, whose best token is the model's: no rule that stops by then can save more."""
    right = readings.hits(1)[place].clone()
    right[0] = False
    first = right.int().argmax(0).double().numpy()
    blocks = setup.model.n_blocks
    mean, low, high = mean_interval(
        blocks - first, readings.document.numpy(), seed=setup.settings.seed
    )
    ends = float(mean), float(low), float(high)
    return _saved_row(readings.lenses[place], "oracle", None, *ends, blocks)


def _saved_row(
    lens: str, kind: str, target: float | None, found: float, low: float, high: float, blocks: int
) -> Row:
    return {
        "lens": lens,
        "kind": kind,
        "target": target,
        "blocks_saved": found,
        "low": low,
        "high": high,
        "share": found / blocks,
    }
