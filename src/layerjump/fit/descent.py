"""N-NJTC as published (arXiv 2409.14091): h_L ≈ A B BN(h_l), of rank ⌊d/100⌋, by gradient descent on squared error.

The closed form (`n-njtc`) is the best map of that rank with an intercept. This one adds nothing after the product, so
that the target's mean costs it a rank: it comes close from below where there are several, and is far behind at rank 1.
It is here to be compared with. Optimiser, rate, steps and batches are not public: Adam, and a rate that falls to
nothing, are ours. When training is over, the normalisation is multiplied into B, which leaves two thin factors and a
bias.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from layerjump.errors import BadEstimator, TextTooShort
from layerjump.fit.affine import Affine
from layerjump.fit.jumps import Jumps
from layerjump.fit.narrow import narrow_rank
from layerjump.fit.reading import Reading
from layerjump.inputs.batches import Batches
from layerjump.inputs.corpus import Corpus
from layerjump.inputs.models import Model
from layerjump.inputs.positions import MASKED_SHARE, Positions
from layerjump.inputs.sites import Site
from layerjump.inputs.states import states

NAME = "n-njtc-trained"
Progress = Callable[[int, int], None]


class Narrow(nn.Module):
    """One level's jump while it is trained; the target is kept in units of its own spread."""

    def __init__(self, width: int, rank: int, spread: Tensor, draw: torch.Generator) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.down = nn.Parameter(torch.randn(rank, width, generator=draw) / width**0.5)
        self.up = nn.Parameter(torch.randn(width, rank, generator=draw) / rank**0.5)
        self.spread = nn.Buffer(spread)

    def forward(self, rows: Tensor) -> Tensor:
        return self.norm(rows) @ self.down.mT @ self.up.mT * self.spread

    @torch.no_grad()
    def folded(self) -> Affine:
        """The map it is when nothing is trained any more."""
        mean, variance = self.norm.running_mean, self.norm.running_var
        assert mean is not None
        assert variance is not None
        scale = self.norm.weight / (variance + self.norm.eps).sqrt()
        up = self.up * self.spread[:, None]
        bias = up @ (self.down @ (self.norm.bias - mean * scale))
        return Affine.of(up, self.down * scale, bias=bias)


def train_n_njtc(
    model: Model,
    text: Corpus | str | Path,
    *,
    steps: int = 400,
    rank: int | None = None,
    rate: float = 1e-2,
    tokens: int | None = None,
    sizes: str = "80/10/10",
    seed: int = 0,
    progress: Progress | None = None,
) -> Jumps:
    """Train one narrow jump a level, all on the same batches; a step is a batch, at all positions but the first."""
    if steps < 1:
        raise BadEstimator(f"steps given is {steps}; give 1 or more")
    rank = narrow_rank(model.width) if rank is None else rank
    if not 1 <= rank <= model.width:
        raise BadEstimator(f"rank given is {rank}; give 1 to the width, {model.width}")
    where = Positions.parse(MASKED_SHARE) if model.masked else Positions("all")
    reading = Reading.of(model, text, where, tokens=tokens, sizes=sizes, seed=seed)
    jumps, rows = _trained(model, reading.batches, steps, rank, rate, seed, progress)
    last = Site(model.n_blocks)
    maps = {(site, last): jump.cpu().eval().folded() for site, jump in jumps.items()}
    settings = {"steps": steps, "rank": rank, "rate": rate}
    return reading.jumps(maps, NAME, settings, n_fit=rows, rank=rank)


def _trained(
    model: Model,
    found: Batches,
    steps: int,
    rank: int,
    rate: float,
    seed: int,
    progress: Progress | None,
) -> tuple[dict[Site, Narrow], int]:
    last = Site(model.n_blocks)
    sites = [Site(level) for level in range(model.n_blocks)]
    jumps: dict[Site, Narrow] = {}
    optimiser: Any = None
    rows, size = 0, 1.0
    for step in range(steps):
        turn, place = divmod(step, len(found))
        index = int(np.random.default_rng([seed, turn]).permutation(len(found))[place])
        at = next(iter(states(model, [found[index]], [*sites, last]))).at
        if len(at[last]) < 2:
            continue  # a batch normalisation wants two rows
        if not jumps:
            draw, spread = torch.Generator().manual_seed(seed), at[last].float().std(0)
            jumps = {
                site: Narrow(model.width, rank, spread.cpu(), draw).to(spread) for site in sites
            }
            size = float(spread.square().mean().clamp_min(1e-12))
            parameters = [p for jump in jumps.values() for p in jump.parameters()]
            optimiser = torch.optim.Adam(parameters, lr=rate)
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, 2 * (1 - step / steps))
        with torch.enable_grad():
            for site, jump in jumps.items():
                wanted = at[last].float()
                error = jump(at[site].to(wanted)) - wanted
                # One number for all coordinates: the rate then suits states of any size.
                (error.square().mean() / size).backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        rows += len(at[last])
        if progress:
            progress(step + 1, steps)
    if not jumps:
        raise TextTooShort(
            "no batch has two positions, of which a batch normalisation takes its statistics; give longer text"
        )
    return jumps, rows
