"""A lens: states at a level → logits, through a jump and the model's own norm and head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from layerjump.errors import BadJumps
from layerjump.fit.jumps import Jumps
from layerjump.inputs.batches import Batch
from layerjump.inputs.models import Model
from layerjump.inputs.sites import FINAL, Site
from layerjump.inputs.states import States, states
from layerjump.measure.metrics import KS, Agreement, Truth, agreement, truth

MEMORY = 1 << 30
"""Bytes that rows of logits may take at once, whatever the vocabulary."""
_BUFFERS = 5
"""Rows of vocabulary size that are alive at once: two of the truth, up to three of an approximation (a soft-cap)."""
_MOST_ROWS = 512  # more make no product faster
_AT_LEAST = 4  # bytes a number: half-precision logits are widened


@dataclass(frozen=True)
class Lens:
    """Reads any level of a model. Without jumps it is the logit lens: norm and head of the state as it is."""

    model: Model
    jumps: Jumps | None = None

    def __post_init__(self) -> None:
        self.model.require_predictions()

    def logits(self, level: int, states: Tensor) -> Tensor:
        """Logits of states at a level; at level L they are the model's own."""
        last = self.model.n_blocks
        if self.jumps is None or level == last:
            return self.model.logits(states)
        source = Site(level)
        if (source, Site(last)) in self.jumps:
            return self.model.logits(_through(self.jumps[source, last], states))
        if (source, FINAL) in self.jumps:
            return self.model.anatomy.decode(_through(self.jumps[source, FINAL], states))
        raise BadJumps(
            f"{self.jumps} has no jump from level {level} to the last level or to `final`, so nothing can be read "
            f"there; fit with pairs to-last"
        )


@dataclass(frozen=True)
class Readings:
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
def read_levels(
    model: Model,
    lenses: Mapping[str, Lens],
    batches: Iterable[Batch],
    *,
    memory: int = MEMORY,
    progress: Callable[[Batch], None] | None = None,
) -> Readings:
    """Read every level of the batches' picks through every lens, in one forward pass."""
    rows = rows_at_once(model, memory)
    parts: list[Readings] = []
    waiting: list[States] = []
    for found in states(model, batches, range(model.n_blocks + 1)):
        waiting.append(found)
        if sum(each.batch.n_picks for each in waiting) >= rows:
            parts += _read_all(lenses, waiting, model, rows)
            waiting = []
        if progress:
            progress(found.batch)
    return _joined(parts + _read_all(lenses, waiting, model, rows))


def rows_at_once(model: Model, memory: int = MEMORY) -> int:
    """How many rows of logits fit in the memory given."""
    size = max(_AT_LEAST, model.hf.dtype.itemsize)
    return max(1, min(_MOST_ROWS, memory // (_BUFFERS * model.anatomy.vocabulary * size)))


def _through(jump: nn.Module, states: Tensor) -> Tensor:
    """Jumps are float32; the model's states may be half or double precision."""
    weight = next(jump.parameters(), None)
    dtype = states.dtype if weight is None else weight.dtype
    return jump(states.to(dtype)).to(states.dtype)


def _read_all(
    lenses: Mapping[str, Lens], found: list[States], model: Model, rows: int
) -> list[Readings]:
    """Readings of several batches' picks together: a vocabulary product of few rows costs as much as one of many."""
    if not found:
        return []
    levels = [torch.cat([each[level] for each in found]) for level in range(model.n_blocks + 1)]
    about = torch.cat(
        [torch.stack([b.document, b.position, b.token]) for b in (each.batch for each in found)], 1
    )
    slices = [slice(start, start + rows) for start in range(0, about.shape[1], rows)]
    return [
        _read(lenses, [level[part] for level in levels], model, about[:, part]) for part in slices
    ]


def _read(
    lenses: Mapping[str, Lens], levels: list[Tensor], model: Model, about: Tensor
) -> Readings:
    true = truth(_wide(model.logits(levels[-1])))
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
    return Readings(
        lenses=tuple(lenses),
        **columns,
        document=about[0],
        position=about[1],
        token=about[2],
        best=last.top.cpu(),
        entropy=-true.negative_entropy.cpu(),
    )


def _held(lens: Lens, level: int, state: Tensor, true: Truth) -> Agreement:
    return agreement(_wide(lens.logits(level, state)), true)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def _joined(parts: list[Readings]) -> Readings:
    names = [field.name for field in fields(Readings) if field.name != "lenses"]
    joined = {name: torch.cat([getattr(part, name) for part in parts], dim=-1) for name in names}
    return Readings(lenses=parts[0].lenses, **joined)
