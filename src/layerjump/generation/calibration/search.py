"""Search over exit rules and draft settings by replay on the calibration set.

Kinds of rules that calibration lets compete: where each would stop on given evidence, and what that costs.

Verified generation made as cheap as it gets: where to draft, how sure of a draft to be, how many may wait.

A wrong draft costs time and nothing else, so drafts may be bolder than tokens that nobody checks: they have levels
and a threshold of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from layerjump.generation.calibration.cost_model import Costs, replay_cost
from layerjump.generation.calibration.dataset import CalibrationSet
from layerjump.generation.probes import (
    Probe,
    TwoStage,
    fit_logistic,
    log_loss,
    log_odds,
    mixed_features,
)
from layerjump.generation.rules import ExitConfig, Never, Rule, Shortlist, constant_gap

STRENGTHS = (1e-3, 1e-2, 1e-1)
"""Penalties of gates that are tried."""
THRESHOLDS = tuple(1 - 0.001 * 1.2**step for step in range(0, 38))
"""From strict to loose: the order in which they are tested, fixed beforehand."""
WORTH = (0.3, 0.5, 0.7, 0.85)
"""Gate probabilities from which a vocabulary product may be worth making."""


@dataclass(frozen=True)
class Replayed:
    """What a rule does on evidence; every field is (positions,)."""

    left: Tensor
    right: Tensor
    heads: Tensor
    gates: Tensor

    def cost(self, costs: Costs, n_blocks: int) -> float:
        return float(
            replay_cost(costs, n_blocks, self.left, self.heads, self.gates).double().mean()
        )

    @property
    def agreement(self) -> float:
        return float(self.right.double().mean())


@dataclass(frozen=True)
class Probes:
    """Fitted gates and second stages: level → weights."""

    gate: Mapping[int, Tensor]
    mix: Mapping[int, Tensor]
    tokens: Tensor | None = None
    """The shortlist that gaps were taken over, if they were."""


def fit_probes(train: CalibrationSet, held: CalibrationSet) -> Probes:
    """Gates on one set of documents, their penalty and the second stages on another."""
    gate, mix = {}, {}
    for place, level in enumerate(train.levels):
        tries = [
            fit_logistic(train.features[place], train.right[place], strength)
            for strength in STRENGTHS
        ]
        losses = [log_loss(held.features[place], held.right[place], weights) for weights in tries]
        gate[level] = tries[losses.index(min(losses))]
        odds = held.features[place].double() @ gate[level]
        mix[level] = fit_logistic(mixed_features(odds, held.gap[place]), held.right[place], 1e-3)
    return Probes(gate, mix, train.tokens)


@dataclass(frozen=True)
class RuleCandidate:
    """A kind of rule with its levels; the threshold is still open."""

    kind: str
    """gap, gate or two-stage."""
    levels: tuple[int, ...]
    probes: Probes
    worth: float = 0.0

    def exit_config(self, threshold: float | None, min_acceptance: float = 0.0) -> ExitConfig:
        """The rule with its shortlist; `Never` without a threshold or without levels."""
        if threshold is None or not self.levels:
            return ExitConfig(Never())
        tokens = self.probes.tokens
        shortlist = None if tokens is None else Shortlist(tokens)
        return ExitConfig(self._rule(threshold), shortlist, min_acceptance)

    def _rule(self, threshold: float) -> Rule:
        if self.kind == "gap":
            return constant_gap(threshold, self.levels, strict=False)
        weights = torch.stack([self.probes.gate[level] for level in self.levels]).float()
        if self.kind == "gate":
            return Probe(weights, self.levels, threshold)
        mix = torch.stack([self.probes.mix[level] for level in self.levels]).float()
        return TwoStage(Probe(weights, self.levels, self.worth), mix, threshold)

    def record(self, threshold: float | None) -> dict[str, Any]:
        """The rule in plain words, without its weights."""
        return {
            "kind": self.kind,
            "levels": list(self.levels),
            "threshold": threshold,
            "worth": self.worth,
        }

    def replay(self, evidence: CalibrationSet, n_blocks: int) -> Callable[[float], Replayed]:
        """threshold → what the rule does at every position. What does not depend on the threshold is made once."""
        places = [evidence.levels.index(level) for level in self.levels]
        odds = [
            evidence.features[place].double() @ self.probes.gate[level]
            for place, level in zip(places, self.levels, strict=True)
        ]
        gap = evidence.gap[places].double() if places else evidence.gap[:0]
        looked = torch.ones(len(places), len(evidence), dtype=torch.bool)
        score = torch.logit(gap, eps=1e-12)
        if self.kind == "gate":
            looked, score = ~looked, torch.stack(odds) if odds else score
        elif self.kind == "two-stage" and odds:
            looked = torch.stack(odds) >= log_odds(self.worth)
            both = [
                mixed_features(odd, gap[row]) @ self.probes.mix[level]
                for row, (odd, level) in enumerate(zip(odds, self.levels, strict=True))
            ]
            score = torch.stack(both).masked_fill(~looked, -torch.inf)
        right = evidence.right[places]
        return lambda threshold: self._stops(score, looked, right, threshold, n_blocks)

    def _stops(
        self, score: Tensor, looked: Tensor, right: Tensor, threshold: float, n_blocks: int
    ) -> Replayed:
        n = right.shape[1]
        never = torch.ones(1, n, dtype=torch.bool)
        stops = torch.cat([score >= log_odds(threshold), never])
        first = stops.int().argmax(0)
        levels = torch.tensor([*self.levels, n_blocks])
        asked = torch.arange(len(self.levels))[:, None] <= first
        whole = first == len(self.levels)
        # A gate alone has to look once where it stops; the others have looked there already.
        heads = (asked & looked).sum(0) + (whole | (self.kind == "gate"))
        gates = asked.sum(0) * (self.kind != "gap")
        hit = torch.cat([right, never]).gather(0, first[None])[0]
        return Replayed(levels[first], hit, heads, gates)


def cheapest(
    kind: str, probes: Probes, evidence: CalibrationSet, costs: Costs, n_blocks: int, target: float
) -> tuple[RuleCandidate, float]:
    """The kind's best levels (added one at a time while that pays) and its cost at the target, on the select
    split."""
    best = RuleCandidate(kind, (), probes), costs.full(n_blocks)
    for worth in WORTH if kind == "two-stage" else (0.0,):
        chosen: tuple[int, ...] = ()
        spent = costs.full(n_blocks)
        while True:
            tries = [
                (_cost_at(made, evidence, costs, n_blocks, target), made)
                for level in evidence.levels
                if level not in chosen
                for made in [RuleCandidate(kind, tuple(sorted((*chosen, level))), probes, worth)]
            ]
            found = min(tries, key=lambda pair: pair[0], default=None)
            if found is None or found[0] >= spent:
                break
            spent, made = found
            chosen = made.levels
            if spent < best[1]:
                best = made, spent
    return best


def _cost_at(
    contender: RuleCandidate, evidence: CalibrationSet, costs: Costs, n_blocks: int, target: float
) -> float:
    """The least cost among thresholds that reach the target on this evidence; of the whole model if none does."""
    replay = contender.replay(evidence, n_blocks)
    found = [made for made in map(replay, THRESHOLDS) if made.agreement >= target]
    return min((made.cost(costs, n_blocks) for made in found), default=costs.full(n_blocks))


UNVERIFIED = (1, 2, 4, 8)
PLAYED = 2_000
"""Positions that a try is played through, one after another."""


@dataclass(frozen=True)
class Drafts:
    """How to draft."""

    contender: RuleCandidate
    threshold: float | None
    """None: not at all, since it does not pay."""
    unverified: int
    """How many may wait."""
    cost: float
    """Milliseconds a verified token, on the evidence they were chosen on."""
    least: float = 0.0
    """The share of drafts that must be right to pay for them."""

    @property
    def exit(self) -> ExitConfig:
        return self.contender.exit_config(self.threshold, self.least)

    def record(self) -> dict[str, Any]:
        return self.contender.record(self.threshold) | {"least": self.least}


def cheapest_drafts(
    contenders: Iterable[RuleCandidate], evidence: CalibrationSet, costs: Costs, n_blocks: int
) -> Drafts:
    """The contender, threshold and number of waiting tokens that cost least; none, if none pays."""
    contenders = [contender for contender in contenders if contender.levels]
    order = torch.randperm(len(evidence), generator=torch.Generator().manual_seed(0))[:PLAYED]
    nothing = RuleCandidate("gap", (), Probes({}, {}))
    best = Drafts(nothing, None, 1, costs.full(n_blocks))
    for contender in contenders:
        replay = contender.replay(evidence, n_blocks)
        for threshold in THRESHOLDS[::3]:
            made = replay(threshold)
            played = Replayed(*(part[order] for part in astuple(made)))
            for most in UNVERIFIED:
                cost = draft_cost(costs, n_blocks, played, most)
                if cost < best.cost:
                    least = break_even(costs, n_blocks, played)
                    best = Drafts(contender, threshold, most, cost, least)
    return best


def break_even(costs: Costs, n_blocks: int, played: Replayed) -> float:
    """What a draft costs over what a token does: the share that must be right, since only a right one saves a token.

    Looks and gates that came to nothing are paid for by the drafts.
    """
    drafts = played.left < n_blocks
    level = float(played.left[drafts].double().mean())
    asked = looks_of(played, n_blocks) * costs.look + played.gates * costs.gate
    spent = level * costs.block + (n_blocks - level) * costs.waiting
    return (spent + float(asked.double().sum()) / int(drafts.sum())) / costs.full(n_blocks)


def looks_of(played: Replayed, n_blocks: int) -> Tensor:
    """Products made at levels below L."""
    return played.heads - (played.left == n_blocks).to(played.heads)


def at_one_level(
    kinds: Sequence[str], probes: Probes, levels: Sequence[int]
) -> list[RuleCandidate]:
    """Every kind of rule at every single level."""
    return [
        RuleCandidate(kind, (level,), probes, worth)
        for kind in kinds
        for level in levels
        for worth in (WORTH if kind == "two-stage" else (0.0,))
    ]


def draft_cost(costs: Costs, n_blocks: int, played: Replayed, most: int) -> float:
    """Milliseconds a verified token, if examples came one after another in this order.

    Drafts gather until one example goes to level L or `most` wait; then all of them go up together, and what follows
    the first wrong one has been for nothing.
    """
    spent, kept, looks_made = 0.0, 0, looks_of(played, n_blocks)
    waiting: list[tuple[int, bool]] = []
    for level, good, looks, gated in zip(
        played.left.tolist(),
        played.right.tolist(),
        looks_made.tolist(),
        played.gates.tolist(),
        strict=True,
    ):
        asked = len(waiting) < most
        drafts = level < n_blocks and asked
        spent += (level if drafts else n_blocks) * costs.block
        spent += asked * (gated * costs.gate + looks * costs.look)
        if drafts:
            waiting.append((level, good))
            continue
        spent += costs.head  # one product for all rows that are held against the model
        spent += sum(n_blocks - at for at, _ in waiting) * costs.waiting
        first_wrong = next((i for i, (_, fine) in enumerate(waiting) if not fine), None)
        # The wrong draft itself is replaced by the right token; the token that went deep comes only after no wrong one.
        kept += len(waiting) + 1 if first_wrong is None else first_wrong + 1
        waiting = []
    return spent / kept if kept else float("inf")
