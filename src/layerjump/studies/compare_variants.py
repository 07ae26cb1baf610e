"""Compare variants of a model (blocks skipped, sub-modules replaced) with the model itself."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Annotated

import torch
from torch import Tensor

from layerjump.data.batches import Batches
from layerjump.data.positions import Positions
from layerjump.interventions.rerun_from_level import Rerun
from layerjump.metrics.bootstrap import mean_interval
from layerjump.metrics.logits import Agreement, ReferenceLogits, agreement, chunk_rows, reference_logits, upcast
from layerjump.metrics.timing import read_clock
from layerjump.models.model import Model
from layerjump.studies.results import Column, Interval, Record
from layerjump.studies.setup import Progress, Setup

log = logging.getLogger("layerjump")

CELLS = 1024
"""Tokens and padding of one batch: all its levels are in memory at once."""


class VariantScores(Record):
    """How well a variant predicts what the model predicts."""

    p1: Annotated[Interval, Column("p@1{}")]
    p5: Annotated[float, Column("p@5")]
    p10: Annotated[float, Column("p@10")]
    surprisal: float
    kl: float


class Variants:
    """Predictions of variants of a model at the picks, compared with the model's own.

    For the ordinary run of each batch (`reruns`), `add` the states of every variant at level L.
    """

    def __init__(self, model: Model) -> None:
        model.require_predictions()
        self.model = model
        self._chunk = chunk_rows(model)
        self._references: list[tuple[slice, ReferenceLogits]] = []
        self._documents: list[Tensor] = []
        self._agreements: dict[Hashable, list[Agreement]] = defaultdict(list)

    @torch.no_grad()
    def start(self, rerun: Rerun) -> None:
        """Compute the model's own predictions of a batch."""
        states = rerun.pick(rerun.levels[-1])
        chunks = [slice(start, start + self._chunk) for start in range(0, len(states), self._chunk)]
        self._references = [(chunk, reference_logits(upcast(self.model.logits(states[chunk])))) for chunk in chunks]
        self._documents.append(rerun.batch.document)

    def reruns(self, batches: Batches, progress: Progress | None = None) -> Iterator[Rerun]:
        """Yield the ordinary run of each batch, started."""
        done = 0
        for batch in batches:
            rerun = Rerun(self.model, batch)
            self.start(rerun)
            yield rerun
            done += batch.n_tokens
            if progress:
                progress(done, batches.n_tokens)

    @torch.no_grad()
    def add(self, name: Hashable, states: Tensor, logits: Callable[[Tensor], Tensor] | None = None) -> None:
        """Score the states of a variant, one row a pick; `logits` reads them where they are not of level L."""
        logits = logits or self.model.logits
        for chunk, reference in self._references:
            scores = agreement(upcast(logits(states[chunk])), reference)
            self._agreements[name].append(Agreement(*(field.cpu() for field in scores)))

    def mean_kl(self, name: Hashable) -> float:
        """Return the mean KL divergence of a variant from the model."""
        return float(torch.cat([scores.kl for scores in self._agreements[name]]).double().mean())

    def hits(self, name: Hashable, k: int = 1) -> Tensor:
        """Return whether the best token of a variant is among the model's k best, example by example."""
        return torch.cat([scores.rank < k for scores in self._agreements[name]])

    def precision(self, name: Hashable, k: int = 1) -> float:
        """Return how often the best token of a variant is among the model's k best."""
        return float(self.hits(name, k).double().mean())

    def scores(self, name: Hashable, *, seed: int = 0) -> VariantScores:
        """Return the mean scores of a variant; the interval resamples documents."""
        documents = torch.cat(self._documents).numpy()
        surprisal = torch.cat([scores.surprisal for scores in self._agreements[name]]).double()
        return VariantScores(
            p1=Interval(*map(float, mean_interval(self.hits(name).numpy(), documents, seed=seed))),
            p5=self.precision(name, 5),
            p10=self.precision(name, 10),
            surprisal=float(surprisal.mean()),
            kl=self.mean_kl(name),
        )


def small_batches(
    setup: Setup, share: float = 1.0, *, part: str = "test", positions: Positions | None = None
) -> Batches:
    """Return small batches with a share of the run's `rerun_tokens` and of its `n_test_positions`."""
    return setup.batches(
        tokens=max(1, int(share * setup.settings.rerun_tokens)),
        picks=max(1, int(share * setup.settings.n_test_positions)),
        part=part,
        positions=positions,
        max_batch_tokens=CELLS,
    )


class Cost(Record):
    """What a study of variants takes."""

    tokens: int
    examples: int
    block_runs: int
    """How many blocks each batch runs through."""
    unembeddings: Annotated[int, Column("readings")]
    """How many times the logits of each example are computed."""
    expected_seconds: float


def announce_cost(study: str, model: Model, batches: Batches, *, block_runs: int, unembeddings: int) -> Cost:
    """Time one batch, log the expected time of all of them, and return it."""
    rerun = Rerun(model, batches[0])
    variants = Variants(model)
    start = read_clock()
    states = rerun.from_level(0)
    after_blocks = read_clock()
    variants.start(rerun)
    variants.add("exact", rerun.pick(states))
    after_logits = read_clock()
    block = (after_blocks - start) / model.n_blocks / rerun.batch.n_tokens
    # `start` computes logits too, so this is the time of two.
    unembedding = (after_logits - after_blocks) / 2 / rerun.batch.n_picks
    seconds = block_runs * block * batches.n_tokens + unembeddings * unembedding * batches.n_picks
    log.info(
        "%s: %s tokens, %s examples; each batch runs through %s blocks and computes logits %s times: about %.0f s",
        study,
        f"{batches.n_tokens:,}",
        f"{batches.n_picks:,}",
        f"{block_runs:,}",
        f"{unembeddings:,}",
        seconds,
    )
    return Cost(batches.n_tokens, batches.n_picks, block_runs, unembeddings, round(seconds, 1))
