"""One number a level by which a map onto `final` is multiplied, so that its predictions are as sure as they should be.

Least squares minimises the error of a state, not of the distribution that the head makes of it, and is a little or, in
the first levels of a masked model, far too sure. KL(model ‖ lens) on held-out states is convex in the factor (without a
soft-cap), and needs one vocabulary product of few rows a level.
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


class Temperature:
    """Finds the factor of one map after another, on the same held-out rows of the same model."""

    def __init__(self, model: Model, rows: Mapping[Site, Tensor]) -> None:
        self._anatomy = model.anatomy
        self._like = model.anatomy.head.get_parameter("weight")
        most = max(1, min(ROWS, CELLS // model.anatomy.vocabulary))
        self._rows = {site: states[:most] for site, states in rows.items()}
        # What the head adds to nothing: a factor is of the state, not of the head's bias.
        self._bias = self._product(self._like.new_zeros(1, self._like.shape[1]))
        self._own = self._logits(self._product(self._rows[FINAL])).softmax(-1) if rows else None

    @torch.no_grad()
    def of(self, site: Site, made: Affine, kind: FeatureKind) -> float:
        """The factor that lowers KL on the held-out rows the most; 1 where it does not do so beyond noise."""
        if self._own is None or len(self._own) < FEWEST:
            return 1.0
        read = features(self._rows[site], kind)
        guess = self._product(made(read.double())) - self._bias
        low, high = RANGE
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        at = {factor: self._losses(guess, factor) for factor in (left, right)}
        for _ in range(LOOKS - 2):
            if at[left].mean() < at[right].mean():
                high, right = right, left
                left = high - _GOLDEN * (high - low)
                at[left] = self._losses(guess, left)
            else:
                low, left = left, right
                right = low + _GOLDEN * (high - low)
                at[right] = self._losses(guess, right)
        best = min(at, key=lambda factor: float(at[factor].mean()))
        gain = self._losses(guess, 1.0) - at[best]
        return best if gain.mean() > BEYOND * gain.std() / len(gain) ** 0.5 else 1.0

    def _losses(self, guess: Tensor, factor: float) -> Tensor:
        """KL of every row, but for what does not depend on the factor."""
        assert self._own is not None
        logits = self._logits(self._bias + factor * guess)
        return (logits.logsumexp(-1) - (self._own * logits).sum(-1)).double()

    def _product(self, final: Tensor) -> Tensor:
        return self._anatomy.head(final.to(self._like)).detach()

    def _logits(self, product: Tensor) -> Tensor:
        return self._anatomy.from_product(product).float()
