"""Statistics of logits: top-k, entropy, KL, rank, agreement.

The k largest of each row, where rows are as wide as a vocabulary.

How far one prediction is from another, row by row: tensors in, tensors out; knows no model.

What rows of logits say, in one sweep: tensors in, tensors out; knows no model.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from layerjump.models.model import Model

HEIGHT = 64
"""Elements of a column: a wide row is looked at as a table with so many rows."""
_WORTH = 4  # times k columns: below that the plain way is as fast


def top_k(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row, falling, and their indices, as `torch.topk` gives them.

    A plain `topk` keeps house for every element. Here one sweep finds the largest of every column, and only the k
    columns with the largest ones are looked into: the k largest elements cannot be anywhere else.
    """
    width = rows.shape[-1]
    n_columns = width // HEIGHT
    if n_columns < _WORTH * k:
        found = rows.topk(k)
        return found.values, found.indices
    table = rows[:, : n_columns * HEIGHT].unflatten(1, (HEIGHT, n_columns))
    columns = table.amax(1).topk(k, sorted=False).indices
    steps = torch.arange(0, n_columns * HEIGHT, n_columns, device=rows.device)
    inside = (columns[:, :, None] + steps).flatten(1)
    rest = torch.arange(n_columns * HEIGHT, width, device=rows.device).expand(len(rows), -1)
    candidates = torch.cat([inside, rest], 1)
    found = rows.gather(1, candidates).topk(k)
    return found.values, candidates.gather(1, found.indices)


KS = (1, 5, 10)
"""The k of Precision@k."""
ROWS = 32
"""Rows of logits that are compared at once."""


class ReferenceLogits(NamedTuple):
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


def reference_logits(logits: Tensor) -> ReferenceLogits:
    """Prepare the model's own logits for comparison."""
    best, _ = top_k(logits, min(max(KS), logits.shape[-1]))
    # Relative to the largest: logits that are all far from zero would lose digits of small differences.
    probabilities = (logits - best[:, :1]).exp_()
    total = probabilities.sum(-1)
    probabilities /= total[:, None]
    negative_entropy = -torch.special.entr(probabilities).sum(-1)
    return ReferenceLogits(logits, probabilities, total.log(), negative_entropy, best)


def agreement(logits: Tensor, true: ReferenceLogits) -> Agreement:
    """Hold an approximation's logits against the truth.

    One sweep each for the two best tokens, the normaliser and the expected logit, over few rows at a time: they stay
    in the processor's cache, and beside them the vocabulary product dominates. Ties count as hits, so that the truth
    agrees with itself whatever order ties come in.
    """
    slices = [slice(start, start + ROWS) for start in range(0, len(logits), ROWS)]
    parts = [
        _agreement(logits[rows], ReferenceLogits(*(each[rows] for each in true))) for rows in slices
    ]
    return Agreement(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _agreement(logits: Tensor, true: ReferenceLogits) -> Agreement:
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


ROWS_AT_ONCE = 16
"""Rows that are read at once."""


class LogitStats(NamedTuple):
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


class LogitSweep:
    """Reads rows of logits beside the truth's rows, few at a time so that they stay in the processor's cache.

    `targets` is a token for each row, −1 for none; `follow` lists tokens whose probability and rank are wanted. The
    memory it works in is kept from call to call: fresh memory costs more than the arithmetic.
    """

    def __init__(
        self, true: ReferenceLogits, *, k: int, targets: Tensor, follow: Tensor, js: bool = False
    ) -> None:
        self._true, self._k, self._js = true, k, js
        self._targets, self._follow = targets, follow
        rows, width = true.logits.shape
        self._scratch = (
            torch.empty_like(true.logits[:1]).expand(2, min(rows, ROWS_AT_ONCE), width).clone()
        )

    @torch.no_grad()
    def __call__(self, logits: Tensor) -> LogitStats:
        """What the rows say; there are as many as the truth has."""
        parts = [self._read(logits, start) for start in range(0, len(logits), ROWS_AT_ONCE)]
        return LogitStats(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _read(self, logits: Tensor, start: int) -> LogitStats:
        rows = slice(start, min(start + ROWS_AT_ONCE, len(logits)))
        logits, true = logits[rows], ReferenceLogits(*(each[rows] for each in self._true))
        shifted, other = self._scratch[:, : len(logits)]
        values, top = top_k(logits, min(max(self._k, 2), logits.shape[-1]))
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
        return LogitStats(
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


def _jensen_shannon(probabilities: Tensor, entropy: Tensor, true: ReferenceLogits) -> Tensor:
    """The entropy of the two distributions' mean, less the mean of their entropies: 0 to ln 2, symmetric."""
    between = torch.special.entr((probabilities + true.probabilities) / 2).sum(-1)
    return (between - (entropy - true.negative_entropy) / 2).clamp(0, math.log(2))


LOGITS_MEMORY = 1 << 30
"""Bytes that rows of logits may take at once, for any vocabulary size."""
_BUFFERS = 5  # (rows, vocab_size) tensors alive at once: two of the reference, up to three of an approximation
_MAX_ROWS = 512  # larger matrix products are no faster
_MIN_ITEMSIZE = 4  # bytes: half-precision logits are upcast


def chunk_rows(model: Model, memory: int = LOGITS_MEMORY) -> int:
    """How many rows of the model's logits, and of the buffers to compare them, fit in `memory` bytes."""
    itemsize = max(_MIN_ITEMSIZE, model.hf.dtype.itemsize)
    return max(1, min(_MAX_ROWS, memory // (_BUFFERS * model.structure.vocab_size * itemsize)))


def upcast(logits: Tensor) -> Tensor:
    """Logits in float32, or in float64 if they are."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
