"""Compare variants of a model with the model itself."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layerjump.data.batches import Batches
from layerjump.data.positions import Positions
from layerjump.interventions.patching import Rerun
from layerjump.metrics.bootstrap import mean_interval
from layerjump.metrics.logits import (
    KS,
    ReferenceLogits,
    agreement,
    chunk_rows,
    reference_logits,
    upcast,
)
from layerjump.models.model import Model
from layerjump.studies.results import Row
from layerjump.studies.setup import Setup

log = logging.getLogger("layerjump")

CELLS = 1024
"""Tokens and padding of one batch: all its levels are held at once."""


class Variants:
    """What variants of a model predict at the picks, held against what it predicts itself.

    For each batch: `start` with its ordinary run, then `add` every variant's states at level L.
    """

    def __init__(self, model: Model) -> None:
        model.require_predictions()
        self.model = model
        self._rows = chunk_rows(model)
        self._truth: list[tuple[slice, ReferenceLogits]] = []
        self._documents: list[Tensor] = []
        self._found: dict[Hashable, dict[str, list[Tensor]]] = defaultdict(
            lambda: defaultdict(list)
        )

    @torch.no_grad()
    def start(self, rerun: Rerun) -> None:
        """Take the model's own predictions of a batch."""
        exact = rerun.pick(rerun.levels[-1])
        starts = range(0, len(exact), self._rows)
        parts = [slice(start, start + self._rows) for start in starts]
        self._truth = [
            (part, reference_logits(upcast(self.model.logits(exact[part])))) for part in parts
        ]
        self._documents.append(rerun.batch.document)

    def add(self, name: Hashable, states: Tensor) -> None:
        """Score a variant's states at level L, one row a pick."""
        self.add_logits(name, lambda part: self.model.logits(states[part]))

    @torch.no_grad()
    def add_logits(self, name: Hashable, logits: Callable[[slice], Tensor]) -> None:
        """Score whatever gives logits of a slice of the picks."""
        for part, true in self._truth:
            held = agreement(upcast(logits(part)), true)
            for field in ("place", "surprisal", "kl"):
                self._found[name][field].append(getattr(held, field).cpu())

    @property
    def documents(self) -> np.ndarray:
        """The document of every example."""
        return torch.cat(self._documents).numpy()

    def examples(self, name: Hashable, field: str) -> np.ndarray:
        """`place`, `surprisal` or `kl` of one variant, example by example."""
        return torch.cat(self._found[name][field]).double().numpy()

    def mean(self, name: Hashable, field: str = "kl") -> float:
        return float(self.examples(name, field).mean())

    def row(self, name: Hashable, *, seed: int = 0) -> Row:
        """P@k, with an interval for P@1 by bootstrap over documents, Surprisal and KL of one variant."""
        place = self.examples(name, "place")
        mean, low, high = mean_interval(place < 1, self.documents, seed=seed)
        row: Row = {"p@1": float(mean), "p@1 low": float(low), "p@1 high": float(high)}
        row |= {f"p@{k}": float((place < k).mean()) for k in KS if k > 1}
        return row | {field: self.mean(name, field) for field in ("surprisal", "kl")}


def budgeted(
    setup: Setup,
    share: float = 1.0,
    *,
    part: str = "test",
    positions: Positions | None = None,
) -> Batches:
    """Small batches of a share of the run's token budget, with that share of the positions it scores."""
    return setup.batches(
        tokens=max(1, int(share * setup.settings.budget)),
        picks=max(1, int(share * setup.settings.score)),
        part=part,
        positions=positions,
        cells=CELLS,
    )


def runs(setup: Setup, batches: Batches, variants: Variants) -> Iterator[Rerun]:
    """Run each batch once in the ordinary way, ready for the variants."""
    done = 0
    for batch in batches:
        rerun = Rerun(setup.model, batch)
        variants.start(rerun)
        yield rerun
        done += batch.n_tokens
        if setup.progress:
            setup.progress(done, batches.n_tokens)


def announce(
    study: str, model: Model, batches: Batches, *, block_runs: int, readings: int
) -> dict[str, Any]:
    """Time one batch, say what the whole will cost, and return it: blocks run over the budget, and seconds.

    `block_runs` and `readings` count how often each batch goes through a block and through the vocabulary.
    """
    rerun = Rerun(model, batches[0])
    variants = Variants(model)
    start = time.perf_counter()
    exact = rerun.from_level(0)
    ran = time.perf_counter()
    variants.start(rerun)
    variants.add("exact", rerun.pick(exact))
    read = time.perf_counter()
    block = (ran - start) / model.n_blocks / rerun.batch.n_tokens
    # `start` reads the vocabulary too, so this is two readings.
    reading = (read - ran) / 2 / rerun.batch.n_picks
    seconds = block_runs * block * batches.n_tokens + readings * reading * batches.n_picks
    cost = {
        "tokens": batches.n_tokens,
        "examples": batches.n_picks,
        "block_runs": block_runs,
        "readings": readings,
        "expected_seconds": round(seconds, 1),
    }
    log.info(
        "%s: %s tokens, %s examples; each batch goes through %s blocks and %s readings of the vocabulary: about %.0f s",
        study,
        f"{batches.n_tokens:,}",
        f"{batches.n_picks:,}",
        f"{block_runs:,}",
        f"{readings:,}",
        seconds,
    )
    return cost
