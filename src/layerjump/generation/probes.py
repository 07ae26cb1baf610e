"""Probes: predict from a hidden state alone whether exiting there gives the full model's token.

An unembedding costs as much as several blocks; a probe (a "gate" in some papers) costs one dot product. It reads the
features z = [h / rms(h), log rms(h), position, 1] of a hidden state h and returns the log-odds w·z. Its weights are
fitted by penalised logistic regression on documents that the jumps were not fitted on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from layerjump.errors import BadExit
from layerjump.generation.exit_rules import LevelReading

_NEWTON_STEPS = 30  # at most; a handful is usual


def probe_features(states: Tensor, positions: Tensor) -> Tensor:
    """The features z that a probe reads, with the one for its bias, (rows, d_model + 3)."""
    wide = states if states.dtype == torch.float64 else states.float()
    rms = wide.square().mean(-1, keepdim=True).sqrt().clamp_min(torch.finfo(wide.dtype).tiny)
    column = positions.to(wide)[:, None]
    return torch.cat([wide / rms, rms.log(), column, torch.ones_like(column)], -1)


@dataclass(frozen=True, eq=False)
class Probe:
    """Exit where the probe's probability of the full model's token reaches a threshold; no unembedding is needed."""

    weights: Tensor
    """(levels, d_model + 3), one row for each of `levels`."""
    levels: tuple[int, ...]
    threshold: float

    def log_odds(self, level: int, states: Tensor, positions: Tensor) -> Tensor:
        """The log-odds that the level predicts the full model's token, (rows,)."""
        if len(states) > 1 or states.dtype != torch.float32 or states.device.type != "cpu":
            features = probe_features(states, positions)
            return features @ self.weights[self.levels.index(level)].to(features)
        # The same sum for a single token in fewer calls, which dominate its cost on a CPU.
        weight, (slope, drift, bias) = self._weights_by_level[level]
        rms = float(states.norm()) / math.sqrt(states.shape[1])
        rms = max(rms, torch.finfo(states.dtype).tiny)
        along = float(weight.to(states.device).dot(states[0])) / rms
        return states.new_tensor([along + slope * math.log(rms) + drift * int(positions) + bias])

    @cached_property
    def _weights_by_level(self) -> dict[int, tuple[Tensor, list[float]]]:
        """Level → the weights of the state, and those of log rms, position and one as plain numbers."""
        rows = zip(self.levels, self.weights, strict=True)
        return {level: (row[:-3].float().contiguous(), row[-3:].tolist()) for level, row in rows}

    def should_exit(self, reading: LevelReading) -> Tensor:
        reading.probe_evaluations += 1
        odds = self.log_odds(reading.level, reading.states, reading.positions)
        return odds >= log_odds(self.threshold)


@dataclass(frozen=True, eq=False)
class TwoStage:
    """The probe selects the rows that are worth an unembedding; probe and softmax gap together then decide."""

    probe: Probe
    """Its threshold is the probability from which an unembedding is worth its cost."""
    combination: Tensor
    """(levels, 3) weights of the probe's log-odds, the gap's log-odds and one; they give the combined log-odds."""
    threshold: float

    @property
    def levels(self) -> tuple[int, ...]:
        return self.probe.levels

    def should_exit(self, reading: LevelReading) -> Tensor:
        reading.probe_evaluations += 1
        probe_odds = self.probe.log_odds(reading.level, reading.states, reading.positions)
        selected = probe_odds >= log_odds(self.probe.threshold)
        if not bool(selected.any()):
            return selected
        weights = self.combination[self.levels.index(reading.level)].to(probe_odds)
        odds = combination_features(probe_odds, reading.gap) @ weights
        return selected & (odds >= log_odds(self.threshold))


def combination_features(probe_odds: Tensor, gap: Tensor) -> Tensor:
    """The second stage's features, (rows, 3): the log-odds of the probe, those of the gap, and one."""
    gap_odds = torch.logit(gap.to(probe_odds), eps=1e-6)
    return torch.stack([probe_odds, gap_odds, torch.ones_like(probe_odds)], -1)


def log_odds(probability: float) -> float:
    """ln p / (1 − p); infinite at 0 and 1."""
    if not 0 <= probability <= 1:
        raise BadExit(f"a threshold must be a probability from 0 to 1, got {probability}")
    if probability in (0, 1):
        return math.inf if probability else -math.inf
    return math.log(probability / (1 - probability))


def fit_logistic(x: Tensor, y: Tensor, strength: float) -> Tensor:
    """The weights w that minimise the mean log-loss of y given σ(x·w), plus strength/2 ‖w‖², by Newton's method.

    Columns are standardised first, so that the penalty treats them alike. The last column, all ones, is the bias and
    is not penalised. The weights returned apply to the columns of `x` as they are.
    """
    x, y = x.double(), y.double()
    centre, spread = x.mean(0), x.std(0)
    centre[-1], spread[-1] = 0, 1
    spread = torch.where(spread > 0, spread, 1)
    z = (x - centre) / spread
    penalty = torch.full_like(spread, strength)
    penalty[-1] = 1e-9  # labels that are all equal would send the bias to infinity
    w = torch.zeros_like(spread)
    for _ in range(_NEWTON_STEPS):
        p = torch.sigmoid(z @ w)
        gradient = z.mT @ (p - y) / len(y) + penalty * w
        hessian = (z * (p * (1 - p))[:, None]).mT @ z / len(y) + penalty.diag()
        hessian.diagonal().add_(1e-9)
        step = torch.linalg.solve(hessian, gradient)
        w = w - step * min(1.0, 10.0 / float(step.norm().clamp_min(1e-12)))
        if float(step.norm()) < 1e-8:
            break
    weights = w / spread
    weights[-1] = w[-1] - (weights * centre)[:-1].sum()
    return weights
