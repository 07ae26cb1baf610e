"""Fit and attach the maps that replace dropped blocks (ReplaceMe, rotation, linear).

Closed forms for what stands in for a cut: a map of the feed-forward output before it, and a turn of all behind it.

Level i is y + m: the stream after attention, and what block i's feed-forward adds. Blocks i + 1 to j are cut out.
ReplaceMe (arXiv 2505.02819) puts y + T m in place of level j, T by least squares. But norms forget scale, and RMSNorms
rotations: all blocks behind the cut may be turned exactly (see `rotation`), so it is enough that y + T m is near c Q h
for some scale c and rotation Q, h being level j. We minimise Σ ‖a y + A m − Q h‖² / ‖h‖ over a, A and Q (a = 1/c,
A = a T), in turns: a and A by least squares, Q by orthogonal Procrustes. All of it reads off second moments. The
weight stands between two that are each better somewhere: none, where the sink alone decides the scale, and 1 / ‖h‖²,
the error as norms see it, where the sink's own state is got wrong.

What stands in for blocks that are cut out, fitted in closed form on the states of the model as it is by then.

Cuts are fitted in order. The source of each is what reaches it in the model that has its earlier cuts already, its
target the untouched model's state on the same tokens: so an earlier cut's error is mended, not passed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layerjump.data.batches import Batches
from layerjump.errors import BadPruning
from layerjump.jumps.collect import SplitMoments, product_dtype
from layerjump.jumps.estimators.least_squares import Factor, uncentred
from layerjump.jumps.estimators.registry import solve
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import apply_map
from layerjump.jumps.pairs import Pair
from layerjump.jumps.statistics import Moments
from layerjump.models.activations import capture_states
from layerjump.models.hooks import attach_map
from layerjump.models.model import Model
from layerjump.models.structure import Site
from layerjump.pruning.residual_weights import (
    can_scale,
    cannot_fold,
    cannot_rotate,
    ffn_output_layer,
    fold_output_map,
    rotate_stream,
)
from layerjump.pruning.select import Span, blocks_in_spans

ROUNDS = 20
FFN_OUT, RESIDUAL, TARGET = Site(1, "ffn.out"), Site(1, "mid"), Site(2)
"""Names for the three states of any cut: m, y and h."""
Rows = dict[Site, Tensor]
PAIRS: list[Pair] = [(FFN_OUT, RESIDUAL), (FFN_OUT, TARGET), (RESIDUAL, TARGET)]


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


def fold_rows(
    added: Tensor, stream: Tensor, target: Tensor, *, intercept: bool, weighted: bool
) -> Rows:
    """One batch's rows for the sums; an intercept is one more coordinate of m that is always 1."""
    if intercept:
        added = torch.cat([added, torch.ones_like(added[:, :1])], -1)
    found = {FFN_OUT: added, RESIDUAL: stream, TARGET: target}
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
    n, mean = sums.n, {site: sums.mean(site) for site in (FFN_OUT, RESIDUAL, TARGET)}
    my, mh, yh = (sums.target(a, b).cross + n * torch.outer(mean[a], mean[b]) for a, b in PAIRS)
    spread = sums.source(RESIDUAL).scatter.diagonal().sum() + n * mean[RESIDUAL].square().sum()
    return _Products(uncentred(sums.source(FFN_OUT)), my, mh, yh, float(spread))


METHODS = {
    "remove": "nothing",
    "linear": "an affine map of the stream, kept beside the model",
    "replaceme": "a map of the feed-forward output before the cut, merged into it (least squares, as ReplaceMe)",
    "fold": "the same map, and a scale of the stream behind it, merged into the later blocks",
    "rotation": "map, scale and a rotation of the stream behind it, merged into the later blocks and an untied head",
}


def check_method(model: Model, method: str) -> None:
    """Refuse what the model's family cannot do, with the reason and what to do instead."""
    if method not in METHODS:
        raise BadPruning(f"the method given is {method!r}; give one of {', '.join(METHODS)}")
    if method in ("replaceme", "fold", "rotation") and (reason := cannot_fold(model)):
        raise BadPruning(f"{method} is not possible: {reason}; give linear or remove")
    if method == "rotation" and (reason := cannot_rotate(model)):
        raise BadPruning(f"turn is not possible: {reason}; give fold")


def check_cuts(cuts: Sequence[Span], method: str) -> None:
    """A fold needs a block before each cut."""
    if method in ("replaceme", "fold", "rotation") and cuts and cuts[0][0] == 0:
        raise BadPruning(
            f"the first block was to be dropped, and {method} merges a map into the block before; give linear or "
            f"remove, or keep the first block"
        )


@dataclass(frozen=True, eq=False)
class StreamTransform:
    """From this level of the pruned model on, its stream is scale · rotation @ the whole model's."""

    level: int
    scale: float = 1.0
    rotation: Tensor | None = None


class ReplacementFitter:
    """A pruned copy whose cuts get their stand-ins, one after another."""

    def __init__(
        self, model: Model, student: Model, batches: Batches, about: dict[str, Any]
    ) -> None:
        self.model = model
        self.student = student
        self.batches = batches
        self.about = about
        self.frames: list[StreamTransform] = []

    def fit(self, cuts: Sequence[Span], method: str) -> Jumps | None:
        """Give every cut its stand-in; `linear` returns its maps, which no weight of the model can hold."""
        found: list[Jumps] = []
        for place, cut in enumerate(cuts):
            level = cut[0] - len([block for block in blocks_in_spans(cuts) if block <= cut[0]])
            if method == "linear":
                found.append(self._linear(cut, level, first=place == 0))
                attach_maps(self.student, {level: found[-1][cut]})
            elif method != "remove":
                self._fold(cut, level, method, first=place == 0)
        return together(found) if found else None

    def _linear(self, cut: Span, level: int, *, first: bool) -> Jumps:
        source, target = Site(cut[0]), Site(cut[1])
        sums = {
            name: Moments([(source, target)], reservoir=0) for name in ("fit", "select", "test")
        }
        for ours, theirs in self._paired([Site(level)], cut, first=first):
            sums["fit"].add({source: ours[Site(level)], target: theirs})
        jumps = solve_jumps(SplitMoments(sums, self.about), "affine")
        if self.student.hf.dtype == torch.float64:
            _sharpen(jumps[cut], sums["fit"], (source, target))
        return jumps

    def _fold(self, cut: Span, level: int, method: str, *, first: bool) -> None:
        added = Site(level, "ffn.out")
        layer, ours_alone = ffn_output_layer(self.student, level), method != "replaceme"
        intercept = getattr(layer, "bias", None) is not None
        sums = Moments(PAIRS, reservoir=0, products=product_dtype(self.model))
        for ours, theirs in self._paired([Site(level), added], cut, first=first):
            stream = ours[Site(level)] - ours[added]
            made = fold_rows(ours[added], stream, theirs, intercept=intercept, weighted=ours_alone)
            sums.add(made)
        stretch = ours_alone and can_scale(self.student)
        found = solve_fold(sums, intercept=intercept, stretch=stretch, turned=method == "rotation")
        fold_output_map(layer, found.weight, found.bias)
        # Blocks behind an earlier cut are turned already: only the difference is still to be made.
        before = self.frames[-1] if self.frames else StreamTransform(0)
        turned = found.rotation
        if turned is not None and before.rotation is not None:
            turned = turned @ before.rotation.mT
        if method != "replaceme":
            rotate_stream(self.student, level, turned, found.scale / before.scale)
        self.frames.append(StreamTransform(level, found.scale, found.rotation))

    def _paired(
        self, sites: list[Site], cut: Span, *, first: bool
    ) -> Iterator[tuple[Mapping[Site, Tensor], Tensor]]:
        """The pruned model's states at the cut's near end, and the whole model's at its far end."""
        target = Site(cut[1])
        if first:  # up to here the two are the same
            for both in capture_states(self.model, self.batches, [*sites, target]):
                yield both.at, both[target]
            return
        ours = capture_states(self.student, self.batches, sites)
        theirs = capture_states(self.model, self.batches, [target])
        for here, there in zip(ours, theirs, strict=True):
            yield here.at, there[target]


def attach_maps(model: Model, maps: Mapping[int, nn.Module]) -> None:
    """Let the model go on from maps of its levels: they become part of it, and stay.

    A hook does it, so that the model's own code, its cache and its generation are as they were.
    """
    for level, jump in maps.items():
        attach_map(model.structure.tap(Site(level)), jump, apply_map)


def _sharpen(jump: nn.Module, sums: Moments, pair: Pair) -> None:
    """Jumps are kept in float32; a float64 model is given the map as it was solved."""
    (exact,) = solve("affine", sums.source(pair[0]), [sums.target(*pair)])
    assert isinstance(jump, nn.Linear)
    assert exact.bias is not None
    jump.double()
    jump.weight.data.copy_(exact.weight)
    jump.bias.data.copy_(exact.bias)


def together(sets: Sequence[Jumps]) -> Jumps:
    """Several sets of jumps of one run as one."""
    maps = {pair: jumps[pair] for jumps in sets for pair in jumps}
    infos = {pair: jumps.info[pair] for jumps in sets for pair in jumps}
    return Jumps(maps, infos, sets[0].provenance)


def count_parameters(model: nn.Module) -> int:
    """How many numbers a model stores, shared ones once."""
    return sum(tensor.numel() for tensor in {id(p): p for p in model.parameters()}.values())
