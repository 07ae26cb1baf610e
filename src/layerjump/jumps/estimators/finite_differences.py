"""Least squares on differences: what a push of a given size at level l changes at level L, by forward passes alone.

    A_l = argmin over A of the mean of ‖ F(h + δ) − F(h) − A δ ‖²

F is the rest of the model and δ is Gaussian noise, the same in all directions, whose length is `noise` times the spread
of the states at the level (the root mean square distance from their mean). A small push measures the derivative: as
`noise` goes to 0, A goes to the mean Jacobian of a position's own last level. A push as large as the differences
between states averages the derivative over their neighbourhood, as least squares over states does. Both passes are
forward passes, so quantised models and kernels without gradients have this lens too.

All positions are pushed at once, each by noise of its own: pushes of other positions are independent of a position's
own, so they add scatter to its response, and no bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from layerjump.data.batches import Batch
from layerjump.data.corpus import Corpus
from layerjump.data.positions import Positions
from layerjump.errors import BadEstimator, TextTooShort, argument
from layerjump.jumps.collect_moments import Progress
from layerjump.jumps.estimators.jacobian import check_levels, fit_batches, jumps_to_last
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import Affine
from layerjump.models.hooks import Call, Capture, record_calls
from layerjump.models.model import Model, require_model
from layerjump.models.sites import Site

NOISE = 0.1
TOKENS = 12_800
SKIP_FIRST = 4
"""The first positions are attention sinks: their states are unlike any others, and so is their scale."""


@torch.no_grad()
def fit_finite_differences(
    model: Model,
    text: Corpus | str | Path,
    *,
    noise: float = NOISE,
    levels: Sequence[int] | None = None,
    tokens: int = TOKENS,
    skip_first: int = SKIP_FIRST,
    max_length: int = 128,
    split: str = "80/10/10",
    seed: int = 0,
    progress: Progress | None = None,
) -> Jumps:
    """Fit jumps from levels to the last one by least squares on differences of states under noise.

    Each batch runs once as it is, and for each level once more from there on, with noise. A map has d² numbers, so a
    text of fewer than several times d tokens leaves much noise in it.

    Args:
        model: A causal model.
        text: A corpus, or anything that `load_text` reads.
        noise: Length of the noise in units of the spread of the states at the level.
        levels: Levels to fit a lens at. Default: all but the last.
        tokens: Number of tokens of the fit split to run.
        skip_first: Number of positions at the start of each sequence that are left out.
        max_length: Longest sequence; longer documents are cut.
        split: Shares or numbers of documents in the splits; `fit` with the same split and seed fits the same documents.
        seed: Seed of the split and of the noise.
        progress: Called after each batch with the tokens done and the tokens to do.
    """
    require_model(model)
    if not 0 < noise < float("inf"):
        raise BadEstimator(f"expected {argument('noise')} above 0, such as {NOISE}, got {noise}")
    indices = check_levels(model, levels)
    sources, last = [Site(level) for level in indices], Site(model.n_blocks)
    positions = Positions("all", skip_first=skip_first)
    info, batches = fit_batches(
        model, text, positions, tokens=tokens, split=split, seed=seed, max_length=max_length, max_batch_tokens=2048
    )
    d = model.d_model
    generator = torch.Generator().manual_seed(seed)
    gram = {site: torch.zeros(d, d, dtype=torch.float64) for site in sources}
    cross = {site: torch.zeros(d, d, dtype=torch.float64) for site in sources}
    n_fit = n_tokens = 0
    for batch in batches:
        calls, at_last = _record(model, batch)
        for site in sources:
            push, response = _respond(model, batch, calls, at_last, site.index, noise, generator)
            gram[site] += push.mT @ push
            cross[site] += response.mT @ push
        n_fit += len(batch.row)
        n_tokens += batch.n_tokens
        if progress:
            progress(n_tokens, batches.n_tokens)
    if n_fit <= d:
        raise TextTooShort(
            f"expected more positions than the width {d} of the states, got {n_fit}; use more text, or more "
            f"{argument('tokens')}"
        )
    maps = {(site, last): Affine.of(torch.linalg.solve(gram[site], cross[site], left=False)) for site in sources}
    settings = {"max_length": max_length, "noise": noise}
    return jumps_to_last(maps, info, "differences", settings, n_fit=n_fit)


def _record(model: Model, batch: Batch) -> tuple[list[Call], Tensor]:
    """The calls of all blocks in a plain pass, and the states (rows, positions, d) at the last level."""
    last = Site(model.n_blocks)
    with record_calls(model.structure) as calls, Capture(model.structure, [last]) as capture:
        capture.start()
        model.run_body(batch.input_ids, batch.attention_mask)
        return calls, capture.take()[last]


def _respond(
    model: Model, batch: Batch, calls: list[Call], at_last: Tensor, level: int, noise: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Noise at the picked positions of a level, and what it changes at the same positions of the last level."""
    states = calls[level].states
    row, position = batch.row.to(states.device), batch.position.to(states.device)
    picked = states[row, position]
    spread = (picked - picked.mean(0)).square().mean().sqrt()
    push = torch.randn(picked.shape, generator=generator).to(picked) * noise * spread
    pushed = states.clone()
    pushed[row, position] += push
    # What was added, not what was drawn: rounding of a small push next to a large state is no small part of it.
    push = pushed[row, position].double() - picked.double()
    for block, call in zip(model.structure.blocks[level:], calls[level:], strict=True):
        pushed = call.repeat(block, pushed)
    row, position = row.to(pushed.device), position.to(pushed.device)
    response = pushed[row, position].double() - at_last[row, position].double()
    return push.cpu(), response.cpu()
