"""Evaluate lenses at every level over many positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from layerjump.data.batches import Batch
from layerjump.lens.lens import Lens
from layerjump.metrics.logits import (
    KS,
    LOGITS_MEMORY,
    Agreement,
    ReferenceLogits,
    agreement,
    chunk_rows,
    chunks,
    reference_logits,
    upcast,
)
from layerjump.models.activations import States, capture_states
from layerjump.models.model import Model


@dataclass(frozen=True)
class LensScores:
    """What lenses read at every level of some positions, beside what the model says there itself.

    The first five are (lenses, levels, examples), the others (examples,). At level L every lens is the model.
    """

    lenses: tuple[str, ...]
    top: Tensor
    place: Tensor
    surprisal: Tensor
    kl: Tensor
    confidence: Tensor
    document: Tensor
    position: Tensor
    token: Tensor
    """The token at the position (before masking)."""
    best: Tensor
    """The model's own best token."""
    entropy: Tensor
    """Of the model's own distribution, in nats."""

    @property
    def n_levels(self) -> int:
        return self.top.shape[1]

    @property
    def n_examples(self) -> int:
        return self.top.shape[2]

    def hits(self, k: int = 1) -> Tensor:
        """Whether the lens' best token is among the model's k best, (lenses, levels, examples)."""
        if k > max(KS):
            raise ValueError(f"k given is {k}; hits are known up to {max(KS)}")
        return self.place < k


@torch.no_grad()
def evaluate_lenses(
    model: Model,
    lenses: Mapping[str, Lens],
    batches: Iterable[Batch],
    *,
    memory: int = LOGITS_MEMORY,
    progress: Callable[[Batch], None] | None = None,
) -> LensScores:
    """Read every level of the batches' picks through every lens, in one forward pass."""
    rows = chunk_rows(model, memory)
    parts: list[LensScores] = []
    waiting: list[States] = []
    for found in capture_states(model, batches, range(model.n_blocks + 1)):
        waiting.append(found)
        if sum(each.batch.n_picks for each in waiting) >= rows:
            parts += _read_all(lenses, waiting, model, rows)
            waiting = []
        if progress:
            progress(found.batch)
    return _joined(parts + _read_all(lenses, waiting, model, rows))


def _read_all(
    lenses: Mapping[str, Lens], found: list[States], model: Model, rows: int
) -> list[LensScores]:
    """Readings of several batches' picks together: a vocabulary product of few rows costs as much as one of many."""
    if not found:
        return []
    levels = [torch.cat([each[level] for each in found]) for level in range(model.n_blocks + 1)]
    about = torch.cat(
        [torch.stack([b.document, b.position, b.token]) for b in (each.batch for each in found)], 1
    )
    return [
        _read(lenses, [level[part] for level in levels], model, about[:, part])
        for part in chunks(about.shape[1], rows)
    ]


def _read(
    lenses: Mapping[str, Lens], levels: list[Tensor], model: Model, about: Tensor
) -> LensScores:
    true = reference_logits(upcast(model.logits(levels[-1])))
    last = agreement(true.logits, true)
    found = [
        [_held(lens, level, state, true) for level, state in enumerate(levels[:-1])] + [last]
        for lens in lenses.values()
    ]
    columns = {
        name: torch.stack(
            [torch.stack([getattr(cell, name).cpu() for cell in row]) for row in found]
        )
        for name in Agreement._fields
    }
    return LensScores(
        lenses=tuple(lenses),
        **columns,
        document=about[0],
        position=about[1],
        token=about[2],
        best=last.top.cpu(),
        entropy=-true.negative_entropy.cpu(),
    )


def _held(lens: Lens, level: int, state: Tensor, true: ReferenceLogits) -> Agreement:
    return agreement(upcast(lens.logits(level, state)), true)


def _joined(parts: list[LensScores]) -> LensScores:
    names = [field.name for field in fields(LensScores) if field.name != "lenses"]
    joined = {name: torch.cat([getattr(part, name) for part in parts], dim=-1) for name in names}
    return LensScores(lenses=parts[0].lenses, **joined)
