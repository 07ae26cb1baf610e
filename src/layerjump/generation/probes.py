"""Probes: predict from a hidden state alone whether exiting there gives the final token.

A vocabulary product costs as much as several blocks; a gate costs one dot product. It reads z = [h / rms(h),
log rms(h), position] and gives the log-odds w·z + b. It is fitted by penalised logistic regression on documents that
the jumps have not seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from layerjump.errors import BadExit
from layerjump.generation.rules import LevelReading

STEPS = 30
"""Newton steps at most; a handful is usual."""


def probe_features(states: Tensor, position: Tensor) -> Tensor:
    """z, and a one for the bias, (rows, d + 3)."""
    wide = states if states.dtype == torch.float64 else states.float()
    rms = wide.square().mean(-1, keepdim=True).sqrt().clamp_min(torch.finfo(wide.dtype).tiny)
    place = position.to(wide)[:, None]
    return torch.cat([wide / rms, rms.log(), place, torch.ones_like(place)], -1)


@dataclass(frozen=True, eq=False)
class Probe:
    """Stop where the gate's probability of being right is at least the threshold; no vocabulary product is needed."""

    weights: Tensor
    """(levels, d + 3), a row for each level of `levels`."""
    levels: tuple[int, ...]
    threshold: float

    def odds(self, level: int, states: Tensor, position: Tensor) -> Tensor:
        """Log-odds that the token read here is the model's own, (rows,)."""
        if len(states) == 1 and states.dtype == torch.float32:
            return states.new_tensor([self._of_one(level, states[0], int(position))])
        features = probe_features(states, position)
        return features @ self.weights[self.levels.index(level)].to(features)

    def _of_one(self, level: int, state: Tensor, position: int) -> float:
        """The same for one token, the usual case, where calls are what costs: the same sum in fewer of them."""
        weight, slope, drift, bias = self._rows[level]
        if weight.device != state.device:
            weight = weight.to(state.device)
        rms = float(state.norm()) / math.sqrt(len(state))
        rms = max(rms, torch.finfo(state.dtype).tiny)
        return float(weight.dot(state)) / rms + slope * math.log(rms) + drift * position + bias

    @cached_property
    def _rows(self) -> dict[int, tuple[Tensor, float, float, float]]:
        """Level → weights of the state, and those of log rms, position and one as plain numbers."""
        rows = {}
        for level, row in zip(self.levels, self.weights, strict=True):
            slope, drift, bias = row[-3:].tolist()
            rows[level] = (row[:-3].float().contiguous(), slope, drift, bias)
        return rows

    def should_exit(self, reading: LevelReading) -> Tensor:
        reading.probe_evaluations += 1
        return self.odds(reading.level, reading.states, reading.positions) >= log_odds(
            self.threshold
        )


@dataclass(frozen=True, eq=False)
class TwoStage:
    """The gate says when a vocabulary product is worth making; gate and softmax gap together then decide."""

    gate: Probe
    """Its threshold is the probability from which a product is worth it."""
    mix: Tensor
    """(levels, 3): weights of the gate's log-odds, the gap's and one, giving the log-odds of both together."""
    threshold: float

    @property
    def levels(self) -> tuple[int, ...]:
        return self.gate.levels

    def odds(self, level: int, gate_odds: Tensor, gap: Tensor) -> Tensor:
        """Log-odds from both."""
        weight = self.mix[self.levels.index(level)].to(gate_odds)
        return mixed_features(gate_odds, gap) @ weight

    def should_exit(self, reading: LevelReading) -> Tensor:
        reading.probe_evaluations += 1
        gate_odds = self.gate.odds(reading.level, reading.states, reading.positions)
        worth = gate_odds >= log_odds(self.gate.threshold)
        if not bool(worth.any()):
            return worth
        return worth & (
            self.odds(reading.level, gate_odds, reading.gap) >= log_odds(self.threshold)
        )


def mixed_features(gate_odds: Tensor, gap: Tensor) -> Tensor:
    """What the second stage reads: both as log-odds, and a one; (rows, 3)."""
    gap_odds = torch.logit(gap.to(gate_odds), eps=1e-6)
    return torch.stack([gate_odds, gap_odds, torch.ones_like(gate_odds)], -1)


def log_odds(probability: float) -> float:
    """ln p / (1 − p); infinite at the ends."""
    if not 0 <= probability <= 1:
        raise BadExit(f"the threshold given is {probability}; give a probability from 0 to 1")
    if probability in (0, 1):
        return math.inf if probability else -math.inf
    return math.log(probability / (1 - probability))


def fit_logistic(x: Tensor, y: Tensor, strength: float) -> Tensor:
    """The weights w that minimise mean log-loss of y given σ(x·w) plus strength/2 ‖w‖², by Newton's method.

    Columns are standardised first, so that the penalty treats all alike; the last one, all ones, is the bias and is
    not penalised. The weights returned are of the columns as given.
    """
    x, y = x.double(), y.double()
    centre, spread = x.mean(0), x.std(0)
    centre[-1], spread[-1] = 0, 1
    spread = torch.where(spread > 0, spread, 1)
    z = (x - centre) / spread
    penalty = torch.full_like(spread, strength)
    penalty[-1] = 1e-9  # labels that are all alike would send the bias to infinity
    w = torch.zeros_like(spread)
    for _ in range(STEPS):
        p = torch.sigmoid(z @ w)
        slope = z.mT @ (p - y) / len(y) + penalty * w
        curve = (z * (p * (1 - p))[:, None]).mT @ z / len(y) + penalty.diag()
        curve.diagonal().add_(1e-9)
        step = torch.linalg.solve(curve, slope)
        w = w - step * min(1.0, 10.0 / float(step.norm().clamp_min(1e-12)))
        if float(step.norm()) < 1e-8:
            break
    found = w / spread
    found[-1] = w[-1] - (found * centre)[:-1].sum()
    return found


def log_loss(x: Tensor, y: Tensor, w: Tensor) -> float:
    """Mean log-loss of labels under weights."""
    odds = x.double() @ w
    return float(torch.nn.functional.binary_cross_entropy_with_logits(odds, y.double()))


def calibration_curve(probability: Tensor, right: Tensor, bins: int = 10) -> list[dict[str, float]]:
    """Mean predicted and mean found, of equally many examples each, in order of the prediction."""
    order = probability.argsort()
    rows = []
    for part in order.chunk(min(bins, max(1, len(order)))):
        rows.append(
            {
                "predicted": float(probability[part].double().mean()),
                "found": float(right[part].double().mean()),
                "n": len(part),
            }
        )
    return rows
