"""Kinds of rules that calibration lets compete: where each would stop on given evidence, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerjump.decode.costs import Costs, replay_cost
from layerjump.decode.evidence import Evidence
from layerjump.decode.gates import Gate, TwoStage, log_loss, log_odds, logistic, mixed_features
from layerjump.decode.rules import Never, Rule, SoftmaxGap
from layerjump.decode.shortlist import Among

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


def fit_probes(train: Evidence, held: Evidence) -> Probes:
    """Gates on one set of documents, their penalty and the second stages on another."""
    gate, mix = {}, {}
    for place, level in enumerate(train.levels):
        tries = [
            logistic(train.features[place], train.right[place], strength) for strength in STRENGTHS
        ]
        losses = [log_loss(held.features[place], held.right[place], weights) for weights in tries]
        gate[level] = tries[losses.index(min(losses))]
        odds = held.features[place].double() @ gate[level]
        mix[level] = logistic(mixed_features(odds, held.gap[place]), held.right[place], 1e-3)
    return Probes(gate, mix, train.tokens)


@dataclass(frozen=True)
class Contender:
    """A kind of rule with its levels; the threshold is still open."""

    kind: str
    """gap, gate or two-stage."""
    at: tuple[int, ...]
    probes: Probes
    worth: float = 0.0

    def rule(self, threshold: float) -> Rule:
        """The rule itself."""
        if not self.at:
            return Never()
        plain, tokens = self._rule(threshold), self.probes.tokens
        return plain if tokens is None else Among(plain, tokens)

    def _rule(self, threshold: float) -> Rule:
        if self.kind == "gap":
            return SoftmaxGap(threshold / 0.9, length=1e-9, strict=False, at=self.at)
        weights = torch.stack([self.probes.gate[level] for level in self.at]).float()
        if self.kind == "gate":
            return Gate(weights, self.at, threshold)
        mix = torch.stack([self.probes.mix[level] for level in self.at]).float()
        return TwoStage(Gate(weights, self.at, self.worth), mix, threshold)

    def record(self, threshold: float | None) -> dict[str, Any]:
        """The rule in plain words, without its weights."""
        return {
            "kind": self.kind,
            "levels": list(self.at),
            "threshold": threshold,
            "worth": self.worth,
        }

    def replay(self, evidence: Evidence, n_blocks: int) -> Callable[[float], Replayed]:
        """threshold → what the rule does at every position. What does not depend on the threshold is made once."""
        places = [evidence.levels.index(level) for level in self.at]
        odds = [
            evidence.features[place].double() @ self.probes.gate[level]
            for place, level in zip(places, self.at, strict=True)
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
                for row, (odd, level) in enumerate(zip(odds, self.at, strict=True))
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
        levels = torch.tensor([*self.at, n_blocks])
        asked = torch.arange(len(self.at))[:, None] <= first
        whole = first == len(self.at)
        # A gate alone has to look once where it stops; the others have looked there already.
        heads = (asked & looked).sum(0) + (whole | (self.kind == "gate"))
        gates = asked.sum(0) * (self.kind != "gap")
        hit = torch.cat([right, never]).gather(0, first[None])[0]
        return Replayed(levels[first], hit, heads, gates)


def cheapest(
    kind: str, probes: Probes, evidence: Evidence, costs: Costs, n_blocks: int, target: float
) -> tuple[Contender, float]:
    """The kind's best levels (added one at a time while that pays) and its cost at the target, on the select split."""
    best = Contender(kind, (), probes), costs.full(n_blocks)
    for worth in WORTH if kind == "two-stage" else (0.0,):
        chosen: tuple[int, ...] = ()
        spent = costs.full(n_blocks)
        while True:
            tries = [
                (_cost_at(made, evidence, costs, n_blocks, target), made)
                for level in evidence.levels
                if level not in chosen
                for made in [Contender(kind, tuple(sorted((*chosen, level))), probes, worth)]
            ]
            found = min(tries, key=lambda pair: pair[0], default=None)
            if found is None or found[0] >= spent:
                break
            spent, made = found
            chosen = made.at
            if spent < best[1]:
                best = made, spent
    return best


def _cost_at(
    contender: Contender, evidence: Evidence, costs: Costs, n_blocks: int, target: float
) -> float:
    """The least cost among thresholds that reach the target on this evidence; of the whole model if none does."""
    replay = contender.replay(evidence, n_blocks)
    found = [made for made in map(replay, THRESHOLDS) if made.agreement >= target]
    return min((made.cost(costs, n_blocks) for made in found), default=costs.full(n_blocks))
