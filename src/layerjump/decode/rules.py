"""Exit rules: at which level to stop. Here the rule of CALM (arXiv 2207.07061) as the authors of `mat` coded it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = 1.112
"""0.9 · 1.112 > 1: no confidence reaches it, so the whole model runs. Its negative always stops at level 1."""
GRID = (-NEVER, *(step / 10 for step in range(11)), NEVER)
"""The λ of the paper's curves."""
FINE = tuple(1 + 0.112 * step / 10 for step in range(1, 10))
"""Nine more λ between 1 and `NEVER`, which the authors use for identity."""


@dataclass(frozen=True)
class ConfidenceRule:
    """Stop at the first level, from 1 on, where the best probability leads the second best by enough.

    Enough is 0.9 λ + 0.1 exp(−τ t / N): strict at first, looser as the text goes on. `strict` compares with >, as the
    authors' code does; CALM's paper has ≥ and a threshold clipped to [0, 1].
    """

    strength: float
    """λ."""
    length: float
    """N: the mean of position + 1 over the scored examples in the authors' code, the longest output in CALM."""
    decay: float = 4.0
    """τ."""
    strict: bool = True
    clip: bool = False

    def threshold(self, position: Tensor) -> Tensor:
        """The lead asked for at 0-based positions t."""
        looser = torch.exp(-self.decay * position.double() / self.length)
        found = 0.9 * self.strength + 0.1 * looser
        return found.clamp(0, 1) if self.clip else found

    def levels(self, confidence: Tensor, position: Tensor) -> Tensor:
        """Where each example stops, from its confidence at every level: (levels, examples) → (examples,).

        Level 0 never stops; if no level below L is sure enough, the whole model runs.
        """
        enough = self.threshold(position)
        lead = confidence.double()
        sure = lead > enough if self.strict else lead >= enough
        sure[0] = False
        sure[-1] = True
        return sure.int().argmax(0)
