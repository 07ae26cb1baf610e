"""Run batches of tokens and yield the hidden states at sites of their picked positions."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerjump.data.batches import Batch
from layerjump.models.hooks import Capture
from layerjump.models.model import Model, require_model
from layerjump.models.structure import FINAL, Site


@dataclass(frozen=True)
class States:
    """Hidden states of one batch: row r of every tensor belongs to pick r of the batch."""

    batch: Batch
    at: dict[Site, Tensor]
    """(picks, width of the site) by site."""
    logits: Tensor | None = None
    """(picks, vocab_size), if they were asked for."""

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
    """Yield the hidden states of each batch at the sites, for its picked positions only.

    The model runs no further than the last of the sites. `logits` adds the model's own logits of the picks. With
    `buffer_rows` (the picks of the largest batch) every batch's states are written over those of the last one: fresh
    tensors of ever new sizes would fragment the heap.
    """
    require_model(model)
    selected = [Site.parse(site) for site in sites]
    structure = model.structure
    last = Site(structure.n_blocks)
    needs_final = logits or FINAL in selected
    tapped = [site for site in selected if site != FINAL]
    if needs_final and last not in tapped:
        tapped.append(last)
    if logits:
        model.require_predictions()
    with Capture(structure, tapped, buffer_rows=buffer_rows) as capture:
        for batch in batches:
            at = capture.run(model, batch)
            own_logits = None
            with torch.no_grad():
                if needs_final:
                    at[FINAL] = structure.to_final(at[last])
                if logits:
                    own_logits = structure.decode(at[FINAL])
            states = States(batch, {site: at[site] for site in selected}, own_logits)
            # Nothing here may hold a batch's states while the next batch runs.
            del at, own_logits
            yield states
            del states
