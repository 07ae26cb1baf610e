"""How linear a block is, from the sums of its two levels: the scores of "Your Transformer is Secretly Linear"."""

from __future__ import annotations

from layerjump.fit.affine import Affine
from layerjump.fit.moments import Moments
from layerjump.fit.pairs import Pair
from layerjump.fit.score import residual
from layerjump.fit.solve import solve
from layerjump.inputs.sites import Site
from layerjump.measure.linearity import chance_floor


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
    """The paper's two scores in sample and held out, the identity's, and the chance floor; `which` ends their names."""
    pair = block_pair(level)
    row: dict[str, float] = {}
    for name, sums in (("", fit), (" held out", test)):
        source, target = sums.source(pair[0]), sums.target(*pair)
        error = float(residual(jump, source, target).sum())
        row[f"with residual{name}{which}"] = 1 - error / float(target.spread.sum())
        row[f"without residual{name}{which}"] = 1 - error / _step_variance(sums, pair)
    target = fit.target(*pair)
    row[f"identity{which}"] = 1 - _step_variance(fit, pair) / float(target.spread.sum())
    row[f"chance floor{which}"] = chance_floor(len(target.mean), fit.n)
    return row


def _step_variance(sums: Moments, pair: Pair) -> float:
    """Σ ‖(y − x) − mean‖²: the centred variation of what the block adds."""
    source, target = sums.source(pair[0]), sums.target(*pair)
    spread = source.scatter.diagonal() - 2 * target.cross.diagonal() + target.spread
    return float(spread.sum())
