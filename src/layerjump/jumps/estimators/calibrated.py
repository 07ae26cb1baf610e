"""Ridge regression onto the state after the final norm, with a temperature chosen by held-out KL (`calibrated`).

Least squares shrinks uncertain predictions towards the mean. After a map to level L the final norm rescales them to
full length, so the lens is over-confident. A map onto the post-norm state (`final`) keeps the shrinkage, and the
unembedding alone decodes it.

Least squares minimises the error of a state, not of the distribution that the unembedding makes of it. Two choices are
made by KL(model ‖ lens) on held-out states instead. A map onto `final` is multiplied by one number, an inverse
temperature: it is a little, or in the first levels of a masked model far too confident (KL is convex in the factor,
without a soft-cap). And in the last levels a map to level L, decoded through the model's own norm, may be better than
one onto `final`, which replaces that norm too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from layerjump.errors import BadEstimator
from layerjump.jumps.estimators.least_squares import (
    STRENGTHS,
    descend_strengths,
    factorise_centred,
    ridge,
    strength_unit,
)
from layerjump.jumps.estimators.registry import EstimatorSettings
from layerjump.jumps.maps import FEATURES, Affine, FeatureKind, SolvedMap, compute_features
from layerjump.jumps.moments import Moments, Source, Target, check_moments
from layerjump.models.model import Model
from layerjump.models.sites import FINAL, Pair, Site
from layerjump.models.weight_forms import module_weight

if TYPE_CHECKING:
    from layerjump.jumps.moments_of_splits import SplitMoments

MAX_ROWS = 256
"""Held-out states on which KL is measured."""
MAX_LOGITS = 2**25
"""Logits held at once: fewer rows where a vocabulary is very large."""
MIN_ROWS = 32
"""With fewer rows KL is too noisy to choose by."""
MAX_COLUMNS = 256
"""Columns of a target of which the error is measured to choose a strength: all of them up to this width."""
TEMPERATURE_RANGE = (0.2, 1.3)
SEARCH_STEPS = 8
"""Golden-section search: the factor is then known to a few hundredths, where KL is flat."""
MIN_GAIN = 2.0
"""Standard errors by which KL must fall."""
_GOLDEN = (5**0.5 - 1) / 2


def solve_calibrated(moments: SplitMoments, settings: EstimatorSettings, model: Model | None) -> Iterator[SolvedMap]:
    """Yield every level's map onto `final` at its best temperature, or the one to level L where its KL is lower."""
    if model is None:
        raise BadEstimator(
            "calibrated compares predictions with the model's own; pass the model that these moments come from"
        )
    judge = HeldOutKL(model, moments.validation.reservoir.states)
    last, pairs = Site(model.n_blocks), moments.fit.pairs
    for source in moments.fit.sources:
        jump, features = fit_calibrated(moments.fit, moments.validation, (source, FINAL))
        factor = judge.best_factor(source, jump, features)
        solutions = [SolvedMap((source, FINAL), jump.times(factor), features, factor)]
        if (source, last) in pairs and judge.has_enough_rows:
            pair = (source, last)
            solutions.append(SolvedMap(pair, *fit_calibrated(moments.fit, moments.validation, pair)))
            if not settings.keep_both_targets:
                solutions = [min(solutions, key=judge.mean_loss)]
        yield from solutions


def fit_calibrated(fit: Moments, validation: Moments, pair: Pair) -> tuple[Affine, FeatureKind]:
    """Return the pair's ridge map, and the features it reads: those of least error on the validation split."""
    whole = fit.source(pair[0]), fit.target(*pair)
    held_out = validation.source(pair[0]), validation.target(*pair)
    check_moments(whole[0], [whole[1]])
    check_moments(held_out[0], [held_out[1]])
    chosen: dict[FeatureKind, tuple[float, int]] = {}  # least error, and the index of its strength
    start: int | None = None  # strengths of different features are similar
    # Moments of both features hold each alone as well.
    for features in FEATURES if fit.features == "both" else (fit.features,):
        error = ValidationError(
            *fit.select_features(*whole, features), *validation.select_features(*held_out, features)
        )
        start = descend_strengths(error, start)
        chosen[features] = error(STRENGTHS[start]), start
    best = min(chosen, key=lambda features: chosen[features][0])
    source, target = fit.select_features(*whole, best)
    (jump,) = ridge(source, [target], strength=STRENGTHS[chosen[best][1]])
    return jump, best


class ValidationError:
    """The squared error of a pair's ridge map on the validation split, less a constant, by strength.

    Each strength takes one Cholesky factorisation, which on large matrices is many times faster than the
    eigendecomposition that serves all strengths (`choose_strengths`). A wide target is first projected onto
    `MAX_COLUMNS` random directions: errors keep their order up to a few per cent of noise.
    """

    def __init__(self, source: Source, target: Target, held_source: Source, held_target: Target) -> None:
        self._source, self._held = source, held_source
        # The map passes through the fit split's means, so the held-out moments are taken about those.
        self._shift = held_source.mean - source.mean
        cross = torch.outer(self._shift, held_target.mean - target.mean)
        cross *= held_source.n
        cross += held_target.cross
        self._cross, self._held_cross = target.cross, cross
        if cross.shape[1] > MAX_COLUMNS:
            generator = torch.Generator().manual_seed(0)
            columns = torch.randn(cross.shape[1], MAX_COLUMNS, generator=generator, dtype=cross.dtype).to(cross.device)
            self._cross, self._held_cross = self._cross @ columns, cross @ columns
        self._errors: dict[float, float] = {}

    def __call__(self, strength: float) -> float:
        if strength not in self._errors:
            factor = factorise_centred(self._source, penalty=strength * strength_unit(self._source))
            weight = factor.solve(self._cross)
            del factor
            predicted = self._held.scatter @ weight
            predicted += self._held.n * torch.outer(self._shift, self._shift @ weight)
            predicted -= 2 * self._held_cross
            self._errors[strength] = float((predicted * weight).sum())
        return self._errors[strength]


class HeldOutKL:
    """KL(model ‖ lens) of one map after another, on the same held-out states of the same model."""

    def __init__(self, model: Model, states: Mapping[Site, Tensor]) -> None:
        self._structure = model.structure
        self._weight = module_weight(model.structure.unembedding)
        n_rows = max(1, min(MAX_ROWS, MAX_LOGITS // model.structure.vocab_size))
        self._states = {site: rows[:n_rows] for site, rows in states.items()}
        # The unembedding of zero: the factor scales the state, not the unembedding's bias.
        self._bias = self._unembed(self._weight.new_zeros(1, self._weight.shape[1]))
        self._model_probabilities = self._logits(self._unembed(self._states[FINAL])).softmax(-1) if states else None

    @property
    def has_enough_rows(self) -> bool:
        """Whether there are enough held-out states to choose by."""
        return self._model_probabilities is not None and len(self._model_probabilities) >= MIN_ROWS

    @torch.no_grad()
    def best_factor(self, site: Site, jump: Affine, features: FeatureKind) -> float:
        """Return the factor of least KL for a map onto `final`; 1 where KL does not fall by more than noise."""
        if not self.has_enough_rows:
            return 1.0
        unembedded = self._unembed(self._apply(site, jump, features)) - self._bias
        low, high = TEMPERATURE_RANGE
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        losses = {factor: self._losses(self._bias + factor * unembedded) for factor in (left, right)}
        for _ in range(SEARCH_STEPS - 2):
            if losses[left].mean() < losses[right].mean():
                high, right = right, left
                left = high - _GOLDEN * (high - low)
                losses[left] = self._losses(self._bias + left * unembedded)
            else:
                low, left = left, right
                right = low + _GOLDEN * (high - low)
                losses[right] = self._losses(self._bias + right * unembedded)
        best = min(losses, key=lambda factor: float(losses[factor].mean()))
        gain = self._losses(self._bias + unembedded) - losses[best]
        return best if gain.mean() > MIN_GAIN * gain.std() / len(gain) ** 0.5 else 1.0

    @torch.no_grad()
    def mean_loss(self, solution: SolvedMap) -> float:
        """Return the mean KL of a map to level L or `final`, up to the model's entropy."""
        source, target = solution.pair
        states = self._apply(source, solution.jump, solution.features).to(self._weight)
        final = states if target == FINAL else self._structure.to_final(states)
        return float(self._losses(self._unembed(final)).mean())

    def _apply(self, site: Site, jump: Affine, features: FeatureKind) -> Tensor:
        states = self._states[site].to(jump.weight.device)  # those of a reservoir are on the CPU
        return jump(compute_features(states, features).double())

    def _losses(self, unembedded: Tensor) -> Tensor:
        """KL of every row, up to the model's entropy."""
        assert self._model_probabilities is not None
        logits = self._logits(unembedded)
        return (logits.logsumexp(-1) - (self._model_probabilities * logits).sum(-1)).double()

    def _unembed(self, final: Tensor) -> Tensor:
        return self._structure.unembedding(final.to(self._weight)).detach()

    def _logits(self, unembedded: Tensor) -> Tensor:
        return self._structure.adjust_logits(unembedded).float()
