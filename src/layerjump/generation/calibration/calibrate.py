"""calibrate(): the cheapest exit rule that keeps a target agreement.

Levels and the kind of rule are chosen on one set of documents. The threshold is then found on another, one position a
document (tokens of one document are not independent), by testing thresholds from strict to loose in a fixed order and
stopping at the first that fails (Learn then Test, arXiv 2110.01052, with an exact binomial bound). With the stated
confidence over the draw of documents, the agreement (same best token, given the same prefix) is at least the target.

The guarantee is for text like that given and the `exact` cache: for prefixes of real text, or, with
`self_generated_tokens`, for what the full model writes behind the first tokens of such text. What happens behind
tokens that left early, or with the `jump` and `copy` caches, is measured and not guaranteed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from layerjump.data.batches import Batch, make_batches
from layerjump.data.corpus import Corpus
from layerjump.data.positions import Positions
from layerjump.errors import BadExit, TextTooShort
from layerjump.generation.calibration.cost_model import Costs, measure_costs
from layerjump.generation.calibration.dataset import (
    CalibrationSet,
    build_calibration_set,
    build_shortlist,
    candidate_levels,
    generate_text,
    split_documents_by_role,
    unseen_documents,
)
from layerjump.generation.calibration.search import (
    THRESHOLDS,
    RuleCandidate,
    at_one_level,
    cheapest,
    cheapest_drafts,
    fit_probes,
)
from layerjump.generation.probes import calibration_curve
from layerjump.generation.rules import ExitConfig, Never, Shortlist
from layerjump.jumps.jumps import Jumps
from layerjump.lens.lens import Lens
from layerjump.metrics.bootstrap import mean_interval
from layerjump.models.fingerprint import fingerprint
from layerjump.models.model import Model, require_model

RULE_TYPES = ("gap", "gate", "two-stage")
SAMPLE = 32
"""Positions a document, where documents may give several."""


@dataclass(frozen=True)
class Calibration:
    """A rule, and all that is known about it."""

    exit: ExitConfig
    """Keeps the target agreement."""
    verified_exit: ExitConfig
    """Cheapest with `verify`; `Never` where verifying does not pay on this machine."""
    max_draft_tokens: int
    """How many tokens may wait for verification."""
    about: dict[str, Any] = field(repr=False)
    """Target, confidence, texts, costs, numbers of the test documents: plain records."""

    def __str__(self) -> str:
        test = self.about["test"]
        return (
            f"{self.about['kind']} at levels {list(self.exit.rule.levels or ())}: agreement {test['agreement']:.3f} "
            f"({test['low']:.3f} to {test['high']:.3f}), {test['blocks_saved']:.1%} of blocks saved, "
            f"{test['cost']:.2f} of the full model's cost; lossless: "
            f"{'off' if isinstance(self.verified_exit.rule, Never) else f'up to {self.max_draft_tokens} unverified'}"
        )


def calibrate(
    model: Model,
    jumps: Jumps | None,
    text: Corpus,
    *,
    target: float = 0.95,
    confidence: float = 0.95,
    rule_types: tuple[str, ...] = RULE_TYPES,
    costs: Costs | None = None,
    documents: int = 2_000,
    self_generated_tokens: int | None = None,
    seed: int = 0,
    log: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Find the cheapest rule for a model; `costs` are measured unless given.

    Documents that the jumps were fitted on are left out; of the others at most `documents` are used. With
    `self_generated_tokens`, the model goes on with each document's first tokens by so many, and the rule is found on
    what it says: that is what generation will meet, and costs the time of writing it.
    """
    require_model(model)
    _check(target, confidence, rule_types)
    free = unseen_documents(jumps, text)[:documents]
    dealt = split_documents_by_role(free, seed)
    need = math.ceil(math.log(1 - confidence) / math.log(target))
    if len(dealt["thresholds"]) < need:
        raise TextTooShort(
            f"a guarantee of {target:g} with confidence {confidence:g} needs {need} documents for its threshold, but "
            f"{len(dealt['thresholds'])} of {len(free)} are there for it; give more text, or ask for less"
        )
    levels = candidate_levels(Lens(model, jumps).levels[:-1])
    among = _looked_at(model, text, dealt)
    costs = costs or measure_costs(model, jumps, among)
    log(f"costs in milliseconds: {costs}")
    read = {}
    for name, chosen in dealt.items():
        log(f"reading {len(chosen)} documents ({name})")
        most = 1 if name == "thresholds" else SAMPLE
        found: Iterable[Batch]
        if self_generated_tokens is not None:
            found = generate_text(
                model, text, chosen, tokens=self_generated_tokens, picks=most, seed=seed
            )
        else:
            positions = Positions("one") if most == 1 else Positions("sample", most)
            found = make_batches(text, model.tokenization, positions, documents=chosen, seed=seed)
        read[name] = build_calibration_set(model, jumps, found, levels, among)
    made = _choose(model, text, read, costs, target, confidence, rule_types, seed)
    return replace(made, about=made.about | {"own": self_generated_tokens})


def _looked_at(model: Model, text: Corpus, dealt: Mapping[str, Sequence[int]]) -> Shortlist | None:
    """The shortlist for early looks. Documents that show or guarantee something are not counted."""
    apart = {*dealt["thresholds"], *dealt["test"]}
    others = [document for document in range(len(text.documents)) if document not in apart]
    return build_shortlist(model, text, others)


def _choose(
    model: Model,
    text: Corpus,
    read: dict[str, CalibrationSet],
    costs: Costs,
    target: float,
    confidence: float,
    rule_types: tuple[str, ...],
    seed: int,
) -> Calibration:
    n_blocks = model.n_blocks
    probes = fit_probes(read["gates"], read["select"])
    found = {
        kind: cheapest(kind, probes, read["select"], costs, n_blocks, target) for kind in rule_types
    }
    kind = min(found, key=lambda name: found[name][1])
    contender = found[kind][0]
    threshold = loosest_threshold(contender, read["thresholds"], n_blocks, target, confidence)
    bold = [each for each, _ in found.values()] + at_one_level(
        rule_types, probes, read["select"].levels
    )
    drafts = cheapest_drafts(bold, read["select"], costs, n_blocks)
    about = {
        "target": target,
        "confidence": confidence,
        "model": model.name,
        "fingerprint": fingerprint(model.hf),
        "kind": kind if threshold is not None else "never",
        "rule": contender.record(threshold),
        "lossless": drafts.record(),
        "unverified": drafts.unverified,
        "text": text.name,
        "text_sha256": text.sha256,
        "shortlist": None if probes.tokens is None else len(probes.tokens),
        "positions": {name: len(each) for name, each in read.items()},
        "seed": seed,
        "costs": costs.record(),
        "select_cost": {name: cost / costs.full(n_blocks) for name, (_, cost) in found.items()},
        "lossless_cost": drafts.cost / costs.full(n_blocks),
        "test": _shown(contender, threshold, read["test"], costs, n_blocks, seed),
        "gate_curves": _curves(contender, read["test"]),
    }
    return Calibration(contender.exit_config(threshold), drafts.exit, drafts.unverified, about)


def loosest_threshold(
    contender: RuleCandidate,
    evidence: CalibrationSet,
    n_blocks: int,
    target: float,
    confidence: float,
) -> float | None:
    """The loosest threshold that passes, before the first that fails; None if not even the strictest does."""
    replay, passed = contender.replay(evidence, n_blocks), None
    if not contender.levels:
        return None
    for threshold in THRESHOLDS:
        hits = int(replay(threshold).right.sum())
        if binomial_tail(hits, len(evidence), target) > 1 - confidence:
            break
        passed = threshold
    return passed


def binomial_tail(hits: int, n: int, share: float) -> float:
    """The chance of at least so many hits in n tries of this chance each: how surprising they are at the target."""
    k = torch.arange(hits, n + 1, dtype=torch.float64)
    ways = math.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    hit, miss = torch.tensor([share, 1 - share], dtype=torch.float64)
    terms = ways + torch.xlogy(k, hit) + torch.xlogy(n - k, miss)
    return float(terms.logsumexp(0).exp())


def _shown(
    contender: RuleCandidate,
    threshold: float | None,
    evidence: CalibrationSet,
    costs: Costs,
    n_blocks: int,
    seed: int,
) -> dict[str, float]:
    """Numbers of documents that nothing was chosen on."""
    if threshold is None:
        contender, threshold = RuleCandidate(contender.kind, (), contender.probes), 0.5
    made = contender.replay(evidence, n_blocks)(threshold)
    mean, low, high = mean_interval(
        made.right.double().numpy(), evidence.document.numpy(), seed=seed
    )
    return {
        "agreement": float(mean),
        "low": float(low),
        "high": float(high),
        "blocks_saved": 1 - float(made.left.double().mean()) / n_blocks,
        "cost": made.cost(costs, n_blocks) / costs.full(n_blocks),
        "heads": float(made.heads.double().mean()),
        "gates": float(made.gates.double().mean()),
    }


def _curves(contender: RuleCandidate, evidence: CalibrationSet) -> dict[str, Any]:
    """How well each gate's probabilities hold on test text."""
    if contender.kind == "gap":
        return {}
    return {
        str(level): calibration_curve(
            torch.sigmoid(
                evidence.features[evidence.levels.index(level)].double()
                @ contender.probes.gate[level]
            ),
            evidence.right[evidence.levels.index(level)],
        )
        for level in contender.levels
    }


def _check(target: float, confidence: float, rule_types: tuple[str, ...]) -> None:
    for name, value in (("target", target), ("confidence", confidence)):
        if not 0 < value < 1:
            raise BadExit(f"the {name} given is {value}; give a share between 0 and 1")
    unknown = [kind for kind in rule_types if kind not in RULE_TYPES]
    if unknown or not rule_types:
        raise BadExit(
            f"the kinds of rules given are {rule_types}; give some of {', '.join(RULE_TYPES)}"
        )
