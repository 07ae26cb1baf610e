"""Decode hidden states into statistics of predictions: maps, final norm, unembedding, top tokens, entropy, KL.

`Readout` decodes one site. `compute_stats` decodes the hidden states of all levels through several lenses within a
memory budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from layerjump.errors import BadJumps, BadModel
from layerjump.jumps.maps import apply_map
from layerjump.metrics.logits import (
    LOGITS_MEMORY,
    LogitComparison,
    LogitStats,
    chunk_rows,
    chunks,
    reference_logits,
    upcast,
)
from layerjump.models.model import Model
from layerjump.models.sites import JointSource, Site
from layerjump.models.structure import Structure

_CHUNK_POSITIONS = 64  # positions decoded at once, at all levels


@dataclass(frozen=True)
class Readout:
    """How a lens decodes one site: linear maps, then the final norm unless the maps land after it."""

    structure: Structure
    site: Site
    """Where the states are read; a joint source, such as `final@-1+5`, for a lens with memory."""
    maps: tuple[nn.Module, ...] = ()
    needs_final_norm: bool = True

    def to_final(self, states: Tensor) -> Tensor:
        """The input of the unembedding, for hidden states at the site."""
        if isinstance(self.site, JointSource) and states.shape[-1] == self.structure.d_model:
            raise BadJumps(
                f"these jumps read {self.site} side by side, got states of one site alone; fit jumps without earlier "
                f"positions"
            )
        for jump in self.maps:
            states = apply_map(jump, states)
        if not self.needs_final_norm:
            return states
        if states.shape[-1] != self.structure.d_model:
            raise BadModel(
                f"{self.site} has width {states.shape[-1]}, but the final norm and the unembedding expect d_model "
                f"{self.structure.d_model}; read a site of the residual stream, such as {self.site.index}.mid"
            )
        return self.structure.to_final(states)

    def logits(self, states: Tensor) -> Tensor:
        """Logits of hidden states at the site."""
        return self.structure.decode(self.to_final(states))


@dataclass(frozen=True)
class LensQuery:
    """Which statistics to compute at every level and position."""

    k: int
    """Number of most probable tokens to keep."""
    tracked: tuple[int, ...] = ()
    """Ids of tokens whose probability and rank to record."""
    jensen_shannon: bool = False


@dataclass(frozen=True)
class PromptStates:
    """Hidden states of one text, which all lenses share."""

    sites: tuple[Site, ...]
    states: tuple[Tensor, ...]
    """(positions, d) at each site."""
    last_level: Tensor
    """(positions, d_model) at level L, from which the model itself predicts."""
    targets: Tensor
    """(positions,) the id of the next token in the text; −1 where there is none."""
    joint: Mapping[Site, Tensor] = field(default_factory=dict)
    """(positions, width) of the joint sources that lenses with memory read."""

    def read_by(self, readout: Readout, index: int) -> Tensor:
        """What a readout reads at the site of this index, (positions, width)."""
        return self.joint[readout.site] if isinstance(readout.site, JointSource) else self.states[index]


@torch.no_grad()
def compute_stats(
    model: Model,
    readouts: Mapping[str, Sequence[Readout]],
    states: PromptStates,
    query: LensQuery,
    *,
    memory: int = LOGITS_MEMORY,
) -> tuple[Tensor, dict[str, LogitStats]]:
    """The model's own top token at each position, and each lens' statistics; tensors are (levels, positions, …).

    `readouts` has one readout for each site by lens. At level L every lens is the model.
    """
    n_rows, last, indices = chunk_rows(model, memory), Site(model.n_blocks), range(len(states.sites))
    model_top: list[Tensor] = []
    parts: dict[str, list[LogitStats]] = {name: [] for name in readouts}
    for chunk in chunks(len(states.last_level), min(n_rows, _CHUNK_POSITIONS)):
        reference = reference_logits(upcast(model.logits(states.last_level[chunk])))
        n_positions, device = len(reference.logits), reference.logits.device
        compare = LogitComparison(
            reference,
            k=query.k,
            targets=states.targets[chunk].to(device),
            tracked=torch.tensor(query.tracked, dtype=torch.long, device=device),
            entropy=True,
            jensen_shannon=query.jensen_shannon,
        )
        model_stats = compare(reference.logits)
        model_top.append(model_stats.top[:, 0])
        cells = {(name, index): model_stats for name in readouts for index in indices}
        pending = [(name, index) for name, index in cells if states.sites[index] != last]
        # One product with the unembedding for many rows costs far less than many products for few.
        for batch in chunks(len(pending), max(1, n_rows // n_positions)):
            group = pending[batch]
            finals = []
            for name, index in group:
                readout = readouts[name][index]
                finals.append(readout.to_final(states.read_by(readout, index)[chunk]).to(device))
            final = torch.cat(finals)
            logits = upcast(model.structure.decode(final)).split(n_positions)
            cells |= {cell: compare(cell_logits) for cell, cell_logits in zip(group, logits, strict=True)}
        for name, part in parts.items():
            part.append(LogitStats(*map(torch.stack, zip(*(cells[name, index] for index in indices), strict=True))))
    return torch.cat(model_top).cpu(), {
        name: LogitStats(*(torch.cat(column, 1).cpu() for column in zip(*part, strict=True)))
        for name, part in parts.items()
    }


def settled_index(top: Tensor, model_top: Tensor) -> Tensor:
    """(positions,) the index of the first level from which on the top token is the model's; −1 where the last's is not.

    `top` is (levels, positions) and `model_top` (positions,).
    """
    n_agreeing = (top == model_top).flip(0).long().cumprod(0).sum(0)
    return torch.where(n_agreeing > 0, len(top) - n_agreeing, -1)
