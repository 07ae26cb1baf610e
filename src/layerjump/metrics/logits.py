"""Statistics of logits, row by row: top-k, top-2 gap, entropy, KL, Jensen–Shannon, rank, agreement, calibration.

All functions take tensors with one row of logits for each position, (rows, vocab_size). One kernel, `LogitComparison`,
reads every row in few passes and few rows at a time, so that they stay in the processor's cache: next to it, the
unembedding dominates.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from layerjump.metrics.bootstrap import Floats
from layerjump.models.model import Model

KS = (1, 5, 10)
"""The k of Precision@k."""
KERNEL_ROWS = 16
"""Rows that the kernel reads at once."""
LOGITS_MEMORY = 1 << 30
"""Bytes that rows of logits may take at once, for any vocabulary size."""
_BUFFERS = 5  # (rows, vocab_size) tensors alive at once: two of the reference, up to three of an approximation
_MAX_ROWS = 512  # larger matrix products are no faster
_MIN_ITEMSIZE = 4  # bytes: half-precision logits are upcast
_COLUMN = 64  # elements of a column, where `top_k` reads a row as a table
_MIN_COLUMNS = 4  # times k: for fewer columns, torch.topk is as fast


def chunk_rows(model: Model, memory: int = LOGITS_MEMORY) -> int:
    """How many rows of the model's logits, and of the buffers to compare them, fit in `memory` bytes."""
    itemsize = max(_MIN_ITEMSIZE, model.dtype.itemsize)
    return max(1, min(_MAX_ROWS, memory // (_BUFFERS * model.structure.vocab_size * itemsize)))


def chunks(n_rows: int, size: int) -> list[slice]:
    """Slices of at most `size` rows that together cover `n_rows`."""
    return [slice(start, min(start + size, n_rows)) for start in range(0, n_rows, size)]


def upcast(tensor: Tensor) -> Tensor:
    """A tensor in float32, or in float64 if it is."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def top_k(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row, descending, and their indices, as `torch.topk` returns them.

    `torch.topk` does bookkeeping for every element. Here one pass finds the largest element of each column of a table,
    and only the k columns with the largest ones are searched: the k largest elements cannot be anywhere else.
    """
    width = rows.shape[-1]
    n_columns = width // _COLUMN
    if n_columns < _MIN_COLUMNS * k:
        plain = rows.topk(k)
        return plain.values, plain.indices
    table = rows[:, : n_columns * _COLUMN].unflatten(1, (_COLUMN, n_columns))
    columns = table.amax(1).topk(k, sorted=False).indices
    steps = torch.arange(0, n_columns * _COLUMN, n_columns, device=rows.device)
    in_columns = (columns[:, :, None] + steps).flatten(1)
    rest = torch.arange(n_columns * _COLUMN, width, device=rows.device).expand(len(rows), -1)
    candidates = torch.cat([in_columns, rest], 1)
    best = rows.gather(1, candidates).topk(k)
    return best.values, candidates.gather(1, best.indices)


def top_two(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The two best tokens of each row and their probabilities, both (rows, 2)."""
    two = logits.topk(2)
    return two.indices, (two.values - logits.logsumexp(-1, keepdim=True)).exp()


class ReferenceLogits(NamedTuple):
    """The distributions over tokens, usually the model's own, that others are compared with."""

    logits: Tensor
    """(rows, vocab_size)"""
    probabilities: Tensor
    """(rows, vocab_size)"""
    log_total: Tensor
    """(rows,) log Σ exp of the logits minus the largest."""
    negative_entropy: Tensor
    """(rows,) Σ p ln p."""
    best: Tensor
    """(rows, 10) the largest logits, descending."""


def reference_logits(logits: Tensor) -> ReferenceLogits:
    """Prepare logits for comparison with others."""
    best, _ = top_k(logits, min(max(KS), logits.shape[-1]))
    # Relative to the largest: logits that are all far from zero would lose digits of small differences.
    probabilities = (logits - best[:, :1]).exp_()
    total = probabilities.sum(-1)
    probabilities /= total[:, None]
    negative_entropy = -torch.special.entr(probabilities).sum(-1)
    return ReferenceLogits(logits, probabilities, total.log(), negative_entropy, best)


class Agreement(NamedTuple):
    """How rows of logits agree with the reference; every field is (rows,)."""

    top: Tensor
    """The best token."""
    rank: Tensor
    """How many of the reference's ten best tokens are better than that token: fewer than k is a hit at k."""
    surprisal: Tensor
    """−ln of the reference's probability of that token."""
    kl: Tensor
    """KL(reference ‖ row), in nats."""
    confidence: Tensor
    """The best probability minus the second best."""


def agreement(logits: Tensor, reference: ReferenceLogits) -> Agreement:
    """Compare logits with the reference.

    Ties count as hits, so that the reference agrees with itself in whatever order ties come.
    """
    stats = LogitComparison(reference)(logits)
    return Agreement(stats.top[:, 0], stats.reference_rank, stats.surprisal, stats.kl, stats.confidence)


class LogitStats(NamedTuple):
    """Statistics of rows of logits, in nats or as probabilities, and their distance from the reference.

    Those that a comparison was not asked for are NaN, or have no columns.
    """

    top: Tensor
    """(rows, k) the best tokens, the best first."""
    probability: Tensor
    """(rows, k) the probabilities of the best tokens."""
    confidence: Tensor
    """(rows,) the best probability minus the second best."""
    reference_rank: Tensor
    """(rows,) how many of the reference's ten best tokens are better than the best token."""
    surprisal: Tensor
    """(rows,) −ln of the reference's probability of the best token."""
    kl: Tensor
    """(rows,) KL(reference ‖ row)."""
    entropy: Tensor
    """(rows,)"""
    cross_entropy: Tensor
    """(rows,) −ln p of the row's target; NaN where it has none."""
    tracked: Tensor
    """(rows, tracked tokens) the probabilities of the tracked tokens."""
    rank: Tensor
    """(rows, tracked tokens) how many tokens are better than each."""
    jensen_shannon: Tensor
    """(rows,) the Jensen–Shannon divergence from the reference."""


class LogitComparison:
    """Compares rows of logits with the rows of a reference, any number of times.

    `targets` is a token for each row, −1 for none; `tracked` lists tokens whose probability and rank are wanted.
    Scratch memory is kept from call to call: fresh memory costs more than the arithmetic.
    """

    def __init__(
        self,
        reference: ReferenceLogits,
        *,
        k: int = 1,
        entropy: bool = False,
        targets: Tensor | None = None,
        tracked: Tensor | None = None,
        jensen_shannon: bool = False,
    ) -> None:
        self._reference, self._k = reference, k
        self._entropy, self._jensen_shannon = entropy, jensen_shannon
        self._targets, self._tracked = targets, tracked
        n_rows, width = reference.logits.shape
        self._scratch = reference.logits.new_empty(2, min(n_rows, KERNEL_ROWS), width)

    @torch.no_grad()
    def __call__(self, logits: Tensor) -> LogitStats:
        """The statistics of as many rows as the reference has; the logits are left as they are."""
        parts = [self._read(logits, rows) for rows in chunks(len(logits), KERNEL_ROWS)]
        return LogitStats(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _read(self, logits: Tensor, rows: slice) -> LogitStats:
        logits = logits[rows]
        reference = ReferenceLogits(*(column[rows] for column in self._reference))
        shifted, other = self._scratch[:, : len(logits)]
        values, top = top_k(logits, min(max(self._k, 2), logits.shape[-1]))
        # Relative to the largest: logits that are all far from zero would lose digits of small differences.
        torch.sub(logits, values[:, :1], out=shifted)
        expected = torch.linalg.vecdot(reference.probabilities, shifted)
        nothing = torch.full_like(expected, math.nan)
        target_logit = nothing
        if self._targets is not None:
            targets = self._targets[rows]
            target_logit = shifted.gather(1, targets.clamp_min(0)[:, None])[:, 0]
            target_logit = torch.where(targets < 0, math.nan, target_logit)
        tracked = shifted[:, :0] if self._tracked is None else shifted[:, self._tracked]
        larger = [(shifted > column[:, None]).sum(-1) for column in tracked.unbind(1)]
        rank = torch.stack(larger, 1) if larger else tracked.long()
        keeps_shifted = self._entropy or self._jensen_shannon
        exponentials = torch.exp(shifted, out=other if keeps_shifted else shifted)
        total = exponentials.sum(-1)
        log_total = total.log()
        entropy = jensen_shannon = nothing
        if keeps_shifted:
            entropy = log_total - shifted.mul_(exponentials).sum(-1) / total
        if self._jensen_shannon:
            # The entropy of the mean of two distributions minus the mean of their entropies: 0 to ln 2, symmetric.
            mean = (exponentials / total[:, None] + reference.probabilities) / 2
            mean_entropy = (entropy - reference.negative_entropy) / 2
            jensen_shannon = (torch.special.entr(mean).sum(-1) - mean_entropy).clamp(0, math.log(2))
        best = (values - values[:, :1] - log_total[:, None]).exp()
        reference_logit = reference.logits.gather(1, top[:, :1])
        return LogitStats(
            top=top[:, : self._k],
            probability=best[:, : self._k],
            confidence=best[:, 0] - best[:, 1],
            reference_rank=(reference.best > reference_logit).sum(-1),
            surprisal=reference.log_total + (reference.best[:, :1] - reference_logit)[:, 0],
            # Rounding may leave a perfect agreement slightly below zero.
            kl=(reference.negative_entropy - expected + log_total).clamp_min(0),
            entropy=entropy.clamp_min(0),
            cross_entropy=log_total - target_logit,
            tracked=(tracked - log_total[:, None]).exp(),
            rank=rank,
            jensen_shannon=jensen_shannon,
        )


BINS = 10


def calibration_error(
    probability: ArrayLike, hit: ArrayLike, weight: ArrayLike | None = None, *, bins: int = BINS
) -> Floats:
    """Expected calibration error over the last axis: the distance of probabilities from hit rates.

    Σ_b |Σ_{i in b} w_i (hit_i − p_i)| / Σ w_i, with bins b of equal width. The weights, one for each
    example, are those of a bootstrap draw.
    """
    probability = np.asarray(probability, dtype=np.float64)
    n = probability.shape[-1]
    weight = np.ones(n) if weight is None else np.asarray(weight, dtype=np.float64)
    short = weight * (np.asarray(hit, dtype=np.float64) - probability)
    rows = short.reshape(-1, n)
    # A probability of 1 belongs to the last bin.
    of = np.minimum((probability.reshape(-1, n) * bins).astype(np.int64), bins - 1)
    cells = of + bins * np.arange(len(rows))[:, None]
    sums = np.bincount(cells.ravel(), rows.ravel(), minlength=bins * len(rows))
    total = np.abs(sums.reshape(len(rows), bins)).sum(1) / weight.sum()
    return total.reshape(probability.shape[:-1])


def marginal_kl(true: Tensor, other: Tensor) -> Tensor:
    """KL between the mean distributions of two predictors, in nats: the bias of the tuned-lens paper.

    `true` and `other` are (…, vocabulary): sums or means of probabilities over the same positions, the reference first.
    An unbiased lens may still be wrong everywhere.
    """
    p, q = (rows.double() / rows.double().sum(-1, keepdim=True) for rows in (true, other))
    return (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum(-1).clamp_min(0)
