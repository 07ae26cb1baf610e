"""Run batches and yield hidden states at sites."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from layerjump.data.batches import Batch
from layerjump.models.hooks import Capture
from layerjump.models.structure import FINAL, Site

if TYPE_CHECKING:
    from layerjump.models.model import Model


@dataclass(frozen=True)
class States:
    """States at sites for one batch: row r of every tensor belongs to pick r of the batch."""

    batch: Batch
    at: dict[Site, Tensor]
    logits: Tensor | None = None

    def __getitem__(self, site: Site | str | int) -> Tensor:
        return self.at[Site.parse(site)]


def capture_states(
    model: Model,
    batches: Iterable[Batch],
    sites: Sequence[Site | str | int],
    *,
    logits: bool = False,
    buffer_rows: int = 0,
) -> Generator[States, None, None]:
    """Yield the states of each batch at the sites, for the batch's picked positions only.

    The body runs no further than the last of the sites, and without its vocabulary product; `logits` adds the model's
    own logits of the picks. With `buffer_rows` (picks of the largest batch) every batch's states are written over the
    last one's: fresh tensors of ever new sizes would fragment the heap.
    """
    from layerjump.models.model import require_model  # which imports this module

    require_model(model)
    wanted = [Site.parse(site) for site in sites]
    structure = model.structure
    last = Site(structure.n_blocks)
    tapped = [site for site in wanted if site != FINAL]
    if (logits or FINAL in wanted) and last not in tapped:
        tapped.append(last)
    if logits:
        model.require_predictions()
    with Capture(structure, tapped, buffer_rows=buffer_rows) as capture:
        for batch in batches:
            found = capture.run(model, batch)
            own = None
            with torch.no_grad():
                if logits or FINAL in wanted:
                    found[FINAL] = structure.to_final(found[last])
                if logits:
                    own = structure.decode(found[FINAL])
            made = States(batch, {site: found[site] for site in wanted}, own)
            del found, own
            yield made
            del made  # so that two batches' states are not held while the next is run
