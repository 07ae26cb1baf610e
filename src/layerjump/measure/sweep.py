"""What rows of logits say, in one sweep: tensors in, tensors out; knows no model."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from layerjump.measure.largest import largest
from layerjump.measure.metrics import Truth

ROWS = 16
"""Rows that are read at once."""


class Said(NamedTuple):
    """What each row says, held against the truth; all numbers in nats or as probabilities."""

    top: Tensor
    """(rows, k) its best tokens, the best first."""
    probability: Tensor
    """(rows, k) theirs."""
    confidence: Tensor
    """(rows,) the best probability minus the second best."""
    entropy: Tensor
    """(rows,)"""
    kl: Tensor
    """(rows,) KL(truth ‖ row)."""
    cross_entropy: Tensor
    """(rows,) −ln p of the row's target; NaN where it has none."""
    followed: Tensor
    """(rows, tokens followed) their probabilities."""
    rank: Tensor
    """(rows, tokens followed) how many tokens are better."""
    js: Tensor
    """(rows,) the Jensen–Shannon divergence from the truth; NaN unless asked for."""


class Sweep:
    """Reads rows of logits beside the truth's rows, few at a time so that they stay in the processor's cache.

    `targets` is a token for each row, −1 for none; `follow` lists tokens whose probability and rank are wanted. The
    memory it works in is kept from call to call: fresh memory costs more than the arithmetic.
    """

    def __init__(
        self, true: Truth, *, k: int, targets: Tensor, follow: Tensor, js: bool = False
    ) -> None:
        self._true, self._k, self._js = true, k, js
        self._targets, self._follow = targets, follow
        rows, width = true.logits.shape
        self._scratch = torch.empty_like(true.logits[:1]).expand(2, min(rows, ROWS), width).clone()

    @torch.no_grad()
    def __call__(self, logits: Tensor) -> Said:
        """What the rows say; there are as many as the truth has."""
        parts = [self._read(logits, start) for start in range(0, len(logits), ROWS)]
        return Said(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _read(self, logits: Tensor, start: int) -> Said:
        rows = slice(start, min(start + ROWS, len(logits)))
        logits, true = logits[rows], Truth(*(each[rows] for each in self._true))
        shifted, other = self._scratch[:, : len(logits)]
        values, top = largest(logits, min(max(self._k, 2), logits.shape[-1]))
        # Relative to the largest: logits that are all far from zero would lose digits of small differences.
        torch.sub(logits, values[:, :1], out=shifted)
        expected = torch.mul(true.probabilities, shifted, out=other).sum(-1)
        targets = self._targets[rows]
        known = shifted.gather(1, targets.clamp_min(0)[:, None])[:, 0]
        mine = shifted[:, self._follow]
        rank = _rank(shifted, mine)
        total = torch.exp(shifted, out=other).sum(-1)
        log_total = total.log()
        entropy = log_total - shifted.mul_(other).sum(-1) / total
        best = (values - values[:, :1] - log_total[:, None]).exp()
        return Said(
            top=top[:, : self._k],
            probability=best[:, : self._k],
            confidence=best[:, 0] - best[:, 1],
            entropy=entropy.clamp_min(0),
            # Rounding may leave a perfect agreement a hair below zero.
            kl=(true.negative_entropy - expected + log_total).clamp_min(0),
            cross_entropy=torch.where(targets < 0, math.nan, log_total - known),
            followed=(mine - log_total[:, None]).exp(),
            rank=rank,
            js=_jensen_shannon(other / total[:, None], entropy, true)
            if self._js
            else torch.full_like(entropy, math.nan),
        )


def _rank(logits: Tensor, mine: Tensor) -> Tensor:
    """How many logits of each row are larger than each of some."""
    better = [(logits > each[:, None]).sum(-1) for each in mine.unbind(1)]
    return torch.stack(better, 1) if better else mine.long()


def _jensen_shannon(probabilities: Tensor, entropy: Tensor, true: Truth) -> Tensor:
    """The entropy of the two distributions' mean, less the mean of their entropies: 0 to ln 2, symmetric."""
    between = torch.special.entr((probabilities + true.probabilities) / 2).sum(-1)
    return (between - (entropy - true.negative_entropy) / 2).clamp(0, math.log(2))
