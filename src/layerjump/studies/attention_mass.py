"""How much attention each block pays to the token itself and to the sink at position 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from layerjump.data.batches import Batch, Batches
from layerjump.models.hooks import Capture, watch_outputs
from layerjump.models.loading import quiet_transformers
from layerjump.models.model import Model
from layerjump.models.self_check import TOLERANCE
from layerjump.models.structure import Site

Mass = list[tuple[float, float]]
"""(on self, on position 0) for every block, averaged over heads and picks."""


@torch.no_grad()
def attention_mass(model: Model, batches: Batches) -> tuple[Mass | None, str | None]:
    """The mass of every block; None, and why, where this model does not show its attention weights.

    Fast kernels do not give weights, so the model computes attention in the open meanwhile ("eager"), and only if
    that leaves its states as they were.
    """
    totals = torch.zeros(model.n_blocks, 2, dtype=torch.float64)
    n = 0
    for batch in batches:
        exact, _ = _pass(model, batch)
        with _eager(model):
            states, mass = _pass(model, batch)
        if not _close(states, exact):
            return (
                None,
                "Attention weights are not shown: computed in the open, they give other states.",
            )
        if len(mass) != model.n_blocks:
            return (
                None,
                "Attention weights are not shown: this model's attention does not give them.",
            )
        totals += torch.stack(mass) * batch.n_picks
        n += batch.n_picks
    return [(float(own), float(sink)) for own, sink in totals / n], None


def _pass(model: Model, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Level L of the picks and, block by block, where their attention goes; no weights: a shorter list."""
    found: list[Tensor] = []

    def see(output: Any) -> None:
        # Last, for T5 gives its position bias before them.
        weights = output[-1] if isinstance(output, tuple) and len(output) > 1 else None
        if isinstance(weights, Tensor) and weights.dim() == 4:
            found.append(_mass(weights, batch))

    last = Site(model.n_blocks)
    taps = [model.structure.tap(Site(block, "attn.in")) for block in range(1, model.n_blocks + 1)]
    attention = {tap.module for tap in taps}
    with watch_outputs(attention, see), Capture(model.structure, [last]) as capture:
        return capture.run(model, batch)[last], found


def _mass(weights: Tensor, batch: Batch) -> Tensor:
    """Mean weight on self and on position 0; weights are (rows, heads, queries, keys)."""
    row, position = batch.row.to(weights.device), batch.position.to(weights.device)
    mine = weights[row, :, position].double().mean(1)
    own = mine.gather(1, position[:, None]).mean()
    return torch.stack([own, mine[:, 0].mean()]).cpu()


@contextmanager
def _eager(model: Model) -> Iterator[None]:
    """Attention computed in the open, where the family can; then as it was."""
    before = model.hf.config._attn_implementation
    with quiet_transformers():
        try:
            model.hf.set_attn_implementation("eager")
            yield
        finally:
            model.hf.set_attn_implementation(before)


def _close(ours: Tensor, theirs: Tensor) -> bool:
    difference = (ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)
    return bool(difference <= TOLERANCE[theirs.dtype])
