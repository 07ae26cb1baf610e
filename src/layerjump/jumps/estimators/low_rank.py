"""Low-rank estimators: reduced-rank regression, OJFA, and N-NJTC in closed form and as published.

N-NJTC as published (arXiv 2409.14091) is h_L ≈ A B BN(h_l), of rank ⌊d/100⌋, trained by gradient descent on squared
error. It has no output bias, so one rank is spent on the target mean: close to the closed form (`n-njtc`) at rank 8,
far worse at rank 1. It is a baseline only. Optimiser, learning rate, steps and batches are not public: Adam, and a rate
that falls to zero, are ours. After training the normalisation is multiplied into B, which leaves two thin factors and a
bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from layerjump.data.corpus import Corpus
from layerjump.errors import BadEstimator, TextTooShort, argument
from layerjump.jumps.collect_moments import Progress
from layerjump.jumps.estimators.jacobian import fit_batches, jumps_to_last
from layerjump.jumps.estimators.least_squares import eigenvalue_cutoff, factorise_centred
from layerjump.jumps.estimators.registry import Pooling, Settings
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import Affine, SolvedMap
from layerjump.jumps.moments import Source, Target, check_moments, pool
from layerjump.jumps.scoring import r2
from layerjump.models.model import Model, capture_states
from layerjump.models.structure import Site

if TYPE_CHECKING:
    from layerjump.jumps.moments import SplitMoments


def low_rank(source: Source, targets: Sequence[Target], *, rank: int, metric: Tensor | None = None) -> list[Affine]:
    """The maps of rank at most r, with an intercept, that minimise Σ‖G^½ (Wx + b − y)‖².

    W = G^-½ V Vᵀ G^½ W_ols, where V holds the r leading eigenvectors of G^½ (W_ols Σ W_olsᵀ) G^½.
    The metric G, (dy, dy) and positive semi-definite, weighs the errors of y: for a lens, by their
    effect on the logits. Default: the identity. Where G is singular its null space keeps y's mean.
    """
    for target in targets:
        dx, dy = target.cross.shape
        if not 1 <= rank <= min(dx, dy):
            largest = min(dx, dy)
            raise BadEstimator(f"expected a {argument('rank')} from 1 to {largest} for a map {dx} → {dy}, got {rank}")
        if metric is not None and tuple(metric.shape) != (dy, dy):
            raise BadEstimator(f"expected a metric of shape {(dy, dy)}, got {tuple(metric.shape)}")
    if metric is not None and not torch.isfinite(metric).all():
        raise BadEstimator("expected a finite metric, got one with NaN or infinite values")
    factor = factorise_centred(source)
    roots = None if metric is None else _square_roots(metric)
    maps = []
    for target in targets:
        weight = factor.solve(target.cross).mT
        explained = weight @ target.cross  # W Σ Wᵀ, because W Σ = crossᵀ at the optimum
        if roots is None:
            up = _leading_eigenvectors(explained, rank)
            down = up.mT @ weight
        else:
            root, inverse = roots
            basis = _leading_eigenvectors(root @ explained @ root, rank)
            up, down = inverse @ basis, (basis.mT @ root) @ weight
        maps.append(Affine.of(up, down, bias=target.mean - up @ (down @ source.mean)))
    return maps


def truncate_rank(jump: Affine, rank: int, source: Source, target: Target) -> Affine:
    """Return the fit of a lower rank out of one by `low_rank` on the same moments: leading directions are nested."""
    up, down = jump.factors
    up, down = up[:, -rank:], down[-rank:]
    return Affine.of(up, down, bias=target.mean - up @ (down @ source.mean))


def n_njtc(source: Source, targets: Sequence[Target]) -> list[Affine]:
    """Maps of rank d // 100 with an intercept: the closed form of "N-NJTC" (arXiv 2409.14091).

    The paper normalises the input by batch statistics and trains by gradient descent. A
    least-squares fit with an intercept is the same map whether its input is shifted and rescaled
    or not, so no normalisation is needed here.
    """
    return low_rank(source, targets, rank=njtc_rank(len(source.mean)))


def njtc_rank(d: int) -> int:
    """Return the rank of the N-NJTC paper: d / 100 rounded down, and at least 1."""
    return max(1, d // 100)


def solve_ojfa(moments: SplitMoments, settings: Settings, model: Model | None = None) -> Iterator[SolvedMap]:
    """Yield one low-rank map, shared by all pairs of a run, for each of its pairs."""
    (target,) = {target for _, target in moments.fit.pairs}
    fit, validation = (
        [(split.source(site), split.target(site, target)) for site in moments.fit.sources]
        for split in (moments.fit, moments.validation)
    )
    jump, _ = ojfa(
        [source for source, _ in fit],
        [target for _, target in fit],
        rank=njtc_rank(moments.info.width) if settings.rank is None else settings.rank,
        validation=validation,
        pooling=settings.ojfa_pooling or "pooled",
    )
    for pair in moments.fit.pairs:
        yield SolvedMap(pair, jump, moments.fit.features)


def ojfa(
    sources: Sequence[Source],
    targets: Sequence[Target],
    *,
    rank: int,
    validation: Sequence[tuple[Source, Target]] | None = None,
    pooling: Pooling = "best-level",
) -> tuple[Affine, int | None]:
    """Return one low-rank map for all levels, as in "OJFA" (arXiv 2504.13984), and the level it was fitted at.

    Level k's rows are in `sources[k]`, paired with the common target in `targets[k]`. The paper
    keeps the map of one level, picked by a criterion whose formula is not public, so both ways
    here are ours: "best-level" keeps the level's map with the best mean R² (uniform) over all
    levels of the validation split; "pooled" fits one map to the rows of all levels together (its
    level is None). Either way the intercept is shared.
    """
    if not sources or len(sources) != len(targets):
        raise BadEstimator(
            f"expected one source and one target for every level, got {len(sources)} sources and {len(targets)} targets"
        )
    if pooling == "pooled":
        source, target = pool(list(zip(sources, targets, strict=True)))
        return low_rank(source, [target], rank=rank)[0], None
    if pooling != "best-level":
        raise BadEstimator(f"expected {argument('ojfa_pooling')} 'best-level' or 'pooled', got {pooling!r}")
    if not validation:
        raise BadEstimator("best-level needs the moments of a validation split to choose the level")
    jumps = []
    for source, target in zip(sources, targets, strict=True):
        check_moments(source, [target])
        jumps += low_rank(source, [target], rank=rank)
    scores = [sum(r2(jump, *pair).uniform for pair in validation) / len(validation) for jump in jumps]
    best = max(range(len(jumps)), key=scores.__getitem__)
    return jumps[best], best


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


def _leading_eigenvectors(matrix: Tensor, rank: int) -> Tensor:
    """The eigenvectors of the `rank` largest eigenvalues, as columns."""
    _, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    return vectors[:, -rank:].clone()


def _square_roots(metric: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric square root of a PSD matrix, and its pseudo-inverse."""
    values, vectors = torch.linalg.eigh((metric + metric.mT).double() / 2)
    if values[0] < -1e-6 * values[-1].abs():
        raise BadEstimator(
            f"expected a positive semi-definite metric, such as EᵀE of an unembedding E, got one with the eigenvalue "
            f"{float(values[0]):g}"
        )
    keep = values > eigenvalue_cutoff(values)
    values, vectors = values[keep].sqrt(), vectors[:, keep]
    return (vectors * values) @ vectors.mT, (vectors / values) @ vectors.mT
