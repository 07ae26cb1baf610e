"""The held-out positions at which every lens is scored: hidden states of test documents at all levels."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import layerjump as lj
from layerjump.metrics.bootstrap import Floats
from layerjump.metrics.logits import calibration_error

POSITIONS_PER_DOCUMENT = 4
"""Intervals are over documents, so few positions of many documents tell more than many positions of few."""
ROWS = 128
"""Rows of logits that are computed at once."""


@dataclass(frozen=True)
class HeldOut:
    """Hidden states at held-out positions, sorted by document."""

    levels: list[Tensor]
    """(positions, d) hidden states at levels 0 … L."""
    target: Tensor
    """(positions,) the true token: the next one, or the masked one; −1 at the end of the text."""
    document: Tensor
    """(positions,) the document of each position."""

    def __len__(self) -> int:
        return len(self.target)

    def chunks(self) -> list[slice]:
        return [slice(start, start + ROWS) for start in range(0, len(self), ROWS)]


def held_out(
    model: lj.Model, corpus: lj.Corpus, n: int, *, among: Collection[int] | None = None, seed: int = 0
) -> HeldOut:
    """Capture states at about n positions of the test split of `lj.fit` (only of the documents in `among`)."""
    test = lj.split_indices(len(corpus.documents), seed=seed).test
    allowed = [document for document in test if among is None or document in among]
    documents = allowed[: max(1, n // POSITIONS_PER_DOCUMENT)]
    sampled = lj.Positions("sample", POSITIONS_PER_DOCUMENT)
    if model.masked:
        batches = lj.make_batches(corpus, model.tokenization, sampled, documents=documents, seed=seed)
    else:
        # Sequences are built for all positions first: otherwise a sequence would end at its last sampled position,
        # without the next token, which the calibration error needs.
        full = lj.make_batches(corpus, model.tokenization, lj.Positions("all"), documents=documents)
        batches = full.with_picks_at(sampled)
    captured = list(lj.capture_states(model, batches, range(model.n_blocks + 1)))
    document = torch.cat([states.batch.document for states in captured])
    order = document.argsort(stable=True)
    target = torch.cat([_target(states.batch, masked=model.masked) for states in captured])
    levels = [torch.cat([states[level] for states in captured])[order] for level in range(model.n_blocks + 1)]
    return HeldOut(levels, target[order], document[order])


def _target(batch: lj.Batch, *, masked: bool) -> Tensor:
    if masked:
        return batch.token
    after = (batch.position + 1).clamp_max(batch.input_ids.shape[1] - 1)
    exists = (after > batch.position) & batch.attention_mask[batch.row, after].bool()
    return torch.where(exists, batch.input_ids[batch.row, after], -1)


@torch.no_grad()
def model_calibration(model: lj.Model, held: HeldOut) -> Floats:
    """Return the calibration error of the model itself at these positions."""
    best = [model.logits(held.levels[-1][rows]).softmax(-1).max(-1) for rows in held.chunks()]
    probability = torch.cat([chunk.values for chunk in best]).numpy()
    hit = (torch.cat([chunk.indices for chunk in best]) == held.target).numpy()
    return calibration_error(probability, hit, (held.target >= 0).numpy().astype(np.float64))
