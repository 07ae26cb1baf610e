"""Search over exit rules and draft settings, by replay on the calibration set.

A rejected draft costs time and nothing else, so drafts may be bolder than tokens that nobody verifies: they have
levels and a threshold of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from layerjump.generation.calibration.cost_model import Costs
from layerjump.generation.calibration.dataset import CalibrationSet
from layerjump.generation.probes import Probe, TwoStage, combination_features, fit_logistic, log_odds
from layerjump.generation.rules import ExitConfig, Never, Shortlist, constant_gap

RuleType = Literal["gap", "probe", "two-stage"]
THRESHOLDS = tuple(1 - 0.001 * 1.2**step for step in range(0, 38))
"""From strict to loose: the order in which thresholds are tested, fixed beforehand."""
_STRENGTHS = (1e-3, 1e-2, 1e-1)  # regularisation strengths of probes that are tried
_UNEMBED_ABOVE: dict[RuleType, tuple[float, ...]] = {"two-stage": (0.3, 0.5, 0.7, 0.85)}
"""Probe probabilities from which an unembedding may be worth its cost; (0.0,) for other types of rule."""
_DRAFT_TOKENS = (1, 2, 4, 8)  # numbers of drafts that may wait for verification
_REPLAYED_POSITIONS = 2_000  # positions on which draft settings are replayed, one after another


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


@dataclass(frozen=True)
class DraftSettings:
    """How to draft for verification."""

    candidate: RuleCandidate
    threshold: float | None
    """None: no drafts, since they do not pay."""
    max_draft_tokens: int
    cost: float
    """Milliseconds per verified token on the calibration set."""
    min_acceptance: float = 0.0
    """The share of drafts that must be accepted to pay for them all."""


def search_drafts(
    candidates: Iterable[RuleCandidate], selection: CalibrationSet, costs: Costs, n_blocks: int
) -> DraftSettings:
    """The candidate, threshold and number of waiting drafts that cost least; no drafts if none pay."""
    order = torch.randperm(len(selection), generator=torch.Generator().manual_seed(0))
    order = order[:_REPLAYED_POSITIONS]
    none = RuleCandidate("gap", (), FittedProbes({}, {}))
    best = DraftSettings(none, None, 1, costs.full_model(n_blocks))
    for candidate in candidates:
        if not candidate.levels:
            continue
        replay_at = candidate.replay(selection, n_blocks)
        for threshold in THRESHOLDS[::3]:
            replay = Replay(*(column[order] for column in replay_at(threshold)))
            for max_draft_tokens in _DRAFT_TOKENS:
                cost = draft_cost(costs, n_blocks, replay, max_draft_tokens)
                if cost < best.cost:
                    least = break_even_acceptance(costs, n_blocks, replay)
                    best = DraftSettings(candidate, threshold, max_draft_tokens, cost, least)
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


def break_even_acceptance(costs: Costs, n_blocks: int, replay: Replay) -> float:
    """The cost of a draft over that of a token, which is the share to be accepted: only those save a token.

    Drafts also pay for the readings and probes that did not lead to one.
    """
    is_draft = replay.exit_levels < n_blocks
    level = float(replay.exit_levels[is_draft].double().mean())
    checks = replay.early_unembeddings(n_blocks) * costs.early_unembedding + replay.probe_evaluations * costs.probe
    blocks = level * costs.block + (n_blocks - level) * costs.queued_token
    per_draft = blocks + float(checks.double().sum()) / int(is_draft.sum())
    return per_draft / costs.full_model(n_blocks)


def draft_cost(costs: Costs, n_blocks: int, replay: Replay, max_draft_tokens: int) -> float:
    """Milliseconds per verified token, if the replayed positions followed one another.

    Drafts queue until a token goes to level L or `max_draft_tokens` wait. Then all run through the remaining blocks
    together, and everything after the first rejected draft is lost.
    """
    cost, n_tokens = 0.0, 0
    queue: list[tuple[int, bool]] = []  # (exit level, whether the draft is correct)
    columns = replay._replace(unembeddings=replay.early_unembeddings(n_blocks))
    for level, correct, unembeddings, probe_evaluations in zip(*(column.tolist() for column in columns), strict=True):
        may_exit = len(queue) < max_draft_tokens
        is_draft = level < n_blocks and may_exit
        cost += (level if is_draft else n_blocks) * costs.block
        if may_exit:
            cost += probe_evaluations * costs.probe + unembeddings * costs.early_unembedding
        if is_draft:
            queue.append((level, correct))
            continue
        cost += costs.unembedding  # one product verifies all drafts
        cost += sum(n_blocks - exit_level for exit_level, _ in queue) * costs.queued_token
        first_rejected = next((i for i, (_, right) in enumerate(queue) if not right), None)
        # A rejected draft is replaced by the right token. The token at level L counts only if no draft was rejected.
        n_tokens += len(queue) + 1 if first_rejected is None else first_rejected + 1
        queue = []
    return cost / n_tokens if n_tokens else float("inf")
