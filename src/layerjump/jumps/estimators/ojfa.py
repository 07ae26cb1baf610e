"""OJFA: one low-rank map that serves all levels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from layerjump.errors import BadEstimator, argument
from layerjump.jumps.estimators.low_rank import low_rank
from layerjump.jumps.estimators.n_njtc import njtc_rank
from layerjump.jumps.estimators.registry import EstimatorSettings, Pooling
from layerjump.jumps.maps import Affine, SolvedMap
from layerjump.jumps.moments import Source, Target, check_moments, pool
from layerjump.jumps.score_from_moments import r2
from layerjump.models.model import Model

if TYPE_CHECKING:
    from layerjump.jumps.moments_of_splits import SplitMoments

DEFAULT_POOLING: Pooling = "pooled"


def solve_ojfa(moments: SplitMoments, settings: EstimatorSettings, model: Model | None = None) -> Iterator[SolvedMap]:
    """Yield one low-rank map, shared by all pairs of a run, for each of its pairs."""
    (target,) = {target for _, target in moments.fit.pairs}
    fit, validation = (
        [(split.source(site), split.target(site, target)) for site in moments.fit.sources]
        for split in (moments.fit, moments.validation)
    )
    jump, _ = ojfa(
        [source for source, _ in fit],
        [target for _, target in fit],
        rank=njtc_rank(moments.info.width) if settings.rank is None else settings.rank,
        validation=validation,
        pooling=settings.ojfa_pooling or DEFAULT_POOLING,
    )
    for pair in moments.fit.pairs:
        yield SolvedMap(pair, jump, moments.fit.features)


def ojfa(
    sources: Sequence[Source],
    targets: Sequence[Target],
    *,
    rank: int,
    validation: Sequence[tuple[Source, Target]] | None = None,
    pooling: Pooling = DEFAULT_POOLING,
) -> tuple[Affine, int | None]:
    """Return one low-rank map for all levels, as in "OJFA" (arXiv 2504.13984), and the level it was fitted at.

    Level k's rows are in `sources[k]`, paired with the common target in `targets[k]`. The paper
    keeps the map of one level, picked by a criterion whose formula is not public, so both ways
    here are ours: "best-level" keeps the level's map with the best mean R² (uniform) over all
    levels of the validation split; "pooled" fits one map to the rows of all levels together (its
    level is None). Either way the intercept is shared.
    """
    if not sources or len(sources) != len(targets):
        raise BadEstimator(
            f"expected one source and one target for every level, got {len(sources)} sources and {len(targets)} targets"
        )
    if pooling == "pooled":
        source, target = pool(list(zip(sources, targets, strict=True)))
        return next(low_rank(source, [target], rank=rank)), None
    if pooling != "best-level":
        raise BadEstimator(f"expected {argument('ojfa_pooling')} 'best-level' or 'pooled', got {pooling!r}")
    if not validation:
        raise BadEstimator("best-level needs the moments of a validation split to choose the level")
    jumps: list[Affine] = []
    for source, target in zip(sources, targets, strict=True):
        check_moments(source, [target])
        jumps += low_rank(source, [target], rank=rank)
    scores = [sum(r2(jump, *pair).uniform for pair in validation) / len(validation) for jump in jumps]
    best = max(range(len(jumps)), key=scores.__getitem__)
    return jumps[best], best
