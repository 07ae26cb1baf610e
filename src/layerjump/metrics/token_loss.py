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
from layerjump.metrics.logits import chunks
from layerjump.models.model import Model, capture_states

ROWS = 256
"""Positions that go through the unembedding at once."""


@dataclass(frozen=True, eq=False)
class TokenLosses:
    """The loss of every predicted token in nats, and its document."""

    losses: Tensor
    document: Tensor

    @property
    def mean(self) -> float:
        return float(self.losses.mean())

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean)

    def over(self, other: TokenLosses) -> tuple[float, float, float]:
        """Return the ratio of this perplexity to another on the same tokens, with its 95 % interval over documents."""
        interval = mean_interval((self.losses - other.losses).numpy(), self.document.numpy())
        ratio, low, high = (math.exp(float(value)) for value in interval)
        return ratio, low, high


def token_losses(
    model: Model, batches: Iterable[Batch], *, progress: Callable[[int], None] | None = None
) -> TokenLosses:
    """Return the loss of each token of some batches: all positions of a causal model, the masks of a masked one."""
    last = model.n_blocks
    losses, documents = [], []
    for states in capture_states(model, batches, [last]):
        batch_losses, document = token_losses_at(model, states.batch, states[last])
        losses.append(batch_losses)
        documents.append(document)
        if progress:
            progress(states.batch.n_tokens)
    return TokenLosses(torch.cat(losses), torch.cat(documents))


@torch.no_grad()
def token_losses_at(model: Model, batch: Batch, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses and documents of a batch, from its picks' states at level L."""
    if model.masked:  # the token under the mask is predicted
        picks, token = torch.arange(batch.n_picks), batch.token
    else:  # the next one, where there is one
        following = (batch.position + 1).clamp(max=batch.input_ids.shape[1] - 1)
        has_next = batch.attention_mask[batch.row, following].bool() & (following > batch.position)
        picks = has_next.nonzero()[:, 0]
        token = batch.input_ids[batch.row[picks], following[picks]]
    # With an empty part: in a batch of the shortest texts no pick may have a next token.
    rows, parts = last[picks.to(last.device)], [torch.zeros(0)]
    for part in chunks(len(rows), ROWS):
        logits = model.logits(rows[part]).float()
        parts.append(cross_entropy(logits, token[part].to(logits.device), reduction="none").cpu())
    return torch.cat(parts).double(), batch.document[picks]
