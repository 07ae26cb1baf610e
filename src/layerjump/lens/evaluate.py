"""Evaluate lenses at every level over many positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from layerjump.data.batches import Batch
from layerjump.errors import argument
from layerjump.lens.lens import Lens
from layerjump.metrics.logits import (
    KS,
    LOGITS_MEMORY,
    Agreement,
    agreement,
    chunk_rows,
    chunks,
    reference_logits,
    upcast,
)
from layerjump.models.model import Model, States, capture_states
from layerjump.models.sites import Site


@dataclass(frozen=True)
class LensScores:
    """How well each lens' predictions at each level agree with the model's, position by position.

    The first five tensors are (lenses, levels, examples), the others (examples,). At level L every lens is the model.
    """

    lenses: tuple[str, ...]
    top: Tensor
    """The lens' most probable token."""
    rank: Tensor
    """How many of the model's ten most probable tokens rank above that token."""
    surprisal: Tensor
    """−ln p of that token by the model."""
    kl: Tensor
    """KL(model ‖ lens) in nats."""
    confidence: Tensor
    """The lens' highest probability minus its second highest."""
    document: Tensor
    position: Tensor
    token: Tensor
    """The token at the position, before masking."""
    model_top: Tensor
    """The model's most probable token."""
    model_entropy: Tensor
    """The entropy of the model's distribution in nats."""

    @property
    def n_levels(self) -> int:
        return self.top.shape[1]

    @property
    def n_examples(self) -> int:
        return self.top.shape[2]

    def hits(self, k: int = 1) -> Tensor:
        """(lenses, levels, examples) whether the lens' top token is among the model's k most probable tokens."""
        if k > max(KS):
            raise ValueError(f"expected {argument('k')} of at most {max(KS)}, got {k}")
        return self.rank < k


@torch.no_grad()
def evaluate_lenses(
    model: Model,
    lenses: Mapping[str, Lens],
    batches: Iterable[Batch],
    *,
    levels: Sequence[int] | None = None,
    memory: int = LOGITS_MEMORY,
    progress: Callable[[Batch], None] | None = None,
) -> LensScores:
    """Score every lens at every level, at the picked positions of the batches, with one forward pass.

    `levels`, the last of which is L, are those to score (default: all).
    """
    n_rows = chunk_rows(model, memory)
    levels = range(model.n_blocks + 1) if levels is None else levels
    scores: list[LensScores] = []
    pending: list[States] = []
    joint = {lens.readout(level).site for lens in lenses.values() for level in levels} - {*map(Site, levels)}
    for states in capture_states(model, batches, [*levels, *sorted(joint)]):
        pending.append(states)
        if sum(waiting.batch.n_picks for waiting in pending) >= n_rows:
            scores += _score_batches(model, lenses, levels, pending, n_rows)
            pending = []
        if progress:
            progress(states.batch)
    scores += _score_batches(model, lenses, levels, pending, n_rows)
    names = [field.name for field in fields(LensScores) if field.name != "lenses"]
    columns = {name: torch.cat([getattr(part, name) for part in scores], -1) for name in names}
    return LensScores(lenses=tuple(lenses), **columns)


def _score_batches(
    model: Model, lenses: Mapping[str, Lens], levels: Sequence[int], captured: list[States], n_rows: int
) -> list[LensScores]:
    """Score several batches together: a product with the unembedding costs as much for few rows as for many."""
    if not captured:
        return []
    at = {source: torch.cat([states[source] for states in captured]) for source in captured[0].at}
    picks = torch.cat([torch.stack([s.batch.document, s.batch.position, s.batch.token]) for s in captured], 1)
    scores = []
    for rows in chunks(picks.shape[1], n_rows):
        reference = reference_logits(upcast(model.logits(at[Site(model.n_blocks)][rows])))
        of_model = agreement(reference.logits, reference)
        cells = [
            [*(agreement(upcast(readout.logits(at[readout.site][rows])), reference) for readout in readouts), of_model]
            for readouts in ([lens.readout(level) for level in levels[:-1]] for lens in lenses.values())
        ]
        statistics = {
            name: torch.stack([torch.stack([getattr(cell, name).cpu() for cell in row]) for row in cells])
            for name in Agreement._fields
        }
        document, position, token = picks[:, rows]
        own = {"model_top": of_model.top.cpu(), "model_entropy": -reference.negative_entropy.cpu()}
        scores.append(LensScores(tuple(lenses), **statistics, document=document, position=position, token=token, **own))
    return scores
