"""How far one prediction is from another, row by row: tensors in, tensors out; knows no model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from layerjump.measure.largest import largest

KS = (1, 5, 10)
"""The k of Precision@k."""
ROWS = 32
"""Rows of logits that are compared at once."""


class Truth(NamedTuple):
    """A distribution over tokens that others are held against: the model's own."""

    logits: Tensor  # (rows, vocabulary)
    probabilities: Tensor
    log_total: Tensor  # (rows,) log Σ exp of the logits less the largest
    negative_entropy: Tensor  # (rows,) Σ p ln p
    best: Tensor  # (rows, 10) the largest logits, falling


class Agreement(NamedTuple):
    """How an approximation agrees with the truth; every field is (rows,)."""

    top: Tensor
    """Its best token."""
    place: Tensor
    """How many of the truth's ten best are better than that token: below k is a hit at k."""
    surprisal: Tensor
    """−ln p_true of its best token."""
    kl: Tensor
    """KL(true ‖ approximation), nats."""
    confidence: Tensor
    """Its best probability minus its second best."""


def truth(logits: Tensor) -> Truth:
    """Prepare the model's own logits for comparison."""
    best, _ = largest(logits, min(max(KS), logits.shape[-1]))
    # Relative to the largest: logits that are all far from zero would lose digits of small differences.
    probabilities = (logits - best[:, :1]).exp_()
    total = probabilities.sum(-1)
    probabilities /= total[:, None]
    negative_entropy = -torch.special.entr(probabilities).sum(-1)
    return Truth(logits, probabilities, total.log(), negative_entropy, best)


def agreement(logits: Tensor, true: Truth) -> Agreement:
    """Hold an approximation's logits against the truth.

    One sweep each for the two best tokens, the normaliser and the expected logit, over few rows at a time: they stay
    in the processor's cache, and beside them the vocabulary product dominates. Ties count as hits, so that the truth
    agrees with itself whatever order ties come in.
    """
    slices = [slice(start, start + ROWS) for start in range(0, len(logits), ROWS)]
    parts = [_agreement(logits[rows], Truth(*(each[rows] for each in true))) for rows in slices]
    return Agreement(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _agreement(logits: Tensor, true: Truth) -> Agreement:
    two = logits.topk(2)
    top, largest = two.indices[:, 0], two.values[:, :1]
    shifted = logits - largest
    expected = torch.linalg.vecdot(true.probabilities, shifted)
    log_total = shifted.exp_().sum(-1).log_()
    own = (two.values - largest - log_total[:, None]).exp()
    true_logit = true.logits.gather(1, top[:, None])
    return Agreement(
        top=top,
        place=(true.best > true_logit).sum(-1),
        surprisal=true.log_total + (true.best[:, :1] - true_logit)[:, 0],
        # Rounding may leave a perfect agreement a hair below zero.
        kl=(true.negative_entropy - expected + log_total).clamp_min(0),
        confidence=own[:, 0] - own[:, 1],
    )
