"""fit(): from text to scored jumps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from layerjump.data.corpus import Corpus
from layerjump.data.positions import Positions
from layerjump.errors import BadEstimator, BadMoments, argument
from layerjump.jumps.collect_moments import Progress, plan_run
from layerjump.jumps.estimators.registry import Estimator, Pooling, Settings, find_estimator
from layerjump.jumps.jumps import JumpInfo, Jumps, Provenance
from layerjump.jumps.maps import Affine, FeatureKind, SolvedMap
from layerjump.jumps.moments import MAX_LENGTH, SplitMoments, check_moments
from layerjump.jumps.scoring import r2, r2_identity
from layerjump.models.model import Model
from layerjump.models.structure import Pair, unembedding_metric


def fit(
    model: Model,
    text: Corpus | str | Path,
    *,
    estimator: str = "mat",
    pairs: str | None = None,
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
    progress: Progress | None = None,
) -> Jumps:
    """Fit jumps in one pass over a text, and score them on its test documents.

    Args:
        model: The model to run.
        text: A corpus, or anything that `load_text` reads: a file, a hub dataset, a list of strings, `pydoc`.
        estimator: identity, mean-shift, mat, affine, ridge, orthogonal, low-rank, n-njtc, ojfa or calibrated
            (`layerjump.jumps.estimators.registry` describes them).
        pairs: to-last, to-final, predictions, adjacent, all, submodules, or a list such as `0:6,3:6`. Default:
            to-last; for calibrated, predictions.
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
        progress: Called after each batch with the tokens done and the tokens to do.
    """
    settings = Settings(strength, rank, metric, ojfa_pooling, keep_both_targets)
    find_estimator(estimator, closed_form=True).check_settings(settings)
    plan = plan_run(
        model,
        text,
        estimator=estimator,
        strength=strength,
        pairs=pairs,
        positions=positions,
        tokens=tokens,
        split=split,
        seed=seed,
        use_validation=use_validation,
        max_length=max_length,
        features=features,
        float32_products=float32_products,
    )
    return solve_jumps(plan.run(progress=progress), estimator, settings, model=model)


def solve_jumps(
    moments: SplitMoments, estimator: str = "mat", settings: Settings | None = None, *, model: Model | None = None
) -> Jumps:
    """Solve all pairs of collected moments, and score them on the test split.

    Only `calibrated` and the `unembedding` metric need the model.
    """
    settings = settings or Settings()
    row = find_estimator(estimator, closed_form=True)
    row.check_settings(settings)
    row.check_targets(moments.fit.pairs, moments.info.n_blocks)
    if moments.fit.n == 0:
        raise BadMoments("these moments hold no positions of the fit split; collect some")
    if row.needs_validation(settings.strength) and moments.validation.n == 0:
        raise BadEstimator(
            f"{estimator} makes a choice on the validation split, and these moments have none; collect them with "
            f"{argument('use_validation', True)}"
        )
    if row.scope == "source":
        solutions = _solve_each_source(row, moments, settings, model)
    else:
        solutions = row.load()(moments, settings, model)
    maps: dict[Pair, Affine] = {}
    infos: dict[Pair, JumpInfo] = {}
    temperatures: dict[str, float] = {}
    for solution in solutions:
        pair, jump, features = solution.pair, solution.jump, solution.features
        score = baseline = None
        if moments.test.n:
            x, y = moments.test.pair_moments(pair, features)
            score = (*r2(jump, x, y),)
            # Of h / rms(h) the identity would not be a prediction.
            if features == "raw" and jump.shape[0] == jump.shape[1]:
                baseline = (*r2_identity(x, y),)
        rank = jump.factors[0].shape[1] if len(jump.factors) == 2 else None
        infos[pair] = JumpInfo(*pair, estimator, features, rank, jump.strength, score, baseline, moments.test.n)
        # As it is stored: all maps in float64 would take twice the memory.
        maps[pair] = jump.to(torch.float32)
        if solution.temperature is not None:
            temperatures[str(pair[0])] = solution.temperature
    recorded = settings.on_disk() | ({"temperature": temperatures} if temperatures else {})
    provenance = Provenance(
        **vars(moments.info),
        n_fit=moments.fit.n,
        n_select=moments.validation.n,
        n_test=moments.test.n,
        estimator=estimator,
        settings=recorded | {"max_length": moments.max_length},
    )
    return Jumps.from_maps(maps, infos, provenance)


def _solve_each_source(
    estimator: Estimator, moments: SplitMoments, settings: Settings, model: Model | None
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
        x, ys = fit.source(source), [fit.target(source, site) for site in sites]
        check_moments(x, ys)
        if estimator.needs_validation(settings.strength):
            held_ys = [validation.target(source, site) for site in sites]
            passed["validation"] = validation.source(source), held_ys
        if metric is None:
            jumps = solve(x, ys, **passed)
        else:
            assert model is not None
            metrics = [unembedding_metric(model, site) for site in sites]
            jumps = [solve(x, [y], metric=metric, **passed)[0] for y, metric in zip(ys, metrics, strict=True)]
        for site, jump in zip(sites, jumps, strict=True):
            yield SolvedMap((source, site), jump, fit.features)
