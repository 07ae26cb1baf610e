"""What maps are worth to predictions: KL(model ‖ lens) on held-out states.

Least squares minimises the error of a state, not of the distribution that the head makes of it. Two choices are made by
KL instead. A map onto `final` is multiplied by one number, a temperature: it is a little or, in the first levels of a
masked model, far too sure (KL is convex in the factor, without a soft-cap). And in the last levels a map onto level L,
read through the model's own norm, may be better than one onto `final`, which stands in for that norm too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from layerjump.fit.affine import Affine
from layerjump.fit.modules import FeatureKind, features
from layerjump.inputs.models import Model
from layerjump.inputs.sites import FINAL, Site

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
        self._anatomy = model.anatomy
        self._like = model.anatomy.head.get_parameter("weight")
        most = max(1, min(ROWS, CELLS // model.anatomy.vocabulary))
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
        final = landed if target == FINAL else self._anatomy.to_final(landed)
        return float(self._losses(self._product(final)).mean())

    def _mapped(self, site: Site, made: Affine, kind: FeatureKind) -> Tensor:
        return made(features(self._rows[site], kind).double())

    def _losses(self, product: Tensor) -> Tensor:
        """KL of every row, but for the model's own entropy."""
        assert self._own is not None
        logits = self._logits(product)
        return (logits.logsumexp(-1) - (self._own * logits).sum(-1)).double()

    def _product(self, final: Tensor) -> Tensor:
        return self._anatomy.head(final.to(self._like)).detach()

    def _logits(self, product: Tensor) -> Tensor:
        return self._anatomy.from_product(product).float()
