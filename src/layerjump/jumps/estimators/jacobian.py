"""The Jacobian lens: the mean first-order effect of a state at level l on level L, by backward passes.

    J_l = mean over sequences, mean over sources t, sum over targets t' ≥ t, of ∂h_L(t') / ∂h_l(t)

Sources and targets are the same positions: all but the first few, which include attention sinks unlike any other, and
a sequence's last, which predicts nothing in it. The definition is that of "Verbalizable Representations Form a Global
Workspace in Language Models" (2026), whose lenses start at level 1; here level 0 has one too. One backward pass gives
one row of J, for all levels at once: a cotangent that is one at an output coordinate, at all targets, comes back to a
source as the sum over the targets it reaches, and in a causal model these are its own position and later ones. So a
batch takes d backward passes, with several rows at once where a batch is small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerjump.data.batches import Batch, Batches, make_batches
from layerjump.data.corpus import Corpus, load_text, split_indices
from layerjump.data.positions import Positions
from layerjump.errors import BadModel, TextTooShort, argument
from layerjump.jumps.collect_moments import Progress
from layerjump.jumps.jumps import JumpInfo, Jumps, Provenance, RunInfo
from layerjump.jumps.maps import Affine
from layerjump.jumps.moments_of_splits import MAX_LENGTH
from layerjump.models.hooks import Capture
from layerjump.models.model import Model, require_model
from layerjump.models.sites import Pair, Site
from layerjump.models.weight_forms import require_gradients

TOKENS = 12_800
"""About a hundred sequences; more text changes the Jacobian lens little."""
SKIP_FIRST = 16
_MAX_POSITIONS = 2048
"""Rows × positions that a backward pass may hold."""


def fit_jacobian(
    model: Model,
    text: Corpus | str | Path,
    *,
    levels: Sequence[int] | None = None,
    tokens: int = TOKENS,
    skip_first: int = SKIP_FIRST,
    max_length: int = 128,
    split: str = "80/10/10",
    seed: int = 0,
    progress: Progress | None = None,
) -> Jumps:
    """Fit the Jacobian lens: jumps from every level to the last, by d backward passes for each batch.

    Args:
        model: A causal model.
        text: A corpus, or anything that `load_text` reads.
        levels: Levels to fit a lens at. Default: all but the last.
        tokens: Number of tokens of the fit split to run.
        skip_first: Number of positions at the start of each sequence that are left out.
        max_length: Longest sequence; longer documents are cut.
        split: Shares or numbers of documents in the splits; `fit` with the same split and seed fits the same documents.
        seed: Seed of the split.
        progress: Called after each batch with the tokens done and the tokens to do.
    """
    require_model(model)
    indices = check_levels(model, levels)
    sources, last = [Site(level) for level in indices], Site(model.n_blocks)
    require_gradients(model.hf)
    positions = Positions("all", skip_first=skip_first)
    info, batches = fit_batches(
        model,
        text,
        positions,
        tokens=tokens,
        split=split,
        seed=seed,
        max_length=max_length,
        max_batch_tokens=_MAX_POSITIONS,
    )
    d = model.d_model
    sums = {site: torch.zeros(d, d, dtype=torch.float64) for site in sources}
    n_sequences = n_sources = n_tokens = 0
    with _frozen(model), _Graph(model.structure, [*sources, last]) as graph:
        for batch in batches:
            # (rows, longest): the positions that are sources and targets, all picks but a sequence's last token.
            counted = torch.zeros_like(batch.attention_mask, dtype=torch.bool)
            counted[batch.row, batch.position] = True
            counted[:, :-1] &= batch.attention_mask[:, 1:].bool()
            counted[:, -1] = False
            if bool(counted.any()):
                for rows, site, part in _jacobian_rows(model, graph, batch, counted, sources):
                    sums[site][rows] += part
            n_sequences += int(counted.any(1).sum())
            n_sources += int(counted.sum())
            n_tokens += batch.n_tokens
            if progress:
                progress(n_tokens, batches.n_tokens)
    if n_sequences == 0:
        raise TextTooShort(
            f"no sequence of {info.text} has two positions from position {skip_first} on; use longer documents, or a "
            f"smaller {argument('skip_first')}"
        )
    maps = {(site, last): Affine.of(sums[site] / n_sequences) for site in sources}
    settings = {"max_length": max_length, "n_prompts": n_sequences}
    return jumps_to_last(maps, info, "jacobian", settings, n_fit=n_sources)


def check_levels(model: Model, levels: Sequence[int] | None) -> list[int]:
    """The levels that a lens by derivatives leads from, in order; raise `BadModel` for others, and other models."""
    if model.task != "causal":
        raise BadModel(
            f"expected a causal model for a lens by derivatives, whose states no later token reaches, got "
            f"{model.name}, a {model.task} model; use another estimator"
        )
    indices = sorted(set(range(model.n_blocks) if levels is None else levels))
    if not indices or not all(0 <= level < model.n_blocks for level in indices):
        raise BadModel(
            f"expected {argument('levels')} from 0 to {model.n_blocks - 1}, from which a lens leads to level "
            f"{model.n_blocks}, got {indices}"
        )
    return indices


def fit_batches(
    model: Model,
    text: Corpus | str | Path,
    positions: Positions,
    *,
    tokens: int | None,
    split: str,
    seed: int,
    max_length: int = MAX_LENGTH,
    max_batch_tokens: int = 1024,
) -> tuple[RunInfo, Batches]:
    """Cut the documents that `fit` would fit on into batches."""
    corpus = text if isinstance(text, Corpus) else load_text(text)
    batches = make_batches(
        corpus,
        model.tokenization,
        positions,
        documents=split_indices(len(corpus.documents), split, seed=seed).fit,
        seed=seed,
        tokens=tokens,
        max_length=max_length,
        max_batch_tokens=max_batch_tokens,
    )
    info = RunInfo.of(model, corpus, positions, tokens=batches.n_tokens, split=split, seed=seed)
    return info, batches


def jumps_to_last(
    maps: Mapping[Pair, Affine],
    info: RunInfo,
    estimator: str,
    settings: dict[str, Any],
    *,
    n_fit: int,
    rank: int | None = None,
) -> Jumps:
    """Make jumps of maps that are not scored."""
    provenance = Provenance(**vars(info), n_fit=n_fit, estimator=estimator, settings=settings)
    infos = {pair: JumpInfo(*pair, estimator, rank=rank) for pair in maps}
    return Jumps.from_maps(maps, infos, provenance)


def _jacobian_rows(
    model: Model, graph: _Graph, batch: Batch, counted: Tensor, sources: list[Site]
) -> Iterator[tuple[slice, Site, Tensor]]:
    """Rows of J at each level, summed over the batch's sequences, some output coordinates at a time."""
    n, length = counted.shape
    copies = max(1, min(model.d_model, _MAX_POSITIONS // counted.numel()))
    states = graph.run_with_gradients(model, batch, copies)
    target = states[Site(model.n_blocks)]
    targets = counted.to(target.device)
    share = counted / counted.sum(1, keepdim=True).clamp_min(1)
    share = share.to(target.dtype).view(1, n * length)
    for start in range(0, model.d_model, copies):
        rows = slice(start, min(start + copies, model.d_model))
        cotangent = torch.zeros_like(target).view(copies, n, length, -1)
        for copy, coordinate in enumerate(range(rows.start, rows.stop)):
            cotangent[copy, :, :, coordinate] = targets
        gradients = torch.autograd.grad(
            target,
            [states[site] for site in sources],
            cotangent.view_as(target),
            retain_graph=rows.stop < model.d_model,
        )
        for site, gradient in zip(sources, gradients, strict=True):
            by_position = gradient.view(copies, n * length, -1)[: rows.stop - rows.start]
            part = share.to(gradient.device) @ by_position
            yield rows, site, part.squeeze(1).double().cpu()


class _Graph(Capture):
    """Records whole states without detaching them, so that gradients flow back to them."""

    @torch.enable_grad()
    def run_with_gradients(self, model: Model, batch: Batch, copies: int) -> dict[Site, Tensor]:
        """Return states (copies · rows, longest, d) at the sites, all copies of the batch alike."""
        self.start()
        model.run_body(batch.input_ids.repeat(copies, 1), batch.attention_mask.repeat(copies, 1))
        return self.take()

    def _select(self, site: Site, states: Tensor) -> Tensor:
        # With all weights frozen, nothing before the first recorded level requires a gradient.
        return states if states.requires_grad else states.requires_grad_()


@contextmanager
def _frozen(model: Model) -> Iterator[None]:
    """Switch off gradients of the weights, which would cost as much again; restored on exit."""
    trainable: list[Any] = [p for p in model.hf.parameters() if p.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
