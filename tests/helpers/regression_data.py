"""Rows whose sums the fitting tests start from, formed in the plainest way, and maps fitted on them."""

import torch
from torch import Tensor

from layerjump.jumps.estimators.registry import ESTIMATORS, solve
from layerjump.jumps.moments import Source, Target

CLOSE = {"rtol": 1e-8, "atol": 1e-8}
BY_SOURCE = [name for name, row in ESTIMATORS.items() if row.scope == "source"]
# Settings that estimators cannot do without.
SETTINGS = {"ridge": {"strength": 1e-3}, "low-rank": {"rank": 2}}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sums(x: Tensor, *ys: Tensor) -> tuple[Source, list[Target]]:
    """The sums of rows x, paired with each of ys."""
    xc = x - x.mean(0)
    targets = []
    for y in ys:
        yc = y - y.mean(0)
        targets.append(Target(y.mean(0), xc.mT @ yc, yc.square().sum(0)))
    return Source(len(x), x.mean(0), xc.mT @ xc), targets


def noisy(n: int, dx: int, dy: int, *, noise: float = 0.5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Correlated inputs off the origin, and an affine function of them in noise."""
    x = random(n, dx, seed=seed) @ random(dx, dx, seed=100) / dx**0.5 + random(dx, seed=101)
    weight, bias = random(dy, dx, seed=102), random(dy, seed=103)
    return x, x @ weight.mT + bias + noise * random(n, dy, seed=seed + 1000)


def error(map_, x: Tensor, y: Tensor) -> float:
    """Squared error of a map over rows."""
    return float((map_(x) - y).square().sum())


def fit(name, x, y, **extra):
    source, targets = sums(x, y)
    return solve(name, source, targets, **{**SETTINGS.get(name, {}), **extra})[0]
