"""fit(): from text to scored jumps."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from layerjump.data.corpus import Corpus
from layerjump.data.positions import Positions
from layerjump.errors import BadEstimator, BadMoments, argument
from layerjump.jumps.collect_moments import Progress, RunPlan, plan_run
from layerjump.jumps.cost_estimate import MemoryPlan, parse_memory, plan_memory
from layerjump.jumps.estimators.registry import Estimator, EstimatorSettings, Pooling, find_estimator
from layerjump.jumps.jumps import JumpInfo, Jumps, Provenance
from layerjump.jumps.maps import Affine, FeatureKind, SolvedMap
from layerjump.jumps.moments import Source, check_moments
from layerjump.jumps.moments_of_splits import MAX_LENGTH, SplitMoments
from layerjump.jumps.score_from_moments import r2, r2_identity
from layerjump.jumps.spill_states import StagedMoments, returned_memory
from layerjump.models.model import Model
from layerjump.models.sites import Pair, Site, SourceName, join_pairs
from layerjump.models.structure import unembedding_metric

log = logging.getLogger("layerjump")


def fit(
    model: Model,
    text: Corpus | str | Path,
    *,
    estimator: str = "mat",
    pairs: str | None = None,
    sources: SourceName | None = None,
    target: str | int | Site | None = None,
    positions: Positions | str | None = None,
    tokens: int | None = None,
    split: str = "80/10/10",
    seed: int = 0,
    strength: float | None = None,
    rank: int | None = None,
    metric: str | None = None,
    ojfa_pooling: Pooling | None = None,
    keep_both_targets: bool = False,
    features: FeatureKind | None = None,
    use_validation: bool | None = None,
    max_length: int = MAX_LENGTH,
    float32_products: bool | None = None,
    memory: str | int | None = None,
    spill: str | Path | None = None,
    progress: Progress | None = None,
) -> Jumps:
    """Fit jumps in one pass over a text, and score them on its test documents.

    Args:
        model: The model to run.
        text: A corpus, or anything that `load_text` reads: a file, a hub dataset, a list of strings, `pydoc`.
        estimator: identity, mean-shift, mat, affine, ridge, orthogonal, low-rank, n-njtc, ojfa or calibrated
            (`layerjump.jumps.estimators.registry` describes them).
        pairs: to-last, to-final, predictions, adjacent, all, submodules, or a list such as `0:6,3:6`. Default:
            to-last; for calibrated, predictions. Sources may be joint: `final@-1+10:final`, or `to-final+final@-1` for
            every level with the previous position's final state.
        sources: One jump instead of pairs: the sites that it reads, side by side. `"final@-1+10"`, or
            `["final@-1", 10]`, is `final` one position earlier and level 10; `embedding` is the token's embedding.
            Positions without the earlier states, which are of the same sequence, are left out.
        target: The site that this jump leads to.
        positions: one, all, `sample=8` or `15%`. Default: all; for all pairs a sample (15 %, never fewer than 44 d).
            Jumps between levels skip position 0; maps meant for every position (sub-modules) include it.
        tokens: Number of tokens to run, over all splits. Default: the whole text.
        split: Shares or numbers of documents in the fit, validation and test splits.
        seed: Seed of the split and of the positions.
        strength: ridge: regularisation strength. Default: chosen on the validation split.
        rank: low-rank, ojfa: the rank of the maps.
        metric: low-rank: `unembedding` weighs errors by their effect on the logits.
        ojfa_pooling: Fit one map to all levels' rows (`pooled`, the default), or use one level's map (`best-level`).
        keep_both_targets: calibrated: keep the maps to level L and to `final`, so that `refine` can choose by final KL.
        features: What maps to `final` read of a state h: raw (h), rms (h / rms(h)) or both. Default: raw; for
            calibrated, the best of them.
        use_validation: Whether to run the validation split. Default: whether the estimator needs it.
        max_length: Longest sequence; longer documents are cut.
        float32_products: Whether the products of both features are formed in float32. Default: for calibrated.
        memory: Memory that the fit may take beyond the model, such as `48GB`. Default: what is free. If the sums need
            more, states of the validation and test splits are held instead of their sums, or the text is run in
            several passes.
        spill: A folder for hidden states, which are then written to disk, and sums formed for one source at a time:
            the same jumps in much less memory. The folder is emptied at the end.
        progress: Called after each batch with the tokens done and the tokens to do.
    """
    settings = EstimatorSettings(
        strength=strength, rank=rank, metric=metric, ojfa_pooling=ojfa_pooling, keep_both_targets=keep_both_targets
    )
    find_estimator(estimator, closed_form=True).check_settings(settings)
    plan = plan_run(
        model,
        text,
        estimator=estimator,
        strength=strength,
        pairs=join_pairs(pairs, sources, target),
        positions=positions,
        tokens=tokens,
        split=split,
        seed=seed,
        use_validation=use_validation,
        max_length=max_length,
        features=features,
        float32_products=float32_products,
    )
    memory_plan = plan_memory(
        model,
        plan.moments["fit"],
        plan.batches,
        estimator,
        memory=parse_memory(memory),
        spill=None if spill is None else Path(spill),
    )
    if memory_plan.storage != "sums" or len(memory_plan.passes) > 1:
        log.info("%s", memory_plan)
    return fit_planned(plan, memory_plan, estimator, settings, progress=progress)


def fit_planned(
    plan: RunPlan,
    memory_plan: MemoryPlan,
    estimator: str,
    settings: EstimatorSettings | None = None,
    *,
    progress: Progress | None = None,
) -> Jumps:
    """Fit jumps in one process, with the memory that a plan takes."""
    if memory_plan.storage != "sums":
        with plan.staged(memory_plan, progress=progress) as staged, returned_memory():
            return solve_jumps(staged, estimator, settings, model=plan.model)
    parts = [plan] if len(memory_plan.passes) == 1 else [plan.restrict(pairs) for pairs in memory_plan.passes]
    return Jumps.join(
        [solve_jumps(part.run(progress=progress), estimator, settings, model=plan.model) for part in parts]
    )


def solve_jumps(
    moments: SplitMoments | StagedMoments,
    estimator: str = "mat",
    settings: EstimatorSettings | None = None,
    *,
    model: Model | None = None,
) -> Jumps:
    """Solve all pairs of collected moments, and score them on the test split.

    Only `calibrated` and the `unembedding` metric need the model.
    """
    settings = settings or EstimatorSettings()
    row = find_estimator(estimator, closed_form=True)
    row.check_settings(settings)
    splits = moments.splits
    pairs = moments.pairs if isinstance(moments, StagedMoments) else moments.fit.pairs
    row.check_targets(pairs, moments.info.n_blocks)
    if splits["fit"].n == 0:
        raise BadMoments("these moments hold no positions of the fit split; collect some")
    if row.needs_validation(settings.strength) and splits["validation"].n == 0:
        raise BadEstimator(
            f"{estimator} makes a choice on the validation split, and these moments have none; collect them with "
            f"{argument('use_validation', True)}"
        )
    parts: Iterable[SplitMoments] = [moments] if isinstance(moments, SplitMoments) else ()
    if isinstance(moments, StagedMoments):
        parts = moments.parts(whole=row.targets == "one", sample=row.needs_model)
    maps: dict[Pair, Affine] = {}
    infos: dict[Pair, JumpInfo] = {}
    temperatures: dict[str, float] = {}
    for part in parts:
        for solution, score in _solve_and_score(row, part, settings, model):
            pair, jump = solution.pair, solution.jump
            rank = jump.factors[0].shape[1] if len(jump.factors) == 2 else None
            infos[pair] = JumpInfo(*pair, estimator, solution.features, rank, jump.strength, *score, splits["test"].n)
            # As it is stored: all maps in float64 would take twice the memory.
            jump = jump.to(torch.float32)
            maps[pair] = moments.store_map(jump) if isinstance(moments, StagedMoments) else jump
            if solution.temperature is not None:
                temperatures[str(pair[0])] = solution.temperature
        del part  # before the sums of the next source are formed
    recorded = settings.on_disk() | ({"temperature": temperatures} if temperatures else {})
    provenance = Provenance(
        **vars(moments.info),
        n_fit=splits["fit"].n,
        n_select=splits["validation"].n,
        n_test=splits["test"].n,
        estimator=estimator,
        settings=recorded | {"max_length": moments.max_length},
    )
    return Jumps.from_maps(maps, infos, provenance)


Scores = tuple[tuple[float, float] | None, tuple[float, float] | None]
"""R² of a map and of the identity on the test split, where they can be computed."""


def _solve_and_score(
    estimator: Estimator, moments: SplitMoments, settings: EstimatorSettings, model: Model | None
) -> Iterator[tuple[SolvedMap, Scores]]:
    if estimator.scope == "source":
        solutions = _solve_each_source(estimator, moments, settings, model)
    else:
        solutions = estimator.load()(moments, settings, model)
    test = moments.test
    scored: tuple[Site, Source] | None = None  # the last source: jumps from one site follow each other
    for solution in solutions:
        pair, jump, features = solution.pair, solution.jump, solution.features
        if not test.n:
            yield solution, (None, None)
            continue
        if scored is None or scored[0] != pair[0]:
            scored = None  # released before the next is formed
            scored = pair[0], test.source(pair[0])
        x, y = test.select_features(scored[1], test.target(*pair), features)
        score = (*r2(jump, x, y),)
        # Of h / rms(h) the identity would not be a prediction.
        is_square = features == "raw" and jump.shape[0] == jump.shape[1]
        yield solution, (score, (*r2_identity(x, y),) if is_square else None)


def _solve_each_source(
    estimator: Estimator, moments: SplitMoments, settings: EstimatorSettings, model: Model | None
) -> Iterator[SolvedMap]:
    """All jumps from one site share one factorisation."""
    solve = estimator.load()
    passed: dict[str, Any] = settings.non_defaults()
    metric = passed.pop("metric", None)
    if metric is not None and (metric != "unembedding" or model is None):
        raise BadEstimator(
            f"expected {argument('metric', 'unembedding')} and a model to take it from, got metric {metric!r} and "
            f"{model or 'no model'}"
        )
    fit, validation = moments.fit, moments.validation
    for source in fit.sources:
        sites = [target for site, target in fit.pairs if site == source]
        x, ys = fit.source(source), fit.targets(source, sites)
        check_moments(x, ys)
        if estimator.needs_validation(settings.strength):
            passed["validation"] = validation.source(source), validation.targets(source, sites)
        if metric is None:
            jumps = solve(x, ys, **passed)
        else:
            assert model is not None
            metrics = (unembedding_metric(model, site) for site in sites)
            jumps = (next(solve(x, [y], metric=metric, **passed)) for y, metric in zip(ys, metrics, strict=True))
        for site, jump in zip(sites, jumps, strict=True):
            yield SolvedMap((source, site), jump, fit.features)
        passed.pop("validation", None)
