"""calibrate(): the cheapest exit rule that keeps a target agreement with the full model.

The rule type and its levels are selected on one set of documents. The threshold is found on another, at one position
per document because tokens of one document are not independent: thresholds are tested from strict to loose in a fixed
order, until the first fails an exact binomial test (Learn then Test, arXiv 2110.01052). With the stated confidence
over the draw of documents, the agreement (same top token, given the same prefix) is then at least the target.

The guarantee covers text like the calibration text and the `exact` cache: prefixes of real text, or, with
`self_generated_tokens`, what the full model writes after the openings of such text. Accuracy after an early-exited
token, or with the `jump` and `copy` caches, is not covered; benchmarks report it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import get_args

import torch
from torch import Tensor

from layerjump.data.batches import Batch, make_batches
from layerjump.data.corpus import Corpus
from layerjump.data.positions import Positions
from layerjump.errors import BadExit, TextTooShort, argument
from layerjump.generation.calibration import dataset, exit_draft_search, rule_search
from layerjump.generation.calibration.calibrate_drafts import calibrate_drafts, can_calibrate_drafts
from layerjump.generation.calibration.dataset import ByRole, CalibrationSet
from layerjump.generation.calibration.measure_costs import measure_costs
from layerjump.generation.calibration.result import (
    Calibration,
    CalibrationReport,
    Costs,
    CurvePoint,
    DraftRuleRecord,
    HeldOutResult,
    PositionCounts,
    RuleRecord,
    RuleType,
)
from layerjump.generation.calibration.rule_search import THRESHOLDS, RuleCandidate
from layerjump.generation.exit_rules import ExitConfig, Never
from layerjump.generation.exit_self_check import require_exits
from layerjump.jumps.cost_estimate import format_size, require_memory
from layerjump.jumps.jumps import Jumps
from layerjump.lens.lens import Lens
from layerjump.metrics.bootstrap import mean_interval
from layerjump.models.fingerprint import fingerprint
from layerjump.models.model import Model, require_model

RULE_TYPES: tuple[RuleType, ...] = get_args(RuleType)
_PICKS = 32  # positions per document, where a document may give several


def calibrate(
    model: Model,
    jumps: Jumps | None,
    text: Corpus,
    *,
    target: float = 0.95,
    confidence: float = 0.95,
    rule_types: Sequence[RuleType] = RULE_TYPES,
    costs: Costs | None = None,
    documents: int = 2_000,
    self_generated_tokens: int | None = None,
    draft_documents: int = 400,
    seed: int = 0,
    log: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Find the cheapest exit rule of these types that keeps a target agreement with the full model.

    At most `documents` documents are used, none of which the jumps were fitted on. `costs` are measured on this
    machine if they are None. With `self_generated_tokens` the model first continues each document's opening by that
    many tokens, and the rule is calibrated on these: closer to what generation meets, and slower.

    Drafters for verified generation are fitted and chosen on what the model writes after `draft_documents` of the
    documents, 64 tokens each; 0 leaves them out. `log` receives progress messages.
    """
    require_model(model)
    for name, value in (("target", target), ("confidence", confidence)):
        if not 0 < value < 1:
            raise BadExit(f"{argument(name)} must be between 0 and 1, got {value}")
    if not rule_types or not set(rule_types) <= set(RULE_TYPES):
        raise BadExit(
            f"{argument('rule_types')} must be one or more of {', '.join(RULE_TYPES)}, got "
            f"{', '.join(rule_types) or 'none'}"
        )
    require_exits(model)
    unseen = dataset.unseen_documents(jumps, text)[:documents]
    roles = dataset.split_documents_by_role(unseen, seed)
    needed = math.ceil(math.log(1 - confidence) / math.log(target))
    if len(roles.thresholds) < needed:
        raise TextTooShort(
            f"a target of {target:g} with confidence {confidence:g} needs {needed} documents for its threshold, but "
            f"{len(roles.thresholds)} of {len(unseen)} are available for it; give more text, or lower the target or "
            f"the confidence"
        )
    levels = dataset.candidate_levels(Lens(model, jumps).levels[:-1])
    needed = dataset.estimate_memory(model, roles, len(levels), _PICKS)
    log(f"memory at most {format_size(needed)} beyond the model, for the states at {len(levels)} levels")
    require_memory(needed, "states and probes", advice=f"pass fewer {argument('documents')}")
    held_out = {*roles.thresholds, *roles.test}
    counted = [index for index in range(len(text.documents)) if index not in held_out]
    shortlist = dataset.build_shortlist(model, text, counted)
    costs = costs or measure_costs(model, jumps, shortlist)
    log(f"costs in milliseconds: {costs}")

    def read(role: str, indices: Sequence[int], picks: int) -> CalibrationSet:
        log(f"reading {len(indices)} documents ({role})")
        batches: Iterable[Batch]
        if self_generated_tokens is not None:
            batches = dataset.generate_text(model, text, indices, tokens=self_generated_tokens, picks=picks, seed=seed)
        else:
            positions = Positions("one") if picks == 1 else Positions("sample", picks)
            batches = make_batches(text, model.tokenization, positions, documents=indices, seed=seed)
        return dataset.build_calibration_set(model, jumps, batches, levels, shortlist)

    picks = {"thresholds": 1}  # tokens of one document are not independent
    sets = ByRole(**{role: read(role, part, picks.get(role, _PICKS)) for role, part in vars(roles).items()})
    n_blocks = model.n_blocks
    probes = rule_search.fit_probes(sets.probes, sets.selection)
    searched = {
        rule_type: rule_search.search_rule(rule_type, probes, sets.selection, costs, n_blocks, target)
        for rule_type in rule_types
    }
    rule_type = min(searched, key=lambda name: searched[name][1])
    candidate = searched[rule_type][0]
    threshold = loosest_threshold(candidate, sets.thresholds, n_blocks, target, confidence)
    single_levels = rule_search.single_level_candidates(rule_types, probes, sets.selection.levels)
    draft_candidates = [rule for rule, _ in searched.values()] + single_levels
    drafts = exit_draft_search.search_drafts(draft_candidates, sets.selection, costs, n_blocks)
    full_cost = costs.full_model(n_blocks)
    verified_exit = drafts.candidate.exit_config(drafts.threshold, drafts.min_acceptance)
    verified_cost = drafts.cost / full_cost
    calibrated_drafts = None
    if draft_documents and can_calibrate_drafts(model):
        fit_on = [*roles.probes, *roles.thresholds][:draft_documents]
        calibrated_drafts = calibrate_drafts(model, text, fit_on, roles.selection, seed=seed, log=log)
        if calibrated_drafts.record.speedup > max(1.0, 1 / verified_cost):
            verified_exit = ExitConfig(Never(), drafts=calibrated_drafts.config)
            verified_cost = 1 / calibrated_drafts.record.speedup
        else:
            calibrated_drafts = None
    probe_curves = {
        level: calibration_curve(
            torch.sigmoid(candidate.probe_odds(sets.test, level)), sets.test.correct[levels.index(level)]
        )
        for level in candidate.levels
        if candidate.rule_type != "gap"
    }
    report = CalibrationReport(
        target=target,
        confidence=confidence,
        model=model.name,
        fingerprint=fingerprint(model.hf),
        rule_type="never" if threshold is None else rule_type,
        rule=RuleRecord(
            rule_type=rule_type, levels=candidate.levels, threshold=threshold, unembed_above=candidate.unembed_above
        ),
        verified_rule=DraftRuleRecord(
            rule_type=drafts.candidate.rule_type,
            levels=drafts.candidate.levels,
            threshold=drafts.threshold,
            unembed_above=drafts.candidate.unembed_above,
            min_acceptance=drafts.min_acceptance,
        ),
        max_draft_tokens=drafts.max_draft_tokens,
        text=text.name,
        text_sha256=text.sha256,
        shortlist_tokens=None if shortlist is None else len(shortlist.tokens),
        positions=PositionCounts(**{role: len(part) for role, part in vars(sets).items()}),
        seed=seed,
        self_generated_tokens=self_generated_tokens,
        costs=costs,
        selection_cost={name: cost / full_cost for name, (_, cost) in searched.items()},
        verified_cost=verified_cost,
        drafts=None if calibrated_drafts is None else calibrated_drafts.record,
        test=held_out_result(candidate, threshold, sets.test, costs, n_blocks, seed),
        probe_curves=probe_curves,
    )
    return Calibration(candidate.exit_config(threshold), verified_exit, report)


def loosest_threshold(
    candidate: RuleCandidate, calibration_set: CalibrationSet, n_blocks: int, target: float, confidence: float
) -> float | None:
    """The last threshold before the first that fails the binomial test; None if the strictest fails."""
    replay, passed = candidate.replay(calibration_set, n_blocks), None
    if not candidate.levels:
        return None
    for threshold in THRESHOLDS:
        hits = int(replay(threshold).correct.sum())
        if binomial_tail(hits, len(calibration_set), target) > 1 - confidence:
            break
        passed = threshold
    return passed


def binomial_tail(hits: int, n: int, probability: float) -> float:
    """The probability of at least `hits` successes in n independent trials."""
    k = torch.arange(hits, n + 1, dtype=torch.float64)
    log_ways = math.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    success, failure = torch.tensor([probability, 1 - probability], dtype=torch.float64)
    log_terms = log_ways + torch.xlogy(k, success) + torch.xlogy(n - k, failure)
    return float(log_terms.logsumexp(0).exp())


def calibration_curve(probability: Tensor, correct: Tensor, bins: int = 10) -> list[CurvePoint]:
    """Predicted and observed probability in bins of equally many examples, in order of the prediction."""
    order = probability.argsort()
    return [
        CurvePoint(
            predicted=float(probability[rows].double().mean()),
            observed=float(correct[rows].double().mean()),
            n=len(rows),
        )
        for rows in order.chunk(min(bins, max(1, len(order))))
    ]


def held_out_result(
    candidate: RuleCandidate, threshold: float | None, test: CalibrationSet, costs: Costs, n_blocks: int, seed: int
) -> HeldOutResult:
    """What a rule does on documents that nothing was chosen on; without a threshold, nothing exits."""
    if threshold is None:
        candidate, threshold = RuleCandidate(candidate.rule_type, (), candidate.probes), 0.5
    replay = candidate.replay(test, n_blocks)(threshold)
    mean, low, high = mean_interval(replay.correct.double().numpy(), test.documents.numpy(), seed=seed)
    return HeldOutResult(
        agreement=float(mean),
        low=float(low),
        high=float(high),
        blocks_saved=1 - float(replay.exit_levels.double().mean()) / n_blocks,
        cost=replay.cost(costs, n_blocks) / costs.full_model(n_blocks),
        unembeddings=float(replay.unembeddings.double().mean()),
        probe_evaluations=float(replay.probe_evaluations.double().mean()),
    )
