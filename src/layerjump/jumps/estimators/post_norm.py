"""Ridge regression onto the post-norm state, with a temperature chosen by held-out KL (`calibrated`).

What maps are worth to predictions: KL(model ‖ lens) on held-out states.

Least squares minimises the error of a state, not of the distribution that the head makes of it. Two choices are made by
KL instead. A map onto `final` is multiplied by one number, a temperature: it is a little or, in the first levels of a
masked model, far too sure (KL is convex in the factor, without a soft-cap). And in the last levels a map onto level L,
read through the model's own norm, may be better than one onto `final`, which stands in for that norm too.

The map that lands after the final norm: a lens that is calibrated, in closed form.

Least squares answers an uncertain state with something close to the mean: it shrinks. A map onto level L is followed by
the final norm, which blows that short answer up to full length, and the lens is over-confident. A map onto the state
after the norm keeps the shrinkage, and the head alone decodes it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from layerjump.jumps.estimators.least_squares import ridge
from layerjump.jumps.maps import FEATURES, Affine, FeatureKind, compute_features
from layerjump.jumps.pairs import Pair
from layerjump.jumps.scoring import residual
from layerjump.jumps.statistics import Moments, Source, Target
from layerjump.models.model import Model
from layerjump.models.structure import FINAL, Site

ROWS = 256
"""Held-out states that are looked at."""
CELLS = 2**25
"""Logits that are held at once: fewer rows where a vocabulary is very large."""
FEWEST = 32
"""With fewer rows there is no telling."""
RANGE = (0.2, 1.3)
LOOKS = 8
"""Golden section: the factor is known to a few hundredths then, and KL is flat there."""
BEYOND = 2.0
"""Standard errors by which KL must fall."""
_GOLDEN = (5**0.5 - 1) / 2


class Judge:
    """Judges one map after another, on the same held-out rows of the same model."""

    def __init__(self, model: Model, rows: Mapping[Site, Tensor]) -> None:
        self._spectrum = model.structure
        self._like = model.structure.unembedding.get_parameter("weight")
        most = max(1, min(ROWS, CELLS // model.structure.vocab_size))
        self._rows = {site: states[:most] for site, states in rows.items()}
        # What the head adds to nothing: a factor is of the state, not of the head's bias.
        self._bias = self._product(self._like.new_zeros(1, self._like.shape[1]))
        self._own = self._logits(self._product(self._rows[FINAL])).softmax(-1) if rows else None

    @property
    def enough(self) -> bool:
        """Whether there are rows enough to go by."""
        return self._own is not None and len(self._own) >= FEWEST

    @torch.no_grad()
    def factor(self, site: Site, made: Affine, kind: FeatureKind) -> float:
        """By what to multiply a map onto `final` for the least KL; 1 where that does not fall beyond noise."""
        if not self.enough:
            return 1.0
        guess = self._product(self._mapped(site, made, kind)) - self._bias
        low, high = RANGE
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        at = {factor: self._losses(self._bias + factor * guess) for factor in (left, right)}
        for _ in range(LOOKS - 2):
            if at[left].mean() < at[right].mean():
                high, right = right, left
                left = high - _GOLDEN * (high - low)
                at[left] = self._losses(self._bias + left * guess)
            else:
                low, left = left, right
                right = low + _GOLDEN * (high - low)
                at[right] = self._losses(self._bias + right * guess)
        best = min(at, key=lambda factor: float(at[factor].mean()))
        gain = self._losses(self._bias + guess) - at[best]
        return best if gain.mean() > BEYOND * gain.std() / len(gain) ** 0.5 else 1.0

    @torch.no_grad()
    def loss(self, site: Site, target: Site, made: Affine, kind: FeatureKind) -> float:
        """Mean KL of a map onto level L or `final`, but for what is the same for every map."""
        landed = self._mapped(site, made, kind).to(self._like)
        final = landed if target == FINAL else self._spectrum.to_final(landed)
        return float(self._losses(self._product(final)).mean())

    def _mapped(self, site: Site, made: Affine, kind: FeatureKind) -> Tensor:
        return made(compute_features(self._rows[site], kind).double())

    def _losses(self, product: Tensor) -> Tensor:
        """KL of every row, but for the model's own entropy."""
        assert self._own is not None
        logits = self._logits(product)
        return (logits.logsumexp(-1) - (self._own * logits).sum(-1)).double()

    def _product(self, final: Tensor) -> Tensor:
        return self._spectrum.unembedding(final.to(self._like)).detach()

    def _logits(self, product: Tensor) -> Tensor:
        return self._spectrum.adjust_logits(product).float()


def calibrated(fit: Moments, select: Moments, pair: Pair) -> tuple[Affine, FeatureKind]:
    """The pair's ridge map, and what it reads: the kind of features that errs least on the select split."""
    found = []
    for kind in kinds_in(fit):
        source, target = sides(fit, pair, kind)
        held = sides(select, pair, kind)
        (made,) = ridge(source, [target], select=(held[0], [held[1]]))
        found.append((float(residual(made, *held).sum()), kind, made))
    _, kind, made = min(found, key=lambda row: row[0])
    return made, kind


def kinds_in(sums: Moments) -> tuple[FeatureKind, ...]:
    """The kinds of features that sums hold: those of both hold each alone as well."""
    return FEATURES if sums.features == "both" else (sums.features,)


def sides(sums: Moments, pair: Pair, kind: FeatureKind) -> tuple[Source, Target]:
    """A pair's sums, of one kind of features."""
    source, target = sums.source(pair[0]), sums.target(*pair)
    if kind == sums.features:
        return source, target
    width = len(source.mean) // 2
    part = slice(0, width) if kind == "raw" else slice(width, None)
    return (
        Source(source.n, source.mean[part], source.scatter[part, part]),
        Target(target.mean, target.cross[part], target.spread, target.scatter),
    )
