"""Estimate the memory and arithmetic of a run before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from layerjump.data.batches import Batches
from layerjump.errors import TooLarge, UnsupportedModel, argument
from layerjump.jumps.moments import Moments
from layerjump.models.model import Model
from layerjump.models.structure import FINAL, Site


@dataclass(frozen=True)
class CostEstimate:
    """Bytes held at once, and floating-point operations of the second moments and of the model's blocks."""

    sums_bytes: int
    batch_bytes: int
    sums_flops: float
    model_flops: float
    tokens: int
    positions: int

    @property
    def bytes(self) -> int:
        """Bytes held at once."""
        return self.sums_bytes + self.batch_bytes

    def __str__(self) -> str:
        share = self.sums_flops / max(self.model_flops, 1)
        return (
            f"{self.tokens:,} tokens, {self.positions:,} positions; memory for sums {_size(self.sums_bytes)} and "
            f"one batch's states {_size(self.batch_bytes)}; {self.sums_flops / 1e9:,.0f} GFLOP of sums, "
            f"{share:.0%} of the model's own {self.model_flops / 1e9:,.0f}"
        )

    def require_memory(self) -> None:
        """Raise `TooLarge` for a run that does not fit in the memory that is free now."""
        free = psutil.virtual_memory().available
        if self.bytes > free:
            raise TooLarge(
                f"this run needs {_size(self.bytes)} ({_size(self.sums_bytes)} of it for sums), but only "
                f"{_size(free)} are free; use fewer pairs ({argument('pairs', 'to-last')}, or a list)"
            )


def estimate_cost(model: Model, moments: Moments, batches: Mapping[str, Batches]) -> CostEstimate:
    """Estimate the cost of collecting `moments` over `batches` (by split)."""
    raw = {site: site_width(model, site) for site in moments.sites}
    wider = 2 if moments.features == "both" else 1
    width = {site: raw[site] * (wider if site in moments.sources else 1) for site in raw}
    products = [(site, site) for site in moments.gram_sites] + moments.pairs
    entries = sum(width[a] * width[b] for a, b in products)
    sampled = sum(raw[site] for site in moments.reservoir.sites) * moments.reservoir.size
    positions = sum(split.n_picks for split in batches.values())
    tokens = sum(split.n_tokens for split in batches.values())
    # Two operations per weight and token; an encoder–decoder's tokens go through one stack each.
    encoded = sum(split.n_source_tokens for split in batches.values())
    model_flops = 2.0 * _weights(model) * (tokens - encoded)
    if encoded:
        with suppress(UnsupportedModel):  # an encoder that reads no tokens (Whisper)
            model_flops += 2.0 * _weights(model.encoder_side()) * encoded
    max_rows = max((int(split.max_picks) for split in batches.values()), default=0)
    return CostEstimate(
        sums_bytes=len(batches) * (8 * entries + 4 * sampled),
        # states as captured, and their shifted copies in float64
        batch_bytes=(4 + 8) * max_rows * sum(width.values()),
        sums_flops=2.0 * entries * positions,
        model_flops=model_flops,
        tokens=tokens,
        positions=positions,
    )


def _weights(model: Model) -> int:
    """The number of weights that a token passes from level 0 to level L."""
    blocks = set(model.structure.blocks)
    once = sum(p.numel() for block in blocks for p in block.parameters())
    return once * (model.n_blocks // len(blocks))


def site_width(model: Model, site: Site) -> int:
    """Return the width of the states at a site."""
    if site == FINAL:
        return model.structure.unembedding.get_parameter("weight").shape[1]
    return model.structure.width(site)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
