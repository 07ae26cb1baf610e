"""calibrate_drafts(): fit a draft head, and choose drafters and their number of drafts, for this model and machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from layerjump.data.corpus import Corpus
from layerjump.generation.calibration.dataset import OPENING
from layerjump.generation.calibration.drafter_replay import choose_drafters, measure_priors
from layerjump.generation.calibration.fit_drafters import (
    continue_openings,
    count_followers,
    fit_head,
    head_shortlist,
    head_sites,
)
from layerjump.generation.calibration.result import DrafterRecord, DraftsRecord
from layerjump.generation.combine_drafters import DraftConfig, DrafterName, measure_step_costs
from layerjump.models.model import Model

DRAFT_TOKENS = 64
"""Tokens that the model writes after each opening."""
_MAX_REPLAYED = 48  # documents on which drafters are chosen
_TIMED_REPEATS = 9
_MIN_TOKENS = 8
_CHOICES: tuple[tuple[DrafterName, ...], ...] = (
    ("lookup",),
    ("lookup", "recycled"),
    ("lookup", "head"),
    ("lookup", "recycled", "head"),
)


@dataclass(frozen=True)
class CalibratedDrafts:
    """The drafters that cost least, and what to expect of them."""

    config: DraftConfig
    record: DraftsRecord


def can_calibrate_drafts(model: Model) -> bool:
    """Whether the model's context holds an opening and enough tokens after it."""
    return _n_tokens(model) >= _MIN_TOKENS


def _n_tokens(model: Model) -> int:
    """Tokens that the model writes after an opening."""
    return min(DRAFT_TOKENS, model.tokenization.max_length - len(model.tokenization.wrap([])) - OPENING)


def calibrate_drafts(
    model: Model,
    text: Corpus,
    fit_documents: Sequence[int],
    selection_documents: Sequence[int],
    *,
    seed: int = 0,
    log: Callable[[str], None] = lambda line: None,
) -> CalibratedDrafts:
    """Fit drafters on what the model writes after some documents; choose them by replay on others.

    A third of the selection documents gives the shares of right proposals to start from.
    """
    tokens = _n_tokens(model)
    selected = list(selection_documents)[:_MAX_REPLAYED]
    log(f"continuing {len(fit_documents) + len(selected)} documents by {tokens} tokens (drafters)")
    sites = head_sites(model)
    written = continue_openings(model, text, fit_documents, sites, tokens=tokens, seed=seed)
    held_out = continue_openings(model, text, selected, sites, tokens=tokens, seed=seed)
    costs = measure_step_costs(model, repeats=_TIMED_REPEATS)
    n_priors = len(held_out) // 3
    config = DraftConfig(
        _CHOICES[-1],
        head=fit_head(model, written, sites),
        head_shortlist=head_shortlist(model, text, fit_documents, written),
        candidates=count_followers(model, written),
        costs=costs,
    )
    config = replace(config, priors=measure_priors(model, config, held_out[:n_priors]))
    config, expected = choose_drafters(model, config, costs, held_out[n_priors:], _CHOICES)
    if "head" not in config.drafters:
        config = replace(config, head=(), head_shortlist=None)
    record = DraftsRecord(
        drafters=list(config.drafters),
        max_tokens=config.max_tokens,
        step_seconds=list(costs.seconds),
        priors={name: dict(config.priors[name]) for name in config.drafters},
        tokens_per_step=expected.tokens / expected.steps,
        speedup=costs.of(1) / expected.seconds_per_token,
        by_drafter={
            name: DrafterRecord(drafted=counts.drafted, accepted=counts.accepted)
            for name, counts in expected.drafters.items()
        },
        head_sites=[str(site) for site in sites] if config.head else [],
        n_fit=sum(len(part.tokens) - part.n_opening for part in written),
    )
    log(f"drafts by {', '.join(record.drafters)}: {record.tokens_per_step:.2f} tokens a step")
    return CalibratedDrafts(config, record)
