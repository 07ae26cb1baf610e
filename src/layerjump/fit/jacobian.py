"""The Jacobian lens: J_l, the mean first-order effect of a state at level l on level L, by backward passes.

    J_l = mean over sequences, mean over sources t, sum over targets t' ≥ t, of ∂h_L(t') / ∂h_l(t)

Sources and targets are the same positions: all but the first few, among which are attention sinks unlike any other, and
a sequence's last, which predicts nothing in it. The definition is that of "Verbalizable Representations Form a
Global Workspace in Language Models" (2026), whose lenses start at level 1; here level 0 has one too.

One backward pass gives one row of J, for all levels at once: a cotangent that is one at an output coordinate, at all
targets, comes back to a source as the sum over the targets it reaches, and in a causal model these are its own position
and later ones. So a batch takes d backward passes, with several rows at once where a batch is small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerjump.errors import BadModel, TextTooShort
from layerjump.fit.affine import Affine
from layerjump.fit.jumps import Jumps
from layerjump.fit.reading import Reading
from layerjump.inputs.batches import Batch, Batches
from layerjump.inputs.corpus import Corpus
from layerjump.inputs.models import Model, require_model
from layerjump.inputs.positions import Positions
from layerjump.inputs.sites import Site
from layerjump.inputs.states import Recorder

TOKENS = 12_800
"""About a hundred sequences, from which on more text changes little."""
SKIP_FIRST = 16
_CELLS = 2048
"""Rows × positions that a backward pass may hold."""

Progress = Callable[[int, int], None]


def jacobian(
    model: Model,
    text: Corpus | str | Path,
    *,
    levels: Sequence[int] | None = None,
    tokens: int = TOKENS,
    skip_first: int = SKIP_FIRST,
    max_length: int = 128,
    sizes: str = "80/10/10",
    seed: int = 0,
    progress: Progress | None = None,
) -> Jumps:
    """Fit the Jacobian lens: jumps from levels (all unless told) to the last, by d backward passes a batch.

    It reads `tokens` of the fit documents, which are those of `fit` with the same `sizes` and `seed`. `progress` is
    called after each batch with the tokens done and the tokens to do.
    """
    require_model(model)
    sources = _sources(model, levels)
    reading = Reading.of(
        model,
        text,
        Positions("all", skip_first=skip_first),
        tokens=tokens,
        sizes=sizes,
        seed=seed,
        max_length=max_length,
        budget=_CELLS,
    )
    sums, n_sequences, n_sources = _run(model, reading.batches, sources, progress)
    if n_sequences == 0:
        raise TextTooShort(
            f"no sequence of {reading.corpus.name} has two positions from position {skip_first} on; give longer "
            f"documents, or a smaller skip_first"
        )
    last = Site(model.n_blocks)
    maps = {(site, last): Affine.of(sums[site] / n_sequences) for site in sources}
    settings = {"max_length": max_length, "n_prompts": n_sequences}
    return reading.jumps(maps, "jacobian", settings, n_fit=n_sources)


def _sources(model: Model, levels: Sequence[int] | None) -> list[Site]:
    if model.task != "causal":
        raise BadModel(
            f"{model.name} is a {model.task} model, but the Jacobian lens is of states that no later token reaches; "
            f"give a causal model, or fit another estimator"
        )
    chosen = sorted(set(range(model.n_blocks) if levels is None else levels))
    if not chosen or not all(0 <= level < model.n_blocks for level in chosen):
        raise BadModel(
            f"levels given are {chosen}; give some of 0 to {model.n_blocks - 1}, from which a lens leads to level "
            f"{model.n_blocks}"
        )
    return [Site(level) for level in chosen]


def _run(
    model: Model, chosen: Batches, sources: list[Site], progress: Progress | None
) -> tuple[dict[Site, Tensor], int, int]:
    """The sum of all sequences' Jacobians, in float64; how many sequences and source positions there were."""
    d = model.width
    sums = {site: torch.zeros(d, d, dtype=torch.float64) for site in sources}
    n_sequences = n_sources = done = 0
    with _frozen(model), _Graph(model.anatomy, [*sources, Site(model.n_blocks)]) as graph:
        for batch in chosen:
            counted = _counted(batch)
            if bool(counted.any()):
                for rows, site, part in _rows(model, graph, batch, counted, sources):
                    sums[site][rows] += part
            n_sequences += int(counted.any(1).sum())
            n_sources += int(counted.sum())
            done += batch.n_tokens
            if progress:
                progress(done, chosen.n_tokens)
    return sums, n_sequences, n_sources


def _counted(batch: Batch) -> Tensor:
    """(rows, longest): the positions that are sources and targets, all picks but a sequence's last token."""
    picked = torch.zeros_like(batch.attention_mask, dtype=torch.bool)
    picked[batch.row, batch.position] = True
    picked[:, :-1] &= batch.attention_mask[:, 1:].bool()
    picked[:, -1] = False
    return picked


def _rows(
    model: Model, graph: _Graph, batch: Batch, counted: Tensor, sources: list[Site]
) -> Iterator[tuple[slice, Site, Tensor]]:
    """Rows of J at each level, summed over the batch's sequences, some output coordinates at a time."""
    n, length = counted.shape
    copies = max(1, min(model.width, _CELLS // counted.numel()))
    found = graph.run_with_gradients(model, batch, copies)
    target = found[Site(model.n_blocks)]
    targets = counted.to(target.device)
    share = counted / counted.sum(1, keepdim=True).clamp_min(1)
    share = share.to(target.dtype).view(1, n * length)
    for start in range(0, model.width, copies):
        rows = slice(start, min(start + copies, model.width))
        cotangent = torch.zeros_like(target).view(copies, n, length, -1)
        for copy, coordinate in enumerate(range(rows.start, rows.stop)):
            cotangent[copy, :, :, coordinate] = targets
        gradients = torch.autograd.grad(
            target,
            [found[site] for site in sources],
            cotangent.view_as(target),
            retain_graph=rows.stop < model.width,
        )
        for site, gradient in zip(sources, gradients, strict=True):
            spread = gradient.view(copies, n * length, -1)[: rows.stop - rows.start]
            part = share.to(gradient.device) @ spread
            yield rows, site, part.squeeze(1).double().cpu()


class _Graph(Recorder):
    """Keeps whole states, as they are handed on, so that gradients come back to them."""

    @torch.enable_grad()
    def run_with_gradients(self, model: Model, batch: Batch, copies: int) -> dict[Site, Tensor]:
        """States (copies · rows, longest, d) at the sites, all copies of the batch alike."""
        self.start(batch.row)
        model.body(batch.input_ids.repeat(copies, 1), batch.attention_mask.repeat(copies, 1))
        return self.take()

    def _kept(self, site: Site, states: Tensor) -> Tensor:
        # With all weights frozen nothing wants a gradient before the first level asked for does.
        return states if states.requires_grad else states.requires_grad_()


@contextmanager
def _frozen(model: Model) -> Iterator[None]:
    """Without gradients of weights, which would cost as much again; they are as they were when the `with` ends."""
    wanted: list[Any] = [p for p in model.hf.parameters() if p.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
