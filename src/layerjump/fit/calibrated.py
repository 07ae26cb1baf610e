"""The map that lands after the final norm: a lens that is calibrated, in closed form.

Least squares answers an uncertain state with something close to the mean: it shrinks. A map onto level L is followed by
the final norm, which blows that short answer up to full length, and the lens is over-confident. A map onto the state
after the norm keeps the shrinkage, and the head alone decodes it.
"""

from __future__ import annotations

from layerjump.fit.affine import Affine
from layerjump.fit.modules import FEATURES, FeatureKind
from layerjump.fit.moments import Moments
from layerjump.fit.pairs import Pair
from layerjump.fit.ridge import ridge
from layerjump.fit.score import residual
from layerjump.fit.sums import Source, Target


def calibrated(fit: Moments, select: Moments, pair: Pair) -> tuple[Affine, FeatureKind]:
    """The pair's ridge map, and what it reads: the kind of features that errs least on the select split."""
    found = []
    for kind in kinds_in(fit):
        source, target = sides(fit, pair, kind)
        held = sides(select, pair, kind)
        (made,) = ridge(source, [target], select=(held[0], [held[1]]))
        found.append((float(residual(made, *held).sum()), kind, made))
    _, kind, made = min(found, key=lambda row: row[0])
    return made, kind


def kinds_in(sums: Moments) -> tuple[FeatureKind, ...]:
    """The kinds of features that sums hold: those of both hold each alone as well."""
    return FEATURES if sums.reads == "both" else (sums.reads,)


def sides(sums: Moments, pair: Pair, kind: FeatureKind) -> tuple[Source, Target]:
    """A pair's sums, of one kind of features."""
    source, target = sums.source(pair[0]), sums.target(*pair)
    if kind == sums.reads:
        return source, target
    width = len(source.mean) // 2
    part = slice(0, width) if kind == "raw" else slice(width, None)
    return (
        Source(source.n, source.mean[part], source.scatter[part, part]),
        Target(target.mean, target.cross[part], target.spread, target.scatter),
    )
