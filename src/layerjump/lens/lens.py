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
from layerjump.inputs.states import states
from layerjump.measure.metrics import KS, Agreement, Truth, agreement, truth

MEMORY = 1 << 30
"""Bytes that rows of logits may take at once, whatever the vocabulary."""
_BUFFERS = (
    4  # rows of vocabulary size that are alive at once: two of the truth, two of an approximation
)


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
    for found in states(model, batches, range(model.n_blocks + 1)):
        batch = found.batch
        about = torch.stack([batch.document, batch.position, batch.token])
        for start in range(0, batch.n_picks, rows):
            these = slice(start, start + rows)
            levels = [found[level][these] for level in range(model.n_blocks + 1)]
            parts.append(_read(lenses, levels, model, about[:, these]))
        if progress:
            progress(batch)
    return _joined(parts)


def rows_at_once(model: Model, memory: int = MEMORY) -> int:
    """How many rows of logits fit in the memory given."""
    vocabulary = model.anatomy.vocabulary
    return max(1, memory // (_BUFFERS * vocabulary * 4))


def _through(jump: nn.Module, states: Tensor) -> Tensor:
    """Jumps are float32; the model's states may be half or double precision."""
    weight = next(jump.parameters(), None)
    dtype = states.dtype if weight is None else weight.dtype
    return jump(states.to(dtype)).to(states.dtype)


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
