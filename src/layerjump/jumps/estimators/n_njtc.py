"""N-NJTC: low-rank maps of rank ⌊d/100⌋ onto the last level, in closed form and as published.

N-NJTC as published (arXiv 2409.14091) is h_L ≈ A B BN(h_l), trained by gradient descent on squared error. It has no
output bias, so one rank is spent on the target mean: close to the closed form (`n-njtc`) at rank 8, far worse at rank
1. It is a baseline only. Optimiser, learning rate, steps and batches are not public: Adam, and a rate that falls to
zero, are ours. After training the normalisation is multiplied into B, which leaves two thin factors and a bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from layerjump.data.corpus import Corpus
from layerjump.errors import BadEstimator, TextTooShort, argument
from layerjump.jumps.collect_moments import Progress
from layerjump.jumps.estimators.jacobian import fit_batches, jumps_to_last
from layerjump.jumps.estimators.low_rank import low_rank
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import Affine
from layerjump.jumps.moments import Source, Target
from layerjump.models.model import Model, capture_states
from layerjump.models.sites import Site


def n_njtc(source: Source, targets: Sequence[Target]) -> Iterator[Affine]:
    """Maps of rank d // 100 with an intercept: the closed form of "N-NJTC" (arXiv 2409.14091).

    The paper normalises the input by batch statistics and trains by gradient descent. A
    least-squares fit with an intercept is the same map whether its input is shifted and rescaled
    or not, so no normalisation is needed here.
    """
    return low_rank(source, targets, rank=njtc_rank(len(source.mean)))


def njtc_rank(d: int) -> int:
    """Return the rank of the N-NJTC paper: d / 100 rounded down, and at least 1."""
    return max(1, d // 100)


def train_n_njtc(
    model: Model,
    text: Corpus | str | Path,
    *,
    steps: int = 400,
    rank: int | None = None,
    learning_rate: float = 1e-2,
    tokens: int | None = None,
    split: str = "80/10/10",
    seed: int = 0,
    progress: Progress | None = None,
) -> Jumps:
    """Train N-NJTC as published: one low-rank map per level, all on the same batches.

    Args:
        model: The model to run.
        text: A corpus, or anything that `load_text` reads.
        steps: Number of optimiser steps; a step is a batch, at all positions but the first.
        rank: Rank of the maps. Default: d // 100.
        learning_rate: Peak learning rate.
        tokens: Number of tokens of the fit split to run. Default: all.
        split: Shares or numbers of documents in the splits; `fit` with the same split and seed fits the same documents.
        seed: Seed of the split, of the initial weights and of the order of batches.
        progress: Called after each step with the steps done and the steps to do.
    """
    if steps < 1:
        raise BadEstimator(f"expected {argument('steps')} of 1 or more, got {steps}")
    rank = njtc_rank(model.d_model) if rank is None else rank
    if not 1 <= rank <= model.d_model:
        raise BadEstimator(f"expected a {argument('rank')} from 1 to {model.d_model}, got {rank}")
    positions = model.prediction_positions
    info, batches = fit_batches(model, text, positions, tokens=tokens, split=split, seed=seed)
    last = Site(model.n_blocks)
    sites = [Site(level) for level in range(model.n_blocks)]
    jumps: dict[Site, LowRankBatchNorm] = {}
    optimiser: Any = None
    n_rows, variance = 0, 1.0
    for step in range(steps):
        epoch, offset = divmod(step, len(batches))
        index = int(np.random.default_rng([seed, epoch]).permutation(len(batches))[offset])
        states = next(iter(capture_states(model, [batches[index]], [*sites, last]))).at
        if len(states[last]) < 2:
            continue  # batch normalisation needs two rows
        target = states[last].float()
        if not jumps:
            generator, scale = torch.Generator().manual_seed(seed), target.std(0)
            jumps = {site: LowRankBatchNorm(model.d_model, rank, scale.cpu(), generator).to(scale) for site in sites}
            variance = float(scale.square().mean().clamp_min(1e-12))
            parameters = [p for jump in jumps.values() for p in jump.parameters()]
            optimiser = torch.optim.Adam(parameters, lr=learning_rate)
        for group in optimiser.param_groups:
            group["lr"] = learning_rate * min(1.0, 2 * (1 - step / steps))
        with torch.enable_grad():
            for site, jump in jumps.items():
                error = jump(states[site].to(target)) - target
                # One scale for all coordinates: the learning rate then suits states of any size.
                (error.square().mean() / variance).backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        n_rows += len(target)
        if progress:
            progress(step + 1, steps)
    if not jumps:
        raise TextTooShort("no batch has two positions, which batch normalisation needs; use longer text")
    maps = {(site, last): jump.cpu().eval().fold() for site, jump in jumps.items()}
    settings = {"steps": steps, "rank": rank, "rate": learning_rate}
    return jumps_to_last(maps, info, "n-njtc-trained", settings, n_fit=n_rows, rank=rank)


class LowRankBatchNorm(nn.Module):
    """One level's N-NJTC map while it is trained; the output is in units of the target's standard deviation."""

    def __init__(self, width: int, rank: int, scale: Tensor, generator: torch.Generator) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.down = nn.Parameter(torch.randn(rank, width, generator=generator) / width**0.5)
        self.up = nn.Parameter(torch.randn(width, rank, generator=generator) / rank**0.5)
        self.scale = nn.Buffer(scale)

    def forward(self, rows: Tensor) -> Tensor:
        return self.norm(rows) @ self.down.mT @ self.up.mT * self.scale

    @torch.no_grad()
    def fold(self) -> Affine:
        """Return the trained map, the normalisation multiplied into its factors."""
        mean, variance = self.norm.running_mean, self.norm.running_var
        assert mean is not None
        assert variance is not None
        gain = self.norm.weight / (variance + self.norm.eps).sqrt()
        up = self.up * self.scale[:, None]
        bias = up @ (self.down @ (self.norm.bias - mean * gain))
        return Affine.of(up, self.down * gain, bias=bias)
