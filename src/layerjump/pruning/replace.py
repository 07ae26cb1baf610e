"""Fit and attach what replaces dropped blocks, in closed form: an affine map, or a map folded into the weights.

Spans are fitted in order. The source of each is the state in the model whose earlier spans are replaced already, the
target the original model's state on the same tokens, so that a replacement corrects the error of earlier ones.

Folded maps. Level i is y + m: the residual stream y after attention plus the feed-forward output m of block i.
Blocks i + 1 to j are dropped, and h is level j. ReplaceMe (arXiv 2505.02819) replaces h by y + T m, T by least squares.
Norms are invariant to scale, and RMSNorms to rotation, so all later blocks can be transformed exactly (`edit_model`),
and it suffices that y + T m is near c Q h for some scale c and rotation Q. We minimise Σ ‖a y + A m − Q h‖² / ‖h‖ over
a, A and Q (a = 1/c, A = a T), alternating: a and A by least squares, Q by orthogonal Procrustes, all from second
moments. The weight 1 / ‖h‖ is between two that each fail somewhere: without a weight the attention sink alone decides
the scale; with 1 / ‖h‖², the error as norms see it, the sink's own state comes out wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from layerjump.data.batches import Batches
from layerjump.errors import BadPruning, argument
from layerjump.jumps.collect_moments import SplitMoments, product_dtype
from layerjump.jumps.estimators.least_squares import Factor, factorise_uncentred
from layerjump.jumps.estimators.registry import solve
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.jumps import Jumps, RunInfo
from layerjump.jumps.maps import apply_map
from layerjump.jumps.moments import Moments
from layerjump.models.hooks import attach_map
from layerjump.models.model import Model, capture_states
from layerjump.models.structure import Pair, Site
from layerjump.pruning.select import Span, blocks_in_spans
from layerjump.pruning.surgery import (
    can_scale,
    cannot_fold,
    cannot_rotate,
    ffn_output_layer,
    fold_output_map,
    transform_stream,
)

METHODS = {
    "remove": "nothing",
    "linear": "an affine map of the residual stream, stored next to the model",
    "replaceme": "a map of the feed-forward output before the span, folded into it (least squares, as ReplaceMe)",
    "fold": "the same map, and a scale of the residual stream after it, folded into the later blocks",
    "rotation": "map, scale and a rotation of the residual stream after it, folded into the later blocks and an "
    "untied unembedding",
}
FOLDING_METHODS = ("replaceme", "fold", "rotation")
N_ROUNDS = 20
"""Number of alternations between the map and the rotation."""
FFN_OUT, RESIDUAL, TARGET = Site(1, "ffn.out"), Site(1, "mid"), Site(2)
"""Keys of m, y and h in the moments of any span."""
PAIRS: list[Pair] = [(FFN_OUT, RESIDUAL), (FFN_OUT, TARGET), (RESIDUAL, TARGET)]


def check_method(model: Model, method: str) -> None:
    """Raise `BadPruning` for an unknown method, or one that the model's family does not allow."""
    if method not in METHODS:
        raise BadPruning(f"expected {argument('method')} to be one of {', '.join(METHODS)}, got {method!r}")
    if method in FOLDING_METHODS and (reason := cannot_fold(model)):
        raise BadPruning(f"{method} is not possible: {reason}; use linear or remove")
    if method == "rotation" and (reason := cannot_rotate(model)):
        raise BadPruning(f"rotation is not possible: {reason}; use fold")


def check_spans(spans: Sequence[Span], method: str) -> None:
    """Raise `BadPruning` if a span has no block before it that a map can be folded into."""
    if method in FOLDING_METHODS and spans and spans[0][0] == 0:
        raise BadPruning(
            f"{method} folds a map into the block before a span, but the first block is to be dropped; use linear or "
            f"remove, or keep the first block"
        )


@dataclass(frozen=True, eq=False)
class StreamTransform:
    """From this level of the pruned model on, its residual stream is scale · rotation @ the original model's."""

    level: int
    scale: float = 1.0
    rotation: Tensor | None = None

    def __call__(self, states: Tensor) -> Tensor:
        """Transform states of the original model."""
        rotated = states if self.rotation is None else states @ self.rotation.mT.to(states)
        return self.scale * rotated


class ReplacementFitter:
    """Fits a replacement for each dropped span of a model into a copy without these blocks."""

    def __init__(self, model: Model, pruned: Model, batches: Batches, info: RunInfo) -> None:
        self.transforms: list[StreamTransform] = []
        """Transforms of the pruned model's residual stream, by level."""
        self._model, self._pruned = model, pruned
        self._batches, self._info = batches, info

    def fit(self, spans: Sequence[Span], method: str) -> Jumps | None:
        """Replace every span; return the maps of `linear`, which no weight of the model can hold."""
        fitted: list[Jumps] = []
        for index, span in enumerate(spans):
            level = level_after_pruning(span[0], spans)
            if method == "linear":
                fitted.append(self._fit_linear(span, level, is_first=index == 0))
                attach_maps(self._pruned, {level: fitted[-1][span]})
            elif method != "remove":
                self._fit_folded(span, level, method, is_first=index == 0)
        if not fitted:
            return None
        maps = {pair: jumps[pair] for jumps in fitted for pair in jumps}
        infos = {pair: jumps.info[pair] for jumps in fitted for pair in jumps}
        return Jumps(maps, infos, fitted[0].provenance)

    def _fit_linear(self, span: Span, level: int, *, is_first: bool) -> Jumps:
        source, target = Site(span[0]), Site(span[1])
        fit, validation, test = (Moments([(source, target)], reservoir=0) for _ in range(3))
        for states, targets in self._paired_states([Site(level)], span, is_first=is_first):
            fit.add({source: states[Site(level)], target: targets})
        jumps = solve_jumps(SplitMoments(fit, validation, test, self._info), "affine")
        if self._pruned.hf.dtype == torch.float64:
            # Jumps store float32; a float64 model gets the map at full precision.
            jump = jumps[span]
            (exact,) = solve("affine", fit.source(source), [fit.target(source, target)])
            assert isinstance(jump, nn.Linear)
            assert exact.bias is not None
            jump.double()
            jump.weight.data.copy_(exact.weight)
            jump.bias.data.copy_(exact.bias)
        return jumps

    def _fit_folded(self, span: Span, level: int, method: str, *, is_first: bool) -> None:
        ffn_out = Site(level, "ffn.out")
        layer, is_replaceme = ffn_output_layer(self._pruned, level), method == "replaceme"
        bias = getattr(layer, "bias", None) is not None
        moments = Moments(PAIRS, reservoir=0, products=product_dtype(self._model))
        for states, targets in self._paired_states([Site(level), ffn_out], span, is_first=is_first):
            residual = states[Site(level)] - states[ffn_out]
            moments.add(fold_rows(states[ffn_out], residual, targets, bias=bias, weighted=not is_replaceme))
        folded = solve_fold(
            moments,
            bias=bias,
            fit_scale=not is_replaceme and can_scale(self._pruned),
            fit_rotation=method == "rotation",
        )
        fold_output_map(layer, folded.weight, folded.bias)
        if not is_replaceme:
            # Blocks after an earlier span are transformed already; only the difference remains.
            before = self.transforms[-1] if self.transforms else StreamTransform(0)
            rotation = folded.rotation
            if rotation is not None and before.rotation is not None:
                rotation = rotation @ before.rotation.mT
            transform_stream(self._pruned, level, rotation, folded.scale / before.scale)
        self.transforms.append(StreamTransform(level, folded.scale, folded.rotation))

    def _paired_states(
        self, sites: list[Site], span: Span, *, is_first: bool
    ) -> Iterator[tuple[Mapping[Site, Tensor], Tensor]]:
        """States of the pruned model at sites before the span, and of the original model after it."""
        target = Site(span[1])
        if is_first:  # the two models are equal up to the first span
            for states in capture_states(self._model, self._batches, [*sites, target]):
                yield states.at, states[target]
            return
        pruned = capture_states(self._pruned, self._batches, sites)
        original = capture_states(self._model, self._batches, [target])
        for states, targets in zip(pruned, original, strict=True):
            yield states.at, targets[target]


def level_after_pruning(level: int, spans: Sequence[Span]) -> int:
    """Return the level of the pruned model that a level of the original model becomes."""
    return level - sum(block <= level for block in blocks_in_spans(spans))


def attach_maps(model: Model, maps: Mapping[int, nn.Module]) -> None:
    """Attach maps to levels of a model for good: it continues from the mapped states.

    The maps run in hooks, so that the model's own code, KV cache and generation stay as they are.
    """
    for level, jump in maps.items():
        attach_map(model.structure.tap(Site(level)), jump, apply_map)


@dataclass(frozen=True, eq=False)
class Fold:
    """A map T, b of the feed-forward output m; the residual stream after it is scale · rotation @ the original."""

    weight: Tensor
    bias: Tensor | None
    scale: float = 1.0
    rotation: Tensor | None = None


@dataclass(frozen=True, eq=False)
class _Products:
    """Uncentred sums of products of m, y and h over all positions."""

    mm: Factor
    my: Tensor
    mh: Tensor
    yh: Tensor
    trace_yy: float


def fold_rows(ffn_out: Tensor, residual: Tensor, target: Tensor, *, bias: bool, weighted: bool) -> dict[Site, Tensor]:
    """Return the rows of one batch for the moments of a fold; a bias is one more coordinate of m that is always 1."""
    if bias:
        ffn_out = torch.cat([ffn_out, torch.ones_like(ffn_out[:, :1])], -1)
    states = {FFN_OUT: ffn_out, RESIDUAL: residual, TARGET: target}
    if not weighted:
        return states
    rms = target.float().square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12).to(target)
    return {site: state / rms.sqrt() for site, state in states.items()}


def solve_fold(moments: Moments, *, bias: bool, fit_scale: bool, fit_rotation: bool) -> Fold:
    """Solve for the map of the feed-forward output, and for scale and rotation of the stream after it."""
    products = _sum_products(moments)
    rotation = torch.eye(len(moments.mean(TARGET)), dtype=torch.float64)
    a, weight = _solve_map(products, rotation, fit_scale)
    for _ in range(N_ROUNDS if fit_rotation else 0):
        U, _, Vh = torch.linalg.svd(a * products.yh + weight @ products.mh)
        rotation = U @ Vh
        a, weight = _solve_map(products, rotation, fit_scale)
    weight = weight / a
    return Fold(
        weight[:, :-1] if bias else weight, weight[:, -1] if bias else None, 1 / a, rotation if fit_rotation else None
    )


def _solve_map(products: _Products, rotation: Tensor, fit_scale: bool) -> tuple[float, Tensor]:
    """Least squares of Q h on y (a scalar a) and m (a matrix A); a from the parts of y and Q h that m leaves."""
    mh = products.mh @ rotation.mT
    explained = products.mm.solve(products.my)
    yy_left = products.trace_yy - float((products.my * explained).sum())
    yh_left = float((products.yh * rotation).sum()) - float((explained * mh).sum())
    # A negative scale would invert the stream, which never helps.
    a = yh_left / yy_left if fit_scale and yy_left > 0 and yh_left > 0 else 1.0
    return a, products.mm.solve(mh - a * products.my).mT


def _sum_products(moments: Moments) -> _Products:
    """Undo the centring of second moments."""
    n, mean = moments.n, {site: moments.mean(site) for site in (FFN_OUT, RESIDUAL, TARGET)}
    my, mh, yh = (moments.target(a, b).cross + n * torch.outer(mean[a], mean[b]) for a, b in PAIRS)
    scatter = moments.source(RESIDUAL).scatter
    trace_yy = scatter.diagonal().sum() + n * mean[RESIDUAL].square().sum()
    return _Products(factorise_uncentred(moments.source(FFN_OUT)), my, mh, yh, float(trace_yy))
