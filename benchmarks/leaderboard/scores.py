"""Scores of a lens against the model's own output and the text; the same code scores every lens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import layerjump as lj
from layerjump.metrics.bootstrap import Floats, document_weights, mean_interval, statistic_interval
from layerjump.metrics.logits import KS, agreement, calibration_error, marginal_kl, reference_logits
from layerjump.models.sites import FINAL, Site
from leaderboard.held_out import HeldOut

GROUPS = 25
"""Groups of documents for the marginal KL: one distribution a document would need too much memory."""
DRAWS = 200
"""Bootstrap draws for the interval of the marginal KL."""

Interval = tuple[float, float, float]
"""Mean, lower and upper end."""


@dataclass(frozen=True)
class Scores:
    """Scores of one lens at levels 0 … L − 1 of the held-out positions; NaN at levels that it does not cover."""

    kl: Floats  # (levels, positions), as are the next four
    rank: Floats
    """The rank of the lens' top token in the model's distribution, from 0."""
    surprisal: Floats
    probability: Floats
    """The probability that the lens gives to its top token."""
    hit: Floats
    """Whether that token is the text's."""
    marginal: Floats  # (levels,)
    marginal_draws: Floats  # (levels, draws)
    has_target: Floats  # (positions,) 1 where the text has a token, 0 where it ends
    document: Floats

    def summary(self) -> dict[str, Interval]:
        """Return every measure with its interval, averaged over levels 1 … L − 1, which every lens covers."""
        measures = {name: self._mean(values[1:].mean(0)) for name, values in self._means().items()}
        measures["ece"] = self._calibration(slice(1, None))
        measures["marginal_kl"] = _spread(self.marginal[1:].mean(), self.marginal_draws[1:].mean(0))
        return measures

    def levels(self) -> list[dict[str, Interval] | None]:
        """Return every measure with its interval at each level from 0 on; None where the lens has no map."""
        return [None if np.isnan(kl).all() else self._level(level) for level, kl in enumerate(self.kl)]

    def _level(self, level: int) -> dict[str, Interval]:
        measures = {name: self._mean(values[level]) for name, values in self._means().items()}
        measures["ece"] = self._calibration(slice(level, level + 1))
        measures["marginal_kl"] = _spread(self.marginal[level], self.marginal_draws[level])
        return measures

    def measure(self, name: str) -> Floats:
        """Return the (levels, positions) values of a measure that is a mean over positions."""
        return self._means()[name]

    def _means(self) -> dict[str, Floats]:
        hits = {f"p{k}": np.where(np.isnan(self.rank), np.nan, self.rank < k) for k in KS}
        return {"kl": self.kl, **hits, "surprisal": self.surprisal}

    def _mean(self, values: Floats) -> Interval:
        mean, low, high = mean_interval(values, self.document)
        return float(mean), float(low), float(high)

    def _calibration(self, levels: slice) -> Interval:
        def error(weight: Floats) -> float:
            weight = weight * self.has_target
            return float(calibration_error(self.probability[levels], self.hit[levels], weight).mean())

        return error(np.ones_like(self.has_target)), *statistic_interval(error, self.document)


def difference(ours: Scores, theirs: Scores, measure: str = "kl") -> dict[str, Any]:
    """Return the score of one lens minus that of another, paired by position, on average and at every level."""
    differences = ours.measure(measure) - theirs.measure(measure)
    mean = mean_interval(differences[1:].mean(0), ours.document)
    levels = np.stack(mean_interval(differences, ours.document), 1)
    # JSON has no NaN: a level that one of the two does not cover has no difference.
    by_level = [None if np.isnan(interval).any() else interval.tolist() for interval in levels]
    return {"mean": [float(end) for end in mean], "levels": by_level}


@torch.no_grad()
def score(model: lj.Model, lens: lj.Lens, held: HeldOut) -> Scores:
    """Score a lens at every level of the held-out positions."""
    n_levels, groups = model.n_blocks, _groups(held)
    cells = torch.full((5, n_levels, len(held)), torch.nan, dtype=torch.float64)
    shape = (n_levels + 1, GROUPS, model.structure.vocab_size)
    totals = torch.zeros(shape)  # the last one is the model's own
    covered = [level for level in range(n_levels) if _covers(lens, level)]
    for rows in held.chunks():
        reference = reference_logits(model.logits(held.levels[-1][rows]))
        totals[-1].index_add_(0, groups[rows], reference.probabilities)
        for level in covered:
            logits = lens.logits(level, held.levels[level][rows])
            compared = agreement(logits, reference)
            probabilities = logits.softmax(-1)
            top_probability = probabilities.gather(1, compared.top[:, None])[:, 0]
            hit = compared.top == held.target[rows]
            columns = (compared.kl, compared.rank, compared.surprisal, top_probability, hit)
            cells[:, level, rows] = torch.stack([column.double() for column in columns])
            totals[level].index_add_(0, groups[rows], probabilities)
    marginal, draws = _marginal(totals, covered)
    has_target = (held.target >= 0).double().numpy()
    kl, rank, surprisal, probability, hit = cells.numpy()
    document = held.document.double().numpy()
    return Scores(kl, rank, surprisal, probability, hit, marginal, draws, has_target, document)


def _covers(lens: lj.Lens, level: int) -> bool:
    """Return whether the lens has a map from a level; Jacobian lenses have none from level 0."""
    if lens.jumps is None:
        return True
    last = Site(lens.model.n_blocks)
    return any((Site(level), target) in lens.jumps for target in (last, FINAL))


def _groups(held: HeldOut) -> Tensor:
    """Return the group of each position; positions of one document are in one group."""
    _, index = held.document.unique(return_inverse=True)
    return index * GROUPS // (int(index.max()) + 1)


def _marginal(totals: Tensor, covered: list[int]) -> tuple[Floats, Floats]:
    """Return the marginal KL at every level, and in bootstrap draws of groups of documents."""
    *levels, model_totals = totals
    weights = torch.from_numpy(document_weights(GROUPS, DRAWS, 0).copy()).float()
    marginal, draws = np.full(len(levels), np.nan), np.full((len(levels), DRAWS), np.nan)
    model_draws = weights @ model_totals
    for level in covered:
        marginal[level] = marginal_kl(model_totals.sum(0), levels[level].sum(0))
        draws[level] = marginal_kl(model_draws, weights @ levels[level]).numpy()
    return marginal, draws


def _spread(value: float, draws: Floats) -> Interval:
    """Return the value with the draws' interval, shifted by the bias that resampling adds to a KL."""
    low, high = np.quantile(draws, [0.025, 0.975]) - draws.mean() + value
    return float(value), float(max(low, 0)), float(high)
