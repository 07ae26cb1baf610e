"""The lenses of the causal leaderboard, fitted at a few levels on the same text; halves of the text tell the noise.

The tuned lens is trained as the package tuned-lens trains its own: an affine map to the last level, before the model's
final norm, that starts as the identity and descends on the KL from the model's output. The code is `refine`'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

import layerjump as lj
from layerjump.jumps.collect_moments import plan_run
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.maps import Affine, to_affine
from layerjump.jumps.moments_of_splits import merge_moments

NOISE = (0.1, 1.0)
"""Noise of the family between least squares and Jacobian, in units of the spread of the states."""
LENSES = ("identity", "mat", "calibrated", "refined", "tuned lens", "jacobian", *(f"differences {n:g}" for n in NOISE))


@dataclass(frozen=True)
class CausalBudget:
    """How much text each lens is fitted on."""

    tokens: int
    """Of all splits together, for the lenses by least squares and KL."""
    refine_steps: int
    tuned_steps: int
    """The tuned lens starts further away."""
    difference_tokens: int
    jacobian_tokens: int
    skip_first: int = 4


LEVELS = {"smollm2": (12, 18, 24), "stories15m": (1, 2, 3, 4, 5)}
BUDGETS = {
    "smollm2": CausalBudget(
        tokens=12_000, refine_steps=30, tuned_steps=80, difference_tokens=4_800, jacobian_tokens=120
    ),
    "stories15m": CausalBudget(
        tokens=24_000, refine_steps=100, tuned_steps=300, difference_tokens=12_800, jacobian_tokens=800
    ),
}
QUICK = CausalBudget(tokens=4_000, refine_steps=5, tuned_steps=10, difference_tokens=2_000, jacobian_tokens=64)


@dataclass
class CausalLenses:
    """Fits lenses of one model at some levels, once for all runs with the same folder."""

    model: lj.Model
    corpus: lj.Corpus
    levels: tuple[int, ...]
    budget: CausalBudget
    folder: Path | None = None

    def lens(self, name: str) -> lj.Lens:
        """The lens of this name."""
        if name == "identity":
            return lj.Lens(self.model)
        if name == "jacobian":
            return lj.Lens(self.model, mean_of_halves(*self.jacobian_halves))
        return lj.Lens(self.model, self._cached(name, lambda: self._fit(name)))

    @cached_property
    def jacobian_halves(self) -> tuple[lj.Jumps, lj.Jumps]:
        """Jacobian lenses of two disjoint halves of the text, each with half of the tokens."""
        first, second = self._halves
        return (
            self._cached("jacobian half 1", lambda: self._fit_jacobian(first)),
            self._cached("jacobian half 2", lambda: self._fit_jacobian(second)),
        )

    @cached_property
    def mat_halves(self) -> tuple[lj.Jumps, lj.Jumps]:
        """Least squares on two disjoint halves of the documents."""
        return (
            self._cached("mat half 1", lambda: solve_jumps(self._moments[0], "mat")),
            self._cached("mat half 2", lambda: solve_jumps(self._moments[1], "mat")),
        )

    @cached_property
    def _moments(self) -> list[lj.SplitMoments]:
        """Second moments of the halves; merged, they are those of the whole text."""
        pairs, tokens = self._pairs(self.model.n_blocks), self.budget.tokens
        return [
            plan_run(self.model, self.corpus, pairs=pairs, tokens=tokens, shard=f"{part}/2").run() for part in (0, 1)
        ]

    @property
    def _halves(self) -> list[lj.Corpus]:
        documents = self.corpus.documents
        return [lj.Corpus(self.corpus.name, documents[part::2], "every other document") for part in (0, 1)]

    def _pairs(self, target: int | str) -> str:
        return ",".join(f"{level}:{target}" for level in self.levels)

    def _fit(self, name: str) -> lj.Jumps:
        tokens = self.budget.tokens
        if name == "mat":
            return solve_jumps(merge_moments(self._moments), "mat")
        if name == "calibrated":
            return lj.fit(self.model, self.corpus, estimator="calibrated", pairs=self._pairs("final"), tokens=tokens)
        if name == "refined":
            start = self.lens("calibrated").jumps
            assert start is not None
            return lj.refine(self.model, start, self.corpus, steps=self.budget.refine_steps, tokens=tokens)
        if name == "tuned lens":
            start = identity_of(solve_jumps(merge_moments(self._moments), "affine"))
            return lj.refine(self.model, start, self.corpus, steps=self.budget.tuned_steps, tokens=tokens)
        return lj.fit_finite_differences(
            self.model,
            self.corpus,
            noise=float(name.removeprefix("differences ")),
            levels=self.levels,
            tokens=self.budget.difference_tokens,
            skip_first=self.budget.skip_first,
        )

    def _fit_jacobian(self, half: lj.Corpus) -> lj.Jumps:
        return lj.fit_jacobian(
            self.model,
            half,
            levels=self.levels,
            tokens=self.budget.jacobian_tokens // 2,
            skip_first=self.budget.skip_first,
            max_length=64,
        )

    def _cached(self, name: str, fit: Callable[[], lj.Jumps]) -> lj.Jumps:
        if self.folder is None:
            return fit()
        folder = self.folder / name.replace(" ", "-")
        key, settings = self.folder / f"{folder.name}.json", [self.corpus.sha256, list(self.levels), str(self.budget)]
        if key.exists() and json.loads(key.read_text()) == settings:
            return lj.Jumps.from_pretrained(folder)
        jumps = fit()
        jumps.save_pretrained(folder)
        key.write_text(json.dumps(settings))
        print(f"  fitted {name}", flush=True)
        return jumps


def identity_of(jumps: lj.Jumps) -> lj.Jumps:
    """Affine jumps of the same levels, fitted documents and description that are the identity."""
    d = next(iter(to_affine(jumps[pair]).shape[0] for pair in jumps))
    maps = {pair: Affine.of(torch.eye(d), bias=torch.zeros(d)) for pair in jumps}
    return lj.Jumps.from_maps(maps, {pair: jumps.info[pair] for pair in jumps}, jumps.provenance)


def mean_of_halves(first: lj.Jumps, second: lj.Jumps) -> lj.Jumps:
    """The mean of two Jacobian lenses, each the mean over sequences of its half."""
    maps = {pair: (to_affine(first[pair]), to_affine(second[pair])) for pair in first}
    infos = {pair: first.info[pair] for pair in first}
    means = {pair: Affine.of((a.weight + b.weight) / 2) for pair, (a, b) in maps.items()}
    return lj.Jumps.from_maps(means, infos, first.provenance)


def weight(jumps: lj.Jumps, level: int, last: int) -> Tensor:
    """The matrix of a jump to the last level, in float64."""
    return to_affine(jumps[level, last]).weight.double()


def cosine(first: Tensor, second: Tensor) -> float:
    """The cosine of two matrices as vectors."""
    return float(torch.nn.functional.cosine_similarity(first.flatten(), second.flatten(), dim=0))
