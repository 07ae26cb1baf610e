"""Linearity of a block from the second moments of its two levels, as in "Your Transformer is Secretly Linear"."""

from __future__ import annotations

from layerjump.jumps.estimators.registry import solve
from layerjump.jumps.maps import Affine
from layerjump.jumps.pairs import Pair
from layerjump.jumps.scoring import residual
from layerjump.jumps.statistics import Moments
from layerjump.metrics.linearity import chance_floor
from layerjump.models.structure import Site

NOTHING = 1e-12
"""Of the variance behind a block: a step that varies less is rounding."""


def block_pair(level: int) -> Pair:
    """The level before a block and the one behind it."""
    return Site(level), Site(level + 1)


def block_map(fit: Moments, level: int) -> Affine:
    """The regression with intercept over a block. Without the residual its error is the same: only W − I is sought."""
    pair = block_pair(level)
    return solve("affine", fit.source(pair[0]), [fit.target(*pair)])[0]


def block_scores(
    jump: Affine, fit: Moments, test: Moments, level: int, which: str = ""
) -> dict[str, float]:
    """The paper's two scores in sample and held out, the identity's, and the chance floor; `which` ends their names.

    Of a block that adds nothing but a constant, all is explained: it scores 1.
    """
    pair = block_pair(level)
    row: dict[str, float] = {}
    for name, sums in (("", fit), (" held out", test)):
        source, target = sums.source(pair[0]), sums.target(*pair)
        error = float(residual(jump, source, target).sum())
        step, whole = _step_variance(sums, pair), float(target.spread.sum())
        row[f"with residual{name}{which}"] = explained(error, whole)
        row[f"without residual{name}{which}"] = (
            explained(error, step) if step > NOTHING * whole else 1.0
        )
    target = fit.target(*pair)
    row[f"identity{which}"] = explained(_step_variance(fit, pair), float(target.spread.sum()))
    row[f"chance floor{which}"] = chance_floor(len(target.mean), fit.n)
    return row


def explained(error: float, variation: float) -> float:
    """1 − error / variation; 1 where nothing varies."""
    return 1 - error / variation if variation > 0 else 1.0


def _step_variance(sums: Moments, pair: Pair) -> float:
    """Σ ‖(y − x) − mean‖²: the centred variation of what the block adds."""
    source, target = sums.source(pair[0]), sums.target(*pair)
    spread = source.scatter.diagonal() - 2 * target.cross.diagonal() + target.spread
    return float(spread.sum())
