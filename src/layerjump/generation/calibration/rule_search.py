"""Search over exit rules: probes are fitted, and the levels of a rule chosen, by replay on the calibration set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from layerjump.generation.calibration.dataset import CalibrationSet
from layerjump.generation.calibration.result import Costs, RuleType
from layerjump.generation.exit_rules import ExitConfig, Never, Shortlist, constant_gap
from layerjump.generation.probes import Probe, TwoStage, combination_features, fit_logistic, log_odds

THRESHOLDS = tuple(1 - 0.001 * 1.2**step for step in range(0, 38))
"""From strict to loose: the order in which thresholds are tested, fixed beforehand."""
_STRENGTHS = (1e-3, 1e-2, 1e-1)  # regularisation strengths of probes that are tried
_UNEMBED_ABOVE: dict[RuleType, tuple[float, ...]] = {"two-stage": (0.3, 0.5, 0.7, 0.85)}
"""Probe probabilities from which an unembedding may be worth its cost; (0.0,) for other types of rule."""


class Replay(NamedTuple):
    """What a rule does on a calibration set; every field is (positions,)."""

    exit_levels: Tensor
    correct: Tensor
    """Whether the token at the exit level is the full model's."""
    unembeddings: Tensor
    """Readings of a level, with the one that gives the token."""
    probe_evaluations: Tensor

    @property
    def agreement(self) -> float:
        """The share of tokens that are the full model's."""
        return float(self.correct.double().mean())

    def cost(self, costs: Costs, n_blocks: int) -> float:
        """The mean cost of a token, in milliseconds; the blocks that it skips run later, as a queued token."""
        queued = (n_blocks - self.exit_levels) * min(costs.queued_token, costs.block)
        full = (self.exit_levels == n_blocks).to(self.unembeddings)
        reading = full * costs.unembedding + (self.unembeddings - full) * costs.early_unembedding
        total = self.exit_levels * costs.block + queued + reading + self.probe_evaluations * costs.probe
        return float(total.double().mean())

    def early_unembeddings(self, n_blocks: int) -> Tensor:
        """Readings of levels below L, (positions,)."""
        return self.unembeddings - (self.exit_levels == n_blocks).to(self.unembeddings)


@dataclass(frozen=True)
class FittedProbes:
    """The weights of probes and second stages, by level."""

    probe: Mapping[int, Tensor]
    """Level → (d_model + 3,)."""
    combination: Mapping[int, Tensor]
    """Level → (3,)."""
    shortlist: Shortlist | None = None
    """The shortlist that the gaps were computed with."""


def fit_probes(train: CalibrationSet, validation: CalibrationSet) -> FittedProbes:
    """Fit probes on one set; choose their regularisation and fit the second stages on the other."""
    probe, combination = {}, {}
    for index, level in enumerate(train.levels):
        features, correct = validation.features[index], validation.correct[index]
        fits = [fit_logistic(train.features[index], train.correct[index], strength) for strength in _STRENGTHS]
        all_odds = [features.double() @ weights for weights in fits]
        losses = [float(binary_cross_entropy_with_logits(odds, correct.double())) for odds in all_odds]
        best = losses.index(min(losses))
        probe[level] = fits[best]
        inputs = combination_features(all_odds[best], validation.gap[index])
        combination[level] = fit_logistic(inputs, correct, 1e-3)
    return FittedProbes(probe, combination, train.shortlist)


@dataclass(frozen=True)
class RuleCandidate:
    """A type of rule with its levels; its threshold is still open."""

    rule_type: RuleType
    levels: tuple[int, ...]
    probes: FittedProbes
    unembed_above: float = 0.0
    """Two-stage rules: the probe probability from which an unembedding is worth its cost."""

    def exit_config(self, threshold: float | None, min_acceptance: float = 0.0) -> ExitConfig:
        """The rule with this threshold and its shortlist; `Never` without a threshold or without levels."""
        if threshold is None or not self.levels:
            return ExitConfig(Never())
        shortlist = self.probes.shortlist
        if self.rule_type == "gap":
            return ExitConfig(constant_gap(threshold, self.levels, strict=False), shortlist, min_acceptance)
        weights = torch.stack([self.probes.probe[level] for level in self.levels]).float()
        if self.rule_type == "probe":
            return ExitConfig(Probe(weights, self.levels, threshold), shortlist, min_acceptance)
        combination = torch.stack([self.probes.combination[level] for level in self.levels]).float()
        rule = TwoStage(Probe(weights, self.levels, self.unembed_above), combination, threshold)
        return ExitConfig(rule, shortlist, min_acceptance)

    def replay(self, calibration_set: CalibrationSet, n_blocks: int) -> Callable[[float], Replay]:
        """A function from a threshold to the rule's replay; what does not depend on the threshold is computed
        once."""
        indices = [calibration_set.levels.index(level) for level in self.levels]
        gap = calibration_set.gap[indices].double() if indices else calibration_set.gap[:0]
        unembeds = torch.ones(len(indices), len(calibration_set), dtype=torch.bool)
        score = torch.logit(gap, eps=1e-12)  # (levels, positions) log-odds of a correct token
        if self.rule_type != "gap" and indices:
            odds = torch.stack([self.probe_odds(calibration_set, level) for level in self.levels])
            if self.rule_type == "probe":
                unembeds, score = ~unembeds, odds
            else:
                unembeds = odds >= log_odds(self.unembed_above)
                combined = [
                    combination_features(odds[row], gap[row]) @ self.probes.combination[level]
                    for row, level in enumerate(self.levels)
                ]
                score = torch.stack(combined).masked_fill(~unembeds, -torch.inf)
        always = torch.ones(1, len(calibration_set), dtype=torch.bool)  # level L always exits, and is correct
        correct = torch.cat([calibration_set.correct[indices], always])
        levels = torch.tensor([*self.levels, n_blocks])

        def replay_at(threshold: float) -> Replay:
            exits = torch.cat([score >= log_odds(threshold), always])
            first = exits.int().argmax(0)  # (positions,) index of the exit level
            checked = torch.arange(len(indices))[:, None] <= first
            # A probe alone unembeds once, where it exits; the other rules have unembedded there already.
            unembeddings = (checked & unembeds).sum(0) + ((first == len(indices)) | (self.rule_type == "probe"))
            probe_evaluations = checked.sum(0) * (self.rule_type != "gap")
            return Replay(levels[first], correct.gather(0, first[None])[0], unembeddings, probe_evaluations)

        return replay_at

    def probe_odds(self, calibration_set: CalibrationSet, level: int) -> Tensor:
        """The probe's log-odds at a level, (positions,)."""
        features = calibration_set.features[calibration_set.levels.index(level)]
        return features.double() @ self.probes.probe[level]


def search_rule(
    rule_type: RuleType, probes: FittedProbes, selection: CalibrationSet, costs: Costs, n_blocks: int, target: float
) -> tuple[RuleCandidate, float]:
    """The levels of a rule type that cost least at the target agreement, added greedily, and that cost."""
    best = RuleCandidate(rule_type, (), probes), costs.full_model(n_blocks)
    for unembed_above in _UNEMBED_ABOVE.get(rule_type, (0.0,)):
        levels: tuple[int, ...] = ()
        cost = costs.full_model(n_blocks)
        while remaining := [level for level in selection.levels if level not in levels]:
            extended = [
                RuleCandidate(rule_type, tuple(sorted((*levels, level))), probes, unembed_above) for level in remaining
            ]
            tried = []
            for rule in extended:
                # The least cost of the thresholds that reach the target agreement; the full model's if none does.
                replays = map(rule.replay(selection, n_blocks), THRESHOLDS)
                passing = [replay.cost(costs, n_blocks) for replay in replays if replay.agreement >= target]
                tried.append(min(passing, default=costs.full_model(n_blocks)))
            if min(tried) >= cost:
                break
            cost = min(tried)
            candidate = extended[tried.index(cost)]
            levels = candidate.levels
            if cost < best[1]:
                best = candidate, cost
    return best


def single_level_candidates(
    rule_types: Sequence[RuleType], probes: FittedProbes, levels: Sequence[int]
) -> list[RuleCandidate]:
    """Every type of rule at every single level."""
    return [
        RuleCandidate(rule_type, (level,), probes, unembed_above)
        for rule_type in rule_types
        for level in levels
        for unembed_above in _UNEMBED_ABOVE.get(rule_type, (0.0,))
    ]
