"""The positions that every lens is scored on: from test documents alone, run once, states at all levels kept."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import layerjump as lj
from layerjump.metrics.bootstrap import Floats
from layerjump.metrics.logits import calibration_error

A_DOCUMENT = 4
"""Positions of one document: intervals are by document, so few of many say more than many of few."""
ROWS = 128
"""Rows of logits at once."""


@dataclass(frozen=True)
class HeldOut:
    """States of held-out positions, by document."""

    levels: list[Tensor]
    """(positions, d) at levels 0 … L."""
    wanted: Tensor
    """(positions,) the token that the text has there: the next one, or the masked one; −1 where the text ends."""
    document: Tensor

    def __len__(self) -> int:
        return len(self.wanted)

    def chunks(self) -> list[slice]:
        return [slice(start, start + ROWS) for start in range(0, len(self), ROWS)]


def held_out(
    model: lj.Model, corpus: lj.Corpus, n: int, *, among: Collection[int] | None = None, seed: int = 0
) -> HeldOut:
    """About n positions of the documents (of those `among` which they are) that `lj.fit` keeps for testing."""
    test = lj.split_documents(len(corpus.documents), seed=seed).test
    kept = [document for document in test if among is None or document in among]
    documents = kept[: max(1, n // A_DOCUMENT)]
    some = lj.Positions("sample", A_DOCUMENT)
    if model.masked:
        batches = lj.make_batches(corpus, model.tokenization, some, documents=documents, seed=seed)
    else:
        # Cut whole and then looked at here and there: otherwise a text ends at its last pick, and what comes next,
        # which calibration is held against, is not in it.
        whole = lj.make_batches(corpus, model.tokenization, lj.Positions("all"), documents=documents)
        batches = whole.with_picks_at(some)
    found = list(lj.capture_states(model, batches, range(model.n_blocks + 1)))
    document = torch.cat([each.batch.document for each in found])
    order = document.argsort(stable=True)
    wanted = torch.cat([_wanted(each.batch, masked=model.masked) for each in found])
    levels = [torch.cat([each[level] for each in found])[order] for level in range(model.n_blocks + 1)]
    return HeldOut(levels, wanted[order], document[order])


def _wanted(batch: lj.Batch, *, masked: bool) -> Tensor:
    if masked:
        return batch.token
    after = (batch.position + 1).clamp_max(batch.input_ids.shape[1] - 1)
    there = (after > batch.position) & batch.attention_mask[batch.row, after].bool()
    return torch.where(there, batch.input_ids[batch.row, after], -1)


@torch.no_grad()
def own_calibration(model: lj.Model, held: HeldOut) -> Floats:
    """The model's own calibration error at these positions: what a lens would have at best."""
    best = [model.logits(held.levels[-1][rows]).softmax(-1).max(-1) for rows in held.chunks()]
    probability = torch.cat([each.values for each in best]).numpy()
    hit = (torch.cat([each.indices for each in best]) == held.wanted).numpy()
    return calibration_error(probability, hit, (held.wanted >= 0).numpy().astype(np.float64))
