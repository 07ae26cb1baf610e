"""Search over draft settings for verified generation, by replay on the calibration set.

A rejected draft costs time and nothing else, so drafts may be bolder than tokens that nobody verifies: they have
levels and a threshold of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from layerjump.generation.calibration.dataset import CalibrationSet
from layerjump.generation.calibration.result import Costs
from layerjump.generation.calibration.rule_search import THRESHOLDS, FittedProbes, Replay, RuleCandidate

_DRAFT_TOKENS = (1, 2, 4, 8)  # numbers of drafts that may wait for verification
_REPLAYED_POSITIONS = 2_000  # positions on which draft settings are replayed, one after another


@dataclass(frozen=True)
class DraftSettings:
    """How to draft for verification."""

    candidate: RuleCandidate
    threshold: float | None
    """None: no drafts, since they do not pay."""
    max_draft_tokens: int
    cost: float
    """Milliseconds per verified token on the calibration set."""
    min_acceptance: float = 0.0
    """The share of drafts that must be accepted to pay for them all."""


def search_drafts(
    candidates: Iterable[RuleCandidate], selection: CalibrationSet, costs: Costs, n_blocks: int
) -> DraftSettings:
    """The candidate, threshold and number of waiting drafts that cost least; no drafts if none pay."""
    order = torch.randperm(len(selection), generator=torch.Generator().manual_seed(0))
    order = order[:_REPLAYED_POSITIONS]
    none = RuleCandidate("gap", (), FittedProbes({}, {}))
    best = DraftSettings(none, None, 1, costs.full_model(n_blocks))
    for candidate in candidates:
        if not candidate.levels:
            continue
        replay_at = candidate.replay(selection, n_blocks)
        for threshold in THRESHOLDS[::3]:
            replay = Replay(*(column[order] for column in replay_at(threshold)))
            for max_draft_tokens in _DRAFT_TOKENS:
                cost = draft_cost(costs, n_blocks, replay, max_draft_tokens)
                if cost < best.cost:
                    least = break_even_acceptance(costs, n_blocks, replay)
                    best = DraftSettings(candidate, threshold, max_draft_tokens, cost, least)
    return best


def break_even_acceptance(costs: Costs, n_blocks: int, replay: Replay) -> float:
    """The cost of a draft over that of a token, which is the share to be accepted: only those save a token.

    Drafts also pay for the readings and probes that did not lead to one.
    """
    is_draft = replay.exit_levels < n_blocks
    level = float(replay.exit_levels[is_draft].double().mean())
    checks = replay.early_unembeddings(n_blocks) * costs.early_unembedding + replay.probe_evaluations * costs.probe
    blocks = level * costs.block + (n_blocks - level) * costs.queued_token
    per_draft = blocks + float(checks.double().sum()) / int(is_draft.sum())
    return per_draft / costs.full_model(n_blocks)


def draft_cost(costs: Costs, n_blocks: int, replay: Replay, max_draft_tokens: int) -> float:
    """Milliseconds per verified token, if the replayed positions followed one another.

    Drafts queue until a token goes to level L or `max_draft_tokens` wait. Then all run through the remaining blocks
    together, and everything after the first rejected draft is lost.
    """
    cost, n_tokens = 0.0, 0
    queue: list[tuple[int, bool]] = []  # (exit level, whether the draft is correct)
    columns = replay._replace(unembeddings=replay.early_unembeddings(n_blocks))
    for level, correct, unembeddings, probe_evaluations in zip(*(column.tolist() for column in columns), strict=True):
        may_exit = len(queue) < max_draft_tokens
        is_draft = level < n_blocks and may_exit
        cost += (level if is_draft else n_blocks) * costs.block
        if may_exit:
            cost += probe_evaluations * costs.probe + unembeddings * costs.early_unembedding
        if is_draft:
            queue.append((level, correct))
            continue
        cost += costs.unembedding  # one product verifies all drafts
        cost += sum(n_blocks - exit_level for exit_level, _ in queue) * costs.queued_token
        first_rejected = next((i for i, (_, right) in enumerate(queue) if not right), None)
        # A rejected draft is replaced by the right token. The token at level L counts only if no draft was rejected.
        n_tokens += len(queue) + 1 if first_rejected is None else first_rejected + 1
        queue = []
    return cost / n_tokens if n_tokens else float("inf")
