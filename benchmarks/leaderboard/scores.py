"""How good a lens is, measured in one place for all of them: held against the model's own output and the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import layerjump as lj
from layerjump.metrics.bootstrap import Floats, document_weights, mean_interval, statistic_interval
from layerjump.metrics.logits import KS, agreement, calibration_error, marginal_kl, reference_logits
from layerjump.models.structure import FINAL, Site
from leaderboard.held_out import HeldOut

GROUPS = 25
"""Documents are put into so many groups for the marginal KL: a distribution each is all one can keep."""
DRAWS = 200

Interval = tuple[float, float, float]


@dataclass(frozen=True)
class Scores:
    """What one lens reads at levels 0 … L − 1 of the held-out positions; NaN at levels that it does not read."""

    kl: Floats  # (levels, positions), as are the next four
    rank: Floats
    surprisal: Floats
    probability: Floats
    """That the lens gives to its best token."""
    hit: Floats
    """Whether that token is the text's."""
    marginal: Floats  # (levels,)
    marginal_draws: Floats  # (levels, draws)
    known: Floats  # (positions,) 1 where the text has a token, 0 where it ends
    document: Floats

    def summary(self) -> dict[str, Interval]:
        """Every measure as mean, low, high: averaged over levels 1 … L − 1, which every lens reads."""
        found = {name: self._mean(values[1:].mean(0)) for name, values in self._means().items()}
        found["ece"] = self._calibration(slice(1, None))
        found["marginal_kl"] = _spread(self.marginal[1:].mean(), self.marginal_draws[1:].mean(0))
        return found

    def levels(self) -> list[dict[str, Interval] | None]:
        """The same level by level, from level 0 on; None where the lens does not read."""
        return [None if np.isnan(kl).all() else self._level(level) for level, kl in enumerate(self.kl)]

    def _level(self, level: int) -> dict[str, Interval]:
        found = {name: self._mean(values[level]) for name, values in self._means().items()}
        found["ece"] = self._calibration(slice(level, level + 1))
        found["marginal_kl"] = _spread(self.marginal[level], self.marginal_draws[level])
        return found

    def measure(self, name: str) -> Floats:
        """(levels, positions) of a measure that is a mean over positions."""
        return self._means()[name]

    def _means(self) -> dict[str, Floats]:
        hits = {f"p{k}": np.where(np.isnan(self.rank), np.nan, self.rank < k) for k in KS}
        return {"kl": self.kl, **hits, "surprisal": self.surprisal}

    def _mean(self, values: Floats) -> Interval:
        mean, low, high = mean_interval(values, self.document)
        return float(mean), float(low), float(high)

    def _calibration(self, levels: slice) -> Interval:
        def error(weight: Floats) -> float:
            weight = weight * self.known
            return float(calibration_error(self.probability[levels], self.hit[levels], weight).mean())

        return error(np.ones_like(self.known)), *statistic_interval(error, self.document)


def difference(ours: Scores, theirs: Scores, measure: str = "kl") -> dict[str, Any]:
    """One lens minus another at the same positions, with intervals: on average and at every level."""
    apart = ours.measure(measure) - theirs.measure(measure)
    mean = mean_interval(apart[1:].mean(0), ours.document)
    levels = np.stack(mean_interval(apart, ours.document), 1)
    # JSON has no NaN: a level that one of the two does not read has no difference.
    known = [None if np.isnan(ends).any() else ends.tolist() for ends in levels]
    return {"mean": [float(end) for end in mean], "levels": known}


@torch.no_grad()
def score(model: lj.Model, lens: lj.Lens, held: HeldOut) -> Scores:
    """Read every level of the held-out positions through a lens."""
    n_levels, groups = model.n_blocks, _groups(held)
    cells = torch.full((5, n_levels, len(held)), torch.nan, dtype=torch.float64)
    shape = (n_levels + 1, GROUPS, model.structure.vocab_size)
    totals = torch.zeros(shape)  # the last one is the model's own
    readable = [level for level in range(n_levels) if _reads(lens, level)]
    for rows in held.chunks():
        true = reference_logits(model.logits(held.levels[-1][rows]))
        totals[-1].index_add_(0, groups[rows], true.probabilities)
        for level in readable:
            logits = lens.logits(level, held.levels[level][rows])
            seen = agreement(logits, true)
            probabilities = logits.softmax(-1)
            best = probabilities.gather(1, seen.top[:, None])[:, 0]
            hit = seen.top == held.wanted[rows]
            columns = (seen.kl, seen.rank, seen.surprisal, best, hit)
            cells[:, level, rows] = torch.stack([column.double() for column in columns])
            totals[level].index_add_(0, groups[rows], probabilities)
    marginal, draws = _marginal(totals, readable)
    known = (held.wanted >= 0).double().numpy()
    kl, rank, surprisal, probability, hit = cells.numpy()
    document = held.document.double().numpy()
    return Scores(kl, rank, surprisal, probability, hit, marginal, draws, known, document)


def _reads(lens: lj.Lens, level: int) -> bool:
    """Jacobian lenses begin behind the first block."""
    if lens.jumps is None:
        return True
    last = Site(lens.model.n_blocks)
    return any((Site(level), target) in lens.jumps for target in (last, FINAL))


def _groups(held: HeldOut) -> Tensor:
    """A group for each position; documents stay whole."""
    _, place = held.document.unique(return_inverse=True)
    return place * GROUPS // (int(place.max()) + 1)


def _marginal(totals: Tensor, readable: list[int]) -> tuple[Floats, Floats]:
    """Marginal KL at every level, and in bootstrap draws of groups of documents."""
    *levels, own = totals
    weights = torch.from_numpy(document_weights(GROUPS, DRAWS, 0).copy()).float()
    marginal, draws = np.full(len(levels), np.nan), np.full((len(levels), DRAWS), np.nan)
    own_draws = weights @ own
    for level in readable:
        marginal[level] = marginal_kl(own.sum(0), levels[level].sum(0))
        draws[level] = marginal_kl(own_draws, weights @ levels[level]).numpy()
    return marginal, draws


def _spread(value: float, draws: Floats) -> Interval:
    """An interval as wide as the draws', about the value: resampling adds to a KL's bias, which is taken off again."""
    low, high = np.quantile(draws, [0.025, 0.975]) - draws.mean() + value
    return float(value), float(max(low, 0)), float(high)
