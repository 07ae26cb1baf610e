"""Closed forms for what stands in for a cut: a map of the feed-forward output before it, and a turn of all behind it.

Level i is y + m: the stream after attention, and what block i's feed-forward adds. Blocks i + 1 to j are cut out.
ReplaceMe (arXiv 2505.02819) puts y + T m in place of level j, T by least squares. But norms forget scale, and RMSNorms
rotations: all blocks behind the cut may be turned exactly (see `turn`), so it is enough that y + T m is near c Q h for
some scale c and rotation Q, h being level j. We minimise Σ ‖a y + A m − Q h‖² / ‖h‖ over a, A and Q (a = 1/c,
A = a T), in turns: a and A by least squares, Q by orthogonal Procrustes. All of it reads off second moments. The
weight stands between two that are each better somewhere: none, where the sink alone decides the scale, and 1 / ‖h‖²,
the error as norms see it, where the sink's own state is got wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from layerjump.fit.factor import Factor, uncentred
from layerjump.fit.moments import Moments
from layerjump.fit.pairs import Pair
from layerjump.inputs.sites import Site

ROUNDS = 20
ADDED, STREAM, TARGET = Site(1, "ffn.out"), Site(1, "mid"), Site(2)
"""Names for the three states of any cut: m, y and h."""
Rows = dict[Site, Tensor]
PAIRS: list[Pair] = [(ADDED, STREAM), (ADDED, TARGET), (STREAM, TARGET)]


@dataclass(frozen=True, eq=False)
class Fold:
    """m becomes T m + b; the stream behind it is scale · rotation @ what it was."""

    weight: Tensor
    bias: Tensor | None
    scale: float = 1.0
    rotation: Tensor | None = None


@dataclass(frozen=True, eq=False)
class _Products:
    """Σ of products of m, y and h."""

    factor: Factor  # of m with itself
    my: Tensor
    mh: Tensor
    yh: Tensor
    yy: float  # the trace alone


def rows(added: Tensor, stream: Tensor, target: Tensor, *, intercept: bool, weighted: bool) -> Rows:
    """One batch's rows for the sums; an intercept is one more coordinate of m that is always 1."""
    if intercept:
        added = torch.cat([added, torch.ones_like(added[:, :1])], -1)
    found = {ADDED: added, STREAM: stream, TARGET: target}
    if not weighted:
        return found
    rms = target.float().square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12).to(target)
    return {site: state / rms.sqrt() for site, state in found.items()}


def solve_fold(sums: Moments, *, intercept: bool, stretch: bool, turned: bool) -> Fold:
    """The map of the feed-forward output, and with it the scale and the rotation of what follows."""
    products = _products(sums)
    rotation = torch.eye(len(sums.mean(TARGET)), dtype=torch.float64)
    a, weight = _map(products, rotation, stretch)
    for _ in range(ROUNDS if turned else 0):
        U, _, Vh = torch.linalg.svd(a * products.yh + weight @ products.mh)
        rotation = U @ Vh
        a, weight = _map(products, rotation, stretch)
    weight = weight / a
    bias = weight[:, -1] if intercept else None
    weight = weight[:, :-1] if intercept else weight
    return Fold(weight, bias, 1 / a, rotation if turned else None)


def _map(products: _Products, rotation: Tensor, stretch: bool) -> tuple[float, Tensor]:
    """Least squares of Q h on y (one number a) and m (a matrix): a from what m leaves unexplained of both."""
    mh = products.mh @ rotation.mT
    explained = products.factor.solve(products.my)
    left = products.yy - float((products.my * explained).sum())
    shared = float((products.yh * rotation).sum()) - float((explained * mh).sum())
    # A scale that is not positive would turn the stream round: nothing is to be gained by one.
    a = shared / left if stretch and left > 0 and shared > 0 else 1.0
    return a, products.factor.solve(mh - a * products.my).mT


def _products(sums: Moments) -> _Products:
    """Moments are kept about their means; here they are wanted as they are."""
    n, mean = sums.n, {site: sums.mean(site) for site in (ADDED, STREAM, TARGET)}
    my, mh, yh = (sums.target(a, b).cross + n * torch.outer(mean[a], mean[b]) for a, b in PAIRS)
    spread = sums.source(STREAM).scatter.diagonal().sum() + n * mean[STREAM].square().sum()
    return _Products(uncentred(sums.source(ADDED)), my, mh, yh, float(spread))
