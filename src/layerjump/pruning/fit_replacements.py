"""Fit and attach what replaces dropped blocks, in closed form: an affine map, or a map folded into the weights.

Spans are fitted in order. The source of each is the state in the model whose earlier spans are replaced already, the
target the original model's state on the same tokens, so that a replacement corrects the error of earlier ones.

Folded maps. Level i is y + m: the residual stream y after attention plus the feed-forward output m of block i (where a
block has no feed-forward, the output of its last part; a mixture of experts is folded into all its experts).
Blocks i + 1 to j are dropped, and h is level j. ReplaceMe (arXiv 2505.02819) replaces h by y + T m, T by least squares.
Norms are invariant to scale, and RMSNorms to rotation, so all later blocks can be transformed exactly (`edit_model`),
and it suffices that y + T m is near c Q h for some scale c and rotation Q. We minimise Σ ‖a y + A m − Q h‖² / ‖h‖ over
a, A and Q (a = 1/c, A = a T), alternating: a and A by least squares, Q by orthogonal Procrustes, all from second
moments. The weight 1 / ‖h‖ is between two that each fail somewhere: without a weight the attention sink alone decides
the scale; with 1 / ‖h‖², the error as norms see it, the sink's own state comes out wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from layerjump.data.batches import Batches
from layerjump.errors import BadPruning, argument
from layerjump.jumps.collect_moments import product_dtype
from layerjump.jumps.estimators.least_squares import factorise_uncentred
from layerjump.jumps.estimators.registry import solve
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.jumps import Jumps, RunInfo
from layerjump.jumps.maps import apply_map
from layerjump.jumps.moments import Moments
from layerjump.jumps.moments_of_splits import SplitMoments
from layerjump.models.hooks import attach_map
from layerjump.models.model import Model, capture_states
from layerjump.models.sites import Pair, Site
from layerjump.pruning.output_weights import cannot_fold, folded_output
from layerjump.pruning.refit_projections import cannot_refit
from layerjump.pruning.rotate_stream import StreamTransform, can_scale, cannot_rotate, transform_stream
from layerjump.pruning.select import Span, blocks_in_spans

METHODS = {
    "remove": "nothing",
    "linear": "an affine map of the residual stream, stored next to the model",
    "replaceme": "a map of the feed-forward output before the span, folded into it (least squares, as ReplaceMe)",
    "fold": "the same map, and a scale of the residual stream after it, folded into the later blocks",
    "rotation": "map, scale and a rotation of the residual stream after it, folded into the later blocks and an "
    "untied unembedding",
    "refit": "the same as fold, and then the output projections before and after the span refitted by ridge regression",
    "rotation-refit": "the same as rotation, and then the output projections before and after the span refitted",
}
FOLDING_METHODS = ("replaceme", "fold", "rotation")
REFITTED_METHODS = {"refit": "fold", "rotation-refit": "rotation"}
"""Method that refits output projections → the replacement that it starts from."""
N_ROUNDS = 20
"""Number of alternations between the map and the rotation."""
FFN_OUT, RESIDUAL, TARGET = Site(1, "ffn.out"), Site(1, "mid"), Site(2)
"""Keys of m, y and h in the moments of any span."""
PAIRS: list[Pair] = [(FFN_OUT, RESIDUAL), (FFN_OUT, TARGET), (RESIDUAL, TARGET)]
PairedStates = Iterator[tuple[list[Tensor], Tensor]]
"""For each batch, states before a span at some sites, and states after it."""


def check_method(model: Model, method: str, spans: Sequence[Span] = ()) -> None:
    """Raise `BadPruning` for an unknown method, or one that the model's family or these spans do not allow."""
    if method not in METHODS:
        raise BadPruning(f"expected {argument('method')} to be one of {', '.join(METHODS)}, got {method!r}")
    if method in REFITTED_METHODS and (reason := cannot_refit(model)):
        raise BadPruning(f"{method} is not possible: {reason}; use linear or remove")
    method = starting_method(model, method, spans)
    if method in FOLDING_METHODS and (reason := cannot_fold(model)):
        raise BadPruning(f"{method} is not possible: {reason}; use linear or remove")
    if method == "rotation" and (reason := cannot_rotate(model)):
        raise BadPruning(f"rotation is not possible: {reason}; use fold")
    if method in FOLDING_METHODS and spans and spans[0][0] == 0:
        raise BadPruning(
            f"{method} folds a map into the block before a span, but the first block is to be dropped; use linear or "
            f"remove, or keep the first block"
        )


def starting_method(model: Model, method: str, spans: Sequence[Span] = ()) -> str:
    """Return the replacement that a method starts from: itself, or that of a method which refits projections.

    Where no map can be folded, `refit` starts from nothing in place of the blocks.
    """
    if method == "refit" and (cannot_fold(model) or (spans and spans[0][0] == 0)):
        return "remove"
    return REFITTED_METHODS.get(method, method)


def fit_replacements(
    model: Model, pruned: Model, spans: Sequence[Span], method: str, batches: Batches, info: RunInfo
) -> tuple[Jumps | None, tuple[StreamTransform, ...]]:
    """Fit a replacement for each dropped span of a model into `pruned`, a copy without these blocks.

    Return the maps of `linear`, which no weight of the model can hold, and the transforms of the residual stream.
    """
    fitted: list[Jumps] = []
    transforms: list[StreamTransform] = []
    for source, target in spans if method != "remove" else ():
        level = level_after_pruning(source, spans)
        sites = [Site(level)] if method == "linear" else [Site(level), Site(level, folded_output(pruned, level)[0])]
        is_first = (source, target) == spans[0]
        pairs = _paired_states(model, pruned, batches, sites, Site(target), is_first=is_first)
        if method == "linear":
            fitted.append(_fit_linear(pairs, (Site(source), Site(target)), info, pruned.hf.dtype))
            # In a hook, so that the model's own code, KV cache and generation stay as they are.
            attach_map(pruned.structure.tap(Site(level)), fitted[-1][source, target], apply_map)
        else:
            before = transforms[-1] if transforms else StreamTransform(0)
            transforms.append(_fit_folded(pairs, pruned, level, method, before))
    if not fitted:
        return None, tuple(transforms)
    maps = {pair: jumps[pair] for jumps in fitted for pair in jumps}
    infos = {pair: jumps.info[pair] for jumps in fitted for pair in jumps}
    return Jumps(maps, infos, fitted[0].provenance), ()


def _paired_states(
    model: Model, pruned: Model, batches: Batches, sites: list[Site], target: Site, *, is_first: bool
) -> PairedStates:
    """Yield states of the pruned model at sites before a span, and of the original model after it."""
    if is_first:  # the two models are equal up to the first span
        for states in capture_states(model, batches, [*sites, target]):
            yield [states[site] for site in sites], states[target]
        return
    originals = capture_states(model, batches, [target])
    for states, original in zip(capture_states(pruned, batches, sites), originals, strict=True):
        yield [states[site] for site in sites], original[target]


def _fit_linear(pairs: PairedStates, ends: Pair, info: RunInfo, dtype: torch.dtype) -> Jumps:
    fit, validation, test = (Moments([ends], reservoir=0) for _ in range(3))
    for (states,), targets in pairs:
        fit.add({ends[0]: states, ends[1]: targets})
    jumps = solve_jumps(SplitMoments(fit, validation, test, info), "affine")
    if dtype == torch.float64:
        # Jumps store float32; a float64 model gets the map at full precision.
        jump = jumps[ends]
        (exact,) = solve("affine", fit.source(ends[0]), [fit.target(*ends)])
        assert isinstance(jump, nn.Linear)
        assert exact.bias is not None
        jump.double()
        jump.weight.data.copy_(exact.weight)
        jump.bias.data.copy_(exact.bias)
    return jumps


def _fit_folded(
    pairs: PairedStates, pruned: Model, level: int, method: str, before: StreamTransform
) -> StreamTransform:
    """Fold a map into the block below a level, and a transform of the stream into the blocks above it."""
    _, weights, gain = folded_output(pruned, level)
    is_replaceme, bias = method == "replaceme", weights.bias is not None
    moments = Moments(PAIRS, reservoir=0, products=product_dtype(pruned))
    for (states, output), targets in pairs:
        targets = targets.to(output.device)
        ffn_out = output * gain.to(output)
        moments.add(fold_rows(ffn_out, states - ffn_out, targets, bias=bias, weighted=not is_replaceme))
    fit_scale = not is_replaceme and can_scale(pruned)
    folded = solve_fold(moments, bias=bias, fit_scale=fit_scale, fit_rotation=method == "rotation")
    # The map is of what reaches the next level, gain · output.
    gain = gain.to(folded.weight.device)
    shift = None if folded.bias is None else folded.bias / gain
    weights.fold(folded.weight * gain / gain[:, None], shift)
    if not is_replaceme and (fit_scale or folded.rotation is not None):
        # Blocks after an earlier span are transformed already; only the difference remains.
        rotation = folded.rotation
        if rotation is not None and before.rotation is not None:
            rotation = rotation @ before.rotation.mT
        transform_stream(pruned, level, rotation, folded.scale / before.scale)
    return StreamTransform(level, folded.scale, folded.rotation)


def level_after_pruning(level: int, spans: Sequence[Span]) -> int:
    """Return the level of the pruned model that a level of the original model becomes."""
    return level - sum(block <= level for block in blocks_in_spans(spans))


@dataclass(frozen=True, eq=False)
class Fold:
    """A map T, b of the feed-forward output m; the residual stream after it is scale · rotation @ the original."""

    weight: Tensor
    bias: Tensor | None
    scale: float = 1.0
    rotation: Tensor | None = None


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
    # Sums of products without centring.
    n, mean = moments.n, {site: moments.mean(site) for site in (FFN_OUT, RESIDUAL, TARGET)}
    my, mh, yh = (moments.target(a, b).cross + n * torch.outer(mean[a], mean[b]) for a, b in PAIRS)
    mm = factorise_uncentred(moments.source(FFN_OUT))
    yy = float(moments.source(RESIDUAL).scatter.diagonal().sum() + n * mean[RESIDUAL].square().sum())

    def solve_map(rotation: Tensor) -> tuple[float, Tensor]:
        """Least squares of Q h on y (a scalar a) and m (a matrix A); a from the parts of y and Q h that m leaves."""
        rotated = mh @ rotation.mT
        yh_left = float((yh * rotation).sum()) - float((explained * rotated).sum())
        # A negative scale would invert the stream, which never helps.
        a = yh_left / yy_left if fit_scale and yy_left > 0 and yh_left > 0 else 1.0
        return a, mm.solve(rotated - a * my).mT

    explained = mm.solve(my)
    yy_left = yy - float((my * explained).sum())
    rotation = torch.eye(len(mean[TARGET]), dtype=torch.float64, device=mh.device)
    a, weight = solve_map(rotation)
    for _ in range(N_ROUNDS if fit_rotation else 0):
        U, _, Vh = torch.linalg.svd(a * yh + weight @ mh)
        rotation = U @ Vh
        a, weight = solve_map(rotation)
    weight = weight / a
    weight, shift = (weight[:, :-1], weight[:, -1]) if bias else (weight, None)
    return Fold(weight, shift, 1 / a, rotation if fit_rotation else None)
