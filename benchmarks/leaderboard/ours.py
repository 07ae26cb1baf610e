"""Our lenses, each with the CPU seconds of its fit, from the text to the maps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

import layerjump as lj
from layerjump.data.positions import MASKED_SHARE
from layerjump.jumps.collect_moments import RunPlan, plan_run
from layerjump.jumps.estimators.n_njtc import train_n_njtc
from layerjump.jumps.estimators.registry import KEPT_BOTH_TARGETS, EstimatorSettings
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.maps import FeatureKind

Result = TypeVar("Result")

RANKS = {"low-rank d/16": 16, "low-rank d/4": 4, "low-rank d/2": 2}
"""Lens → the divisor of d_model that gives its rank."""
FROM_MOMENTS = ("mat", "affine", *RANKS, "n-njtc", "ojfa")
"""Lenses that are solved from the second moments of one shared pass."""
TO_FINAL: dict[str, FeatureKind] = {"calibrated": "both", "calibrated raw": "raw"}
"""Lenses that map to the state after the final norm → their features."""
REFINED = ("refined", "refined long")
"""`refined` takes at most a tenth of the tuned lens' time; `refined long` may take as long as the tuned lens."""
OURS = ("identity", *FROM_MOMENTS, "n-njtc trained", *TO_FINAL, *REFINED, "jacobian")


class FittedLens(NamedTuple):
    """A lens and the CPU seconds of its fit."""

    lens: lj.Lens
    seconds: float


@dataclass
class LensFitter:
    """Fits lenses of one model on one text."""

    model: lj.Model
    corpus: lj.Corpus
    tokens: int
    seed: int = 0
    refine_steps: dict[str, int] = field(default_factory=lambda: {"refined": 200})
    """Refined lens → steps; a lens that is missing here is not fitted."""
    jacobian: dict[str, Any] = field(default_factory=dict)
    """Settings of the Jacobian lens, whose cost grows with tokens times d_model."""
    folder: Path | None = None
    """Where fitted lenses are cached, so that an interrupted run does not fit them again; None: no cache."""
    _lenses: dict[str, FittedLens] = field(default_factory=dict, repr=False)
    _final_moments: dict[str, tuple[Any, float]] = field(default_factory=dict, repr=False)

    def fit(self, names: list[str]) -> Iterator[tuple[str, FittedLens]]:
        """Yield the lenses of these names, one after another."""
        for name in names:
            if name == "jacobian" and not self.model.causal:
                continue  # it is defined for causal models only
            if name in REFINED and name not in self.refine_steps:
                continue
            yield name, self._fit_or_load(name)

    @property
    def settings(self) -> dict[str, Any]:
        positions = MASKED_SHARE if self.model.masked else None
        return {"tokens": self.tokens, "positions": positions, "seed": self.seed}

    @cached_property
    def plan(self) -> RunPlan:
        """The run over the fit, validation and test documents that every lens is fitted on."""
        return self._plan()

    def _plan(self, **settings: Any) -> RunPlan:
        return plan_run(self.model, self.corpus, **self.settings, **settings)

    @cached_property
    def forward_seconds(self) -> float:
        """CPU seconds of the bare forward pass over the fit documents: the unit of cost."""
        path = None if self.folder is None else self.folder / "forward.json"
        if path is not None and path.exists():
            key, seconds = json.loads(path.read_text())
            if key == self._cache_key("forward"):
                return seconds
        seconds = timed(lambda: bare_forward(self.model, self.plan.batches["fit"]))[1]
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps([self._cache_key("forward"), seconds]))
        return seconds

    @cached_property
    def _refine_start(self) -> FittedLens:
        """The start of a refinement: `calibrated` with the maps to both targets in the last levels."""
        collected, pass_seconds = self._collect_final("both")
        fitted = self._timed_lens(
            lambda: solve_jumps(collected, "calibrated", EstimatorSettings(keep_both_targets=True), model=self.model)
        )
        return fitted._replace(seconds=fitted.seconds + pass_seconds)

    def _collect_final(self, features: FeatureKind) -> tuple[Any, float]:
        if features not in self._final_moments:
            plan = self._plan(estimator="calibrated", features=features)
            self._final_moments[features] = timed(plan.run)
        return self._final_moments[features]

    @cached_property
    def _moments(self) -> tuple[Any, float]:
        """The second moments of the shared pass, and its CPU seconds."""
        return timed(self.plan.run)

    def _fit_or_load(self, name: str) -> FittedLens:
        """Return a lens of this run, one cached by an earlier run with the same settings, or a new one."""
        if name == "identity":
            return FittedLens(lj.Lens(self.model), 0.0)
        if name not in self._lenses:
            self._lenses[name] = self._load(name) or self._save(name, self._fit(name))
        return self._lenses[name]

    def _load(self, name: str) -> FittedLens | None:
        if self.folder is None or not (path := self._cache_path(name)).exists():
            return None
        header = json.loads(path.read_text())
        if header["about"] != self._cache_key(name):
            return None
        jumps = lj.Jumps.from_pretrained(path.with_suffix(""))
        return FittedLens(lj.Lens(self.model, jumps), header["seconds"])

    def _save(self, name: str, fitted: FittedLens) -> FittedLens:
        if self.folder is not None and fitted.lens.jumps is not None:
            path = self._cache_path(name)
            fitted.lens.jumps.save_pretrained(path.with_suffix(""))
            path.write_text(json.dumps({"about": self._cache_key(name), "seconds": fitted.seconds}))
        return fitted

    def _cache_path(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{name.replace(' ', '-').replace('/', '-')}.json"

    def _cache_key(self, name: str) -> list[Any]:
        lens_settings: Any = self.jacobian if name == "jacobian" else None
        if name in REFINED:
            lens_settings = [KEPT_BOTH_TARGETS, self.refine_steps.get(name)]
        return [self.corpus.sha256, self.settings, lens_settings]

    def _fit(self, name: str) -> FittedLens:
        if name in FROM_MOMENTS:
            return self._from_moments(name)
        if name in TO_FINAL:
            return self._to_final(name)
        if name in REFINED:
            return self._refined(name)
        if name == "n-njtc trained":
            fit_tokens = self.plan.batches["fit"].n_tokens
            return self._timed_lens(lambda: train_n_njtc(self.model, self.corpus, tokens=fit_tokens, seed=self.seed))
        return self._timed_lens(lambda: lj.fit_jacobian(self.model, self.corpus, seed=self.seed, **self.jacobian))

    def _from_moments(self, name: str) -> FittedLens:
        """Each lens is charged for the shared pass, because fitting it alone would need the pass."""
        collected, pass_seconds = self._moments
        estimator, settings = name, EstimatorSettings()
        if name in RANKS:
            rank = max(1, self.model.d_model // RANKS[name])
            # A masked model's LM head is more than a norm and a product.
            estimator, settings = (
                "low-rank",
                EstimatorSettings(rank=rank, metric=None if self.model.masked else "unembedding"),
            )
        fitted = self._timed_lens(lambda: solve_jumps(collected, estimator, settings, model=self.model))
        return fitted._replace(seconds=fitted.seconds + pass_seconds)

    def _to_final(self, name: str) -> FittedLens:
        """Each lens is charged for its pass and its solution."""
        collected, pass_seconds = self._collect_final(TO_FINAL[name])
        fitted = self._timed_lens(lambda: solve_jumps(collected, "calibrated", model=self.model))
        assert fitted.lens.jumps is not None
        factors = fitted.lens.jumps.provenance.settings["temperature"].values()
        print(
            f"  {name}: its pass costs {pass_seconds / self._moments[1]:.2f} times mat's; temperature factors "
            f"{min(factors):.2f} to {max(factors):.2f}",
            flush=True,
        )
        return fitted._replace(seconds=fitted.seconds + pass_seconds)

    def _refined(self, name: str) -> FittedLens:
        start = self._refine_start
        assert start.lens.jumps is not None
        jumps, steps = start.lens.jumps, self.refine_steps[name]
        fitted = self._timed_lens(
            lambda: lj.refine(self.model, jumps, self.corpus, steps=steps, tokens=self.tokens, seed=self.seed)
        )
        return fitted._replace(seconds=fitted.seconds + start.seconds)

    def _timed_lens(self, fit: Callable[[], lj.Jumps]) -> FittedLens:
        jumps, seconds = timed(fit)
        return FittedLens(lj.Lens(self.model, jumps), seconds)


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """Return the result of some work and its CPU seconds, which do not depend on other load."""
    start = time.process_time()
    return work(), time.process_time() - start


@torch.no_grad()
def bare_forward(model: lj.Model, batches: lj.Batches) -> None:
    for batch in batches:
        model.hf(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
