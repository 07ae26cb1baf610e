"""Estimators that need gradients: the Jacobian lens and N-NJTC as published.

The fit documents as they are, for estimators that need gradients: sums will not do for these.

The Jacobian lens: J_l, the mean first-order effect of a state at level l on level L, by backward passes.

    J_l = mean over sequences, mean over sources t, sum over targets t' ≥ t, of ∂h_L(t') / ∂h_l(t)

Sources and targets are the same positions: all but the first few, among which are attention sinks unlike any other, and
a sequence's last, which predicts nothing in it. The definition is that of "Verbalizable Representations Form a
Global Workspace in Language Models" (2026), whose lenses start at level 1; here level 0 has one too.

One backward pass gives one row of J, for all levels at once: a cotangent that is one at an output coordinate, at all
targets, comes back to a source as the sum over the targets it reaches, and in a causal model these are its own position
and later ones. So a batch takes d backward passes, with several rows at once where a batch is small.

N-NJTC as published (arXiv 2409.14091): h_L ≈ A B BN(h_l), of rank ⌊d/100⌋, by gradient descent on squared error.

The closed form (`n-njtc`) is the best map of that rank with an intercept. This one adds nothing after the product, so
that the target's mean costs it a rank: it comes close from below where there are several, and is far behind at rank 1.
It is here to be compared with. Optimiser, rate, steps and batches are not public: Adam, and a rate that falls to
nothing, are ours. When training is over, the normalisation is multiplied into B, which leaves two thin factors and a
bias.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from layerjump import __version__
from layerjump.data.batches import Batch, Batches, make_batches
from layerjump.data.corpus import Corpus, load_text, split_documents
from layerjump.data.positions import MASKED_SHARE, Positions
from layerjump.errors import BadEstimator, BadModel, TextTooShort
from layerjump.jumps.estimators.low_rank import njtc_rank
from layerjump.jumps.jumps import JumpInfo, Jumps, Provenance
from layerjump.jumps.maps import Affine
from layerjump.jumps.pairs import Pair
from layerjump.models.activations import capture_states
from layerjump.models.fingerprint import describe_model
from layerjump.models.hooks import Capture
from layerjump.models.model import Model, require_model
from layerjump.models.structure import Site


@dataclass(frozen=True)
class Reading:
    """What an estimator reads: the documents that `fit` would fit on, with the same sizes and seed."""

    model: Model
    corpus: Corpus
    where: Positions
    split: str
    seed: int
    batches: Batches

    @classmethod
    def of(
        cls,
        model: Model,
        text: Corpus | str | Path,
        where: Positions,
        *,
        tokens: int | None,
        split: str,
        seed: int,
        **cut: Any,
    ) -> Reading:
        """Cut the fit documents of a text into batches; `cut` is handed on to `batches`."""
        corpus = text if isinstance(text, Corpus) else load_text(text)
        documents = split_documents(len(corpus.documents), split, seed=seed).fit
        found = make_batches(
            corpus,
            model.tokenization,
            where,
            documents=documents,
            seed=seed,
            tokens_wanted=tokens,
            **cut,
        )
        return cls(model, corpus, where, split, seed, found)

    def jumps(
        self,
        maps: Mapping[Pair, Affine],
        estimator: str,
        settings: dict[str, Any],
        *,
        n_fit: int,
        rank: int | None = None,
    ) -> Jumps:
        """The maps with all that is known of how they were made."""
        known = Provenance(
            **describe_model(self.model),
            text=self.corpus.name,
            text_sha256=self.corpus.sha256,
            tokens=self.batches.n_tokens,
            positions=str(self.where),
            skip_first=self.where.skip_first,
            special=self.where.special,
            split=self.split,
            n_fit=n_fit,
            n_select=0,
            n_test=0,
            seed=self.seed,
            estimator=estimator,
            settings=settings,
            layerjump=__version__,
        )
        return Jumps.of(maps, {pair: JumpInfo(*pair, estimator, rank=rank) for pair in maps}, known)


TOKENS = 12_800
"""About a hundred sequences, from which on more text changes little."""
SKIP_FIRST = 16
_CELLS = 2048
"""Rows × positions that a backward pass may hold."""

Progress = Callable[[int, int], None]


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
        split=split,
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
    d = model.d_model
    sums = {site: torch.zeros(d, d, dtype=torch.float64) for site in sources}
    n_sequences = n_sources = done = 0
    with _frozen(model), _Graph(model.structure, [*sources, Site(model.n_blocks)]) as graph:
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
    copies = max(1, min(model.d_model, _CELLS // counted.numel()))
    found = graph.run_with_gradients(model, batch, copies)
    target = found[Site(model.n_blocks)]
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
            [found[site] for site in sources],
            cotangent.view_as(target),
            retain_graph=rows.stop < model.d_model,
        )
        for site, gradient in zip(sources, gradients, strict=True):
            spread = gradient.view(copies, n * length, -1)[: rows.stop - rows.start]
            part = share.to(gradient.device) @ spread
            yield rows, site, part.squeeze(1).double().cpu()


class _Graph(Capture):
    """Keeps whole states, as they are handed on, so that gradients come back to them."""

    @torch.enable_grad()
    def run_with_gradients(self, model: Model, batch: Batch, copies: int) -> dict[Site, Tensor]:
        """States (copies · rows, longest, d) at the sites, all copies of the batch alike."""
        self.start()
        model.run_body(batch.input_ids.repeat(copies, 1), batch.attention_mask.repeat(copies, 1))
        return self.take()

    def _select(self, site: Site, states: Tensor) -> Tensor:
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


NAME = "n-njtc-trained"


class NarrowMap(nn.Module):
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
    split: str = "80/10/10",
    seed: int = 0,
    progress: Progress | None = None,
) -> Jumps:
    """Train one narrow jump a level, all on the same batches; a step is a batch, at all positions but the first."""
    if steps < 1:
        raise BadEstimator(f"steps given is {steps}; give 1 or more")
    rank = njtc_rank(model.d_model) if rank is None else rank
    if not 1 <= rank <= model.d_model:
        raise BadEstimator(f"rank given is {rank}; give 1 to the width, {model.d_model}")
    where = Positions.parse(MASKED_SHARE) if model.masked else Positions("all")
    reading = Reading.of(model, text, where, tokens=tokens, split=split, seed=seed)
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
) -> tuple[dict[Site, NarrowMap], int]:
    last = Site(model.n_blocks)
    sites = [Site(level) for level in range(model.n_blocks)]
    jumps: dict[Site, NarrowMap] = {}
    optimiser: Any = None
    rows, size = 0, 1.0
    for step in range(steps):
        turn, place = divmod(step, len(found))
        index = int(np.random.default_rng([seed, turn]).permutation(len(found))[place])
        at = next(iter(capture_states(model, [found[index]], [*sites, last]))).at
        if len(at[last]) < 2:
            continue  # a batch normalisation wants two rows
        if not jumps:
            draw, spread = torch.Generator().manual_seed(seed), at[last].float().std(0)
            jumps = {
                site: NarrowMap(model.d_model, rank, spread.cpu(), draw).to(spread)
                for site in sites
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
