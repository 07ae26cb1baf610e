"""States of joint sources: captured at the picked positions and at earlier ones, then put side by side.

A model runs a batch whose picks are widened by the positions that the sources read. Each pick then finds its states by
row, so that a source never reads another sequence. Where a sequence begins later than a source reads, the state of its
first position stands in; a fit leaves such positions out (`Positions.skip_first`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from layerjump.data.batches import Batch
from layerjump.models.sites import Site


@dataclass(frozen=True)
class WidenedBatch:
    """A batch whose picks include the earlier positions that sources read."""

    original: Batch
    batch: Batch
    rows: Mapping[int, Tensor]
    """(picks of the original,) by offset: the pick of `batch` at that offset."""

    @classmethod
    def of(cls, original: Batch, sources: Sequence[Site]) -> WidenedBatch:
        """Pick every position that the sources read, once."""
        n_positions = original.input_ids.shape[1]
        offsets = sorted({0, *(term.offset for source in sources for term in source.terms)})
        cells = [original.row * n_positions + (original.position + offset).clamp(min=0) for offset in offsets]
        unique, inverse = torch.unique(torch.cat(cells), return_inverse=True)
        row, position = unique // n_positions, unique % n_positions
        # All picks of a row are of one document and one sequence.
        first = torch.zeros(len(original.input_ids), dtype=torch.long)
        first[original.row] = torch.arange(original.n_picks)
        picks = first[row]
        batch = replace(
            original,
            row=row,
            position=position,
            document=original.document[picks],
            token=original.input_ids[row, position],
            sequence=None if original.sequence is None else original.sequence[picks],
        )
        return cls(original, batch, dict(zip(offsets, inverse.split(original.n_picks), strict=True)))

    def join(self, captured: Mapping[Site, Tensor], sources: Sequence[Site]) -> dict[Site, Tensor]:
        """Return the states of every source at the original picks, from those of `batch` at plain sites."""

        def at(site: Site, offset: int, device: torch.device) -> Tensor:
            states = captured[site]
            return states.index_select(0, self.rows[offset].to(states.device)).to(device)

        joined = {}
        for source in sources:
            device = captured[source.terms[-1].site].device
            parts = [at(term.site, term.offset, device) for term in source.terms]
            joined[source] = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return joined


def plain_sites(sources: Sequence[Site]) -> list[Site]:
    """Return every site that the sources read, once."""
    return list(dict.fromkeys(term.site for source in sources for term in source.terms))
