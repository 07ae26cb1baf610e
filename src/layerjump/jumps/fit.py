"""fit(): from text to scored jumps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from layerjump import __version__
from layerjump.data.corpus import Corpus
from layerjump.errors import BadEstimator, BadMoments, argument
from layerjump.jumps.collect import ABOUT, SplitMoments, plan_run
from layerjump.jumps.estimators.low_rank import njtc_rank, ojfa
from layerjump.jumps.estimators.post_norm import Judge, calibrated, sides
from layerjump.jumps.estimators.registry import ESTIMATORS, solve
from layerjump.jumps.jumps import JumpInfo, Jumps, Provenance
from layerjump.jumps.maps import Affine, FeatureKind
from layerjump.jumps.pairs import PREDICTIONS, Pair
from layerjump.jumps.scoring import r2, r2_identity
from layerjump.models.model import Model
from layerjump.models.structure import FINAL, Site
from layerjump.models.unembedding import unembedding_metric

TO_PREDICTIONS = "calibrated"
"""The estimator whose maps lead to what the head reads, and to no level."""
NAMES = (*ESTIMATORS, "ojfa", TO_PREDICTIONS)
TO_TUNE = "to-tune"
"""How `calibrated` leaves open where a map lands: a tuning keeps what ends lower, not what starts lower."""


def fit(
    model: Model,
    text: Corpus | str | Path,
    *,
    estimator: str = "mat",
    strength: float | None = None,
    rank: int | None = None,
    metric: str | None = None,
    how: str | None = None,
    **settings: Any,
) -> Jumps:
    """Fit jumps in one pass over a text; further settings (pairs, positions, tokens, reads …) are `plan`'s."""
    settings = plan_settings(estimator, strength) | settings
    chosen = plan_run(model, text, **settings)
    check_pairs(estimator, chosen.moments["fit"].pairs, model.n_blocks)
    collected = chosen.run()
    return solve_jumps(
        collected, estimator, strength=strength, rank=rank, metric=metric, how=how, model=model
    )


def plan_settings(estimator: str, strength: float | None = None) -> dict[str, Any]:
    """What an estimator wants of the pass over the text, unless told otherwise."""
    wanted: dict[str, Any] = {"select": selects(estimator, strength)}
    return (
        wanted | {"pairs": PREDICTIONS, "features": "both", "float32_products": True}
        if estimator == TO_PREDICTIONS
        else wanted
    )


def selects(estimator: str, strength: float | None = None) -> bool:
    """Whether an estimator chooses a setting on the select split."""
    if estimator not in NAMES:
        raise BadEstimator(
            f"there is no estimator {estimator!r} among those in closed form; known are {', '.join(NAMES)} (and, by "
            f"backward passes, lj.jacobian)"
        )
    return estimator in ("ojfa", TO_PREDICTIONS) or (
        ESTIMATORS[estimator].selects and strength is None
    )


def solve_jumps(
    collected: SplitMoments,
    estimator: str = "mat",
    *,
    strength: float | None = None,
    rank: int | None = None,
    metric: str | None = None,
    how: str | None = None,
    model: Model | None = None,
) -> Jumps:
    """Solve all pairs of collected sums; only `calibrated` and the `unembedding` metric need the model."""
    if selects(estimator, strength) and collected.select.n == 0:
        raise BadEstimator(
            f"{estimator} chooses a setting on the select split, but these sums have none; collect them with a "
            f"select split, or give the setting"
        )
    if collected.fit.n == 0:
        raise BadMoments("these sums are of no positions at all; collect them with a fit split")
    settings = {"strength": strength, "rank": rank, "metric": metric, "how": how}
    settings = {name: value for name, value in settings.items() if value is not None}
    check_pairs(estimator, collected.fit.pairs, collected.about["n_blocks"])
    maps: dict[Pair, Affine] = {}
    infos: dict[Pair, JumpInfo] = {}
    for pair, jump, kind in _solved(collected, estimator, settings, model):
        infos[pair] = _info(collected, pair, jump, estimator, kind)
        maps[pair] = jump.to(torch.float32)  # as it is kept: all of them in float64 would take room
    return Jumps.of(maps, infos, _provenance(collected, estimator, settings))


def _solved(
    collected: SplitMoments, estimator: str, settings: dict[str, Any], model: Model | None
) -> Iterator[tuple[Pair, Affine, FeatureKind]]:
    """Every pair's map, and what it reads."""
    if "how" in settings and estimator not in ("ojfa", TO_PREDICTIONS):
        raise BadEstimator(f"{estimator} has no setting 'how'; only ojfa and calibrated have")
    sums = collected.fit
    if estimator == TO_PREDICTIONS:
        yield from _calibrated(collected, settings, model)
    elif estimator == "ojfa":
        jump = _one_for_all(collected, settings.get("rank"), settings.get("how", "pooled"))
        yield from ((pair, jump, sums.features) for pair in sums.pairs)
    else:
        for source in sums.sources:
            solved = _from_source(collected, estimator, source, settings, model)
            yield from ((pair, jump, sums.features) for pair, jump in solved.items())


def _from_source(
    collected: SplitMoments,
    estimator: str,
    source: Site,
    settings: dict[str, Any],
    model: Model | None,
) -> dict[Pair, Affine]:
    """All jumps that leave a site come from one factorisation."""
    targets = [b for a, b in collected.fit.pairs if a == source]
    given = {name: value for name, value in settings.items() if name != "metric"}
    if selects(estimator, settings.get("strength")):
        given["select"] = (
            collected.select.source(source),
            [collected.select.target(source, target) for target in targets],
        )
    if "metric" not in settings:
        return _solve(collected, estimator, source, targets, given)
    maps: dict[Pair, Affine] = {}
    for target in targets:
        given["metric"] = _metric(settings["metric"], model, target)
        maps |= _solve(collected, estimator, source, [target], given)
    return maps


def _solve(
    collected: SplitMoments,
    estimator: str,
    source: Site,
    targets: list[Site],
    given: dict[str, Any],
) -> dict[Pair, Affine]:
    sums = collected.fit
    solved = solve(
        estimator, sums.source(source), [sums.target(source, target) for target in targets], **given
    )
    return {(source, target): jump for target, jump in zip(targets, solved, strict=True)}


def _metric(name: str, model: Model | None, target: Site) -> Tensor:
    if name != "unembedding" or model is None:
        raise BadEstimator(
            f"metric {name!r} was given; give unembedding, and the model whose unembedding is meant"
        )
    return unembedding_metric(model, target)


def _calibrated(
    collected: SplitMoments, settings: dict[str, Any], model: Model | None
) -> Iterator[tuple[Pair, Affine, FeatureKind]]:
    """Every level's map, made as sure as it should be, or onto level L; the factors are added to the settings."""
    _check_calibrated(collected, settings)
    if model is None:
        raise BadEstimator(
            "calibrated holds its predictions against the model's own, but no model was given; give the one that "
            "these sums are of"
        )
    judge = Judge(model, collected.select.reservoir.states)
    left_open = settings.get("how") == TO_TUNE
    factors = settings["temperature"] = {}
    last, pairs = Site(model.n_blocks), collected.fit.pairs
    for source in collected.fit.sources:
        jump, kind = calibrated(collected.fit, collected.select, (source, FINAL))
        factor = judge.factor(source, jump, kind)
        landings = [((source, FINAL), jump.times(factor), kind)]
        if (source, last) in pairs and judge.enough:
            landings += [
                ((source, last), *calibrated(collected.fit, collected.select, (source, last)))
            ]
        if len(landings) > 1 and not left_open:
            landings = [min(landings, key=lambda each: judge.loss(*each[0], *each[1:]))]
        if landings[0][0][1] == FINAL:
            factors[str(source)] = factor
        yield from landings


def _check_calibrated(collected: SplitMoments, settings: dict[str, Any]) -> None:
    if settings not in ({}, {"how": TO_TUNE}):
        given = ", ".join(f"{name} {value}" for name, value in settings.items())
        raise BadEstimator(
            f"calibrated was given {given}; the one setting it has is how {TO_TUNE}, for maps that are to be tuned"
        )


def check_pairs(estimator: str, pairs: Sequence[Pair], n_blocks: int) -> None:
    """Refuse pairs that an estimator cannot solve; before the pass over the text, where there is still time."""
    targets, last = {target for _, target in pairs}, Site(n_blocks)
    lacking = {source for source, _ in pairs} - {source for source, end in pairs if end == FINAL}
    if estimator == TO_PREDICTIONS and (lacking or targets - {FINAL, last}):
        raise BadEstimator(
            f"calibrated maps land after the final norm, but other pairs were given; give "
            f"{argument('pairs', PREDICTIONS)} or to-final, or an estimator such as affine, whose maps may land "
            f"anywhere"
        )
    if estimator == "ojfa" and len(targets) > 1:
        raise BadEstimator(
            f"ojfa is one jump from every level to one target; give {argument('pairs', 'to-last')}"
        )


def _one_for_all(collected: SplitMoments, rank: int | None, how: str) -> Affine:
    targets = {target for _, target in collected.fit.pairs}
    if how != "pooled" and how != "best-level":
        raise BadEstimator(f"ojfa has no way {how!r}; give pooled or best-level")
    (target,) = targets
    sources = collected.fit.sources

    def sides(split: Any) -> tuple[list[Any], list[Any]]:
        return [split.source(s) for s in sources], [split.target(s, target) for s in sources]

    jump, _ = ojfa(
        *sides(collected.fit),
        rank=njtc_rank(collected.about["width"]) if rank is None else rank,
        select=list(zip(*sides(collected.select), strict=True)),
        how=cast(Literal["pooled", "best-level"], how),
    )
    return jump


def _info(
    collected: SplitMoments, pair: Pair, jump: Affine, estimator: str, kind: FeatureKind
) -> JumpInfo:
    source, target = pair
    score = baseline = None
    if collected.test.n:
        x, y = sides(collected.test, pair, kind)
        score = (*r2(jump, x, y),)
        # What is read may be h / rms(h): taking that for the target is not the identity.
        if kind == "raw" and jump.shape[0] == jump.shape[1]:
            baseline = (*r2_identity(x, [y])[0],)
    rank = jump.factors[0].shape[1] if len(jump.factors) == 2 else None
    return JumpInfo(
        source=source,
        target=target,
        estimator=estimator,
        features=kind,
        rank=rank,
        strength=jump.strength,
        r2=score,
        r2_identity=baseline,
        n_test=collected.test.n,
    )


def _provenance(collected: SplitMoments, estimator: str, settings: dict[str, Any]) -> Provenance:
    about = {name: collected.about[name] for name in ABOUT}
    return Provenance(
        **about,
        n_fit=collected.fit.n,
        n_select=collected.select.n,
        n_test=collected.test.n,
        estimator=estimator,
        settings=settings | {"max_length": collected.about["max_length"]},
        layerjump=__version__,
    )
