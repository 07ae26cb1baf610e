"""Per-token loss of a model on held-out text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from layerjump.data.batches import Batch
from layerjump.metrics.bootstrap import mean_interval
from layerjump.models.model import Model, capture_states

ROWS = 256
"""Positions that go through the unembedding at once."""


@dataclass(frozen=True, eq=False)
class TokenLosses:
    """The loss of every predicted token in nats, and its document."""

    each: Tensor
    document: Tensor

    @property
    def mean(self) -> float:
        return float(self.each.mean())

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean)

    def over(self, other: TokenLosses) -> tuple[float, float, float]:
        """The ratio of this perplexity to another on the same tokens, with its 95 % interval over documents."""
        interval = mean_interval((self.each - other.each).numpy(), self.document.numpy())
        ratio, low, high = (math.exp(float(value)) for value in interval)
        return ratio, low, high


def token_losses(
    model: Model, batches: Iterable[Batch], *, progress: Callable[[int], None] | None = None
) -> TokenLosses:
    """The loss of each token of some batches: all positions of a causal model, the masks of a masked one."""
    last = model.n_blocks
    found, documents = [], []
    for one in capture_states(model, batches, [last]):
        each, document = token_losses_at(model, one.batch, one[last])
        found.append(each)
        documents.append(document)
        if progress:
            progress(one.batch.n_tokens)
    return TokenLosses(torch.cat(found), torch.cat(documents))


@torch.no_grad()
def token_losses_at(model: Model, batch: Batch, last: Tensor) -> tuple[Tensor, Tensor]:
    """The losses and documents of a batch, from its picks' states at level L."""
    chosen, token = _predicted(model, batch)
    # With an empty part: in a batch of the shortest texts no pick may have a next token.
    rows, parts = last[chosen.to(last.device)], [torch.zeros(0)]
    for start in range(0, len(rows), ROWS):
        part = slice(start, start + ROWS)
        logits = model.logits(rows[part]).float()
        parts.append(cross_entropy(logits, token[part].to(logits.device), reduction="none").cpu())
    return torch.cat(parts).double(), batch.document[chosen]


def _predicted(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """The picks that predict a token, and that token: the next one, or the one under the mask."""
    if model.masked:
        return torch.arange(batch.n_picks), batch.token
    following = (batch.position + 1).clamp(max=batch.input_ids.shape[1] - 1)
    there = batch.attention_mask[batch.row, following].bool() & (following > batch.position)
    chosen = there.nonzero()[:, 0]
    return chosen, batch.input_ids[batch.row[chosen], following[chosen]]
