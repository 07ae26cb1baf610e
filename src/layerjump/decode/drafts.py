"""Verified generation made as cheap as it gets: where to draft, how sure of a draft to be, how many may wait.

A wrong draft costs time and nothing else, so drafts may be bolder than tokens that nobody checks: they have levels and
a threshold of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from layerjump.decode.contenders import THRESHOLDS, WORTH, Contender, Probes, Replayed
from layerjump.decode.costs import Costs
from layerjump.decode.evidence import Evidence
from layerjump.decode.rules import Drafting, Never, Rule

UNVERIFIED = (1, 2, 4, 8)
PLAYED = 2_000
"""Positions that a try is played through, one after another."""


@dataclass(frozen=True)
class Drafts:
    """How to draft."""

    contender: Contender
    threshold: float | None
    """None: not at all, since it does not pay."""
    unverified: int
    """How many may wait."""
    cost: float
    """Milliseconds a verified token, on the evidence they were chosen on."""
    least: float = 0.0
    """The share of drafts that must be right to pay for them."""

    @property
    def rule(self) -> Rule:
        if self.threshold is None:
            return Never()
        return Drafting(self.contender.rule(self.threshold), self.least)

    def record(self) -> dict[str, Any]:
        return self.contender.record(self.threshold) | {"least": self.least}


def cheapest_drafts(
    contenders: Iterable[Contender], evidence: Evidence, costs: Costs, n_blocks: int
) -> Drafts:
    """The contender, threshold and number of waiting tokens that cost least; none, if none pays."""
    contenders = [contender for contender in contenders if contender.at]
    order = torch.randperm(len(evidence), generator=torch.Generator().manual_seed(0))[:PLAYED]
    nothing = Contender("gap", (), Probes({}, {}))
    best = Drafts(nothing, None, 1, costs.full(n_blocks))
    for contender in contenders:
        replay = contender.replay(evidence, n_blocks)
        for threshold in THRESHOLDS[::3]:
            made = replay(threshold)
            played = Replayed(*(part[order] for part in astuple(made)))
            for most in UNVERIFIED:
                cost = draft_cost(costs, n_blocks, played, most)
                if cost < best.cost:
                    least = break_even(costs, n_blocks, played)
                    best = Drafts(contender, threshold, most, cost, least)
    return best


def break_even(costs: Costs, n_blocks: int, played: Replayed) -> float:
    """What a draft costs over what a token does: the share that must be right, since only a right one saves a token.

    Looks and gates that came to nothing are paid for by the drafts.
    """
    drafts = played.left < n_blocks
    level = float(played.left[drafts].double().mean())
    asked = looks_of(played, n_blocks) * costs.look + played.gates * costs.gate
    spent = level * costs.block + (n_blocks - level) * costs.waiting
    return (spent + float(asked.double().sum()) / int(drafts.sum())) / costs.full(n_blocks)


def looks_of(played: Replayed, n_blocks: int) -> Tensor:
    """Products made at levels below L."""
    return played.heads - (played.left == n_blocks).to(played.heads)


def at_one_level(kinds: Sequence[str], probes: Probes, levels: Sequence[int]) -> list[Contender]:
    """Every kind of rule at every single level."""
    return [
        Contender(kind, (level,), probes, worth)
        for kind in kinds
        for level in levels
        for worth in (WORTH if kind == "two-stage" else (0.0,))
    ]


def draft_cost(costs: Costs, n_blocks: int, played: Replayed, most: int) -> float:
    """Milliseconds a verified token, if examples came one after another in this order.

    Drafts gather until one example goes to level L or `most` wait; then all of them go up together, and what follows
    the first wrong one has been for nothing.
    """
    spent, kept, looks_made = 0.0, 0, looks_of(played, n_blocks)
    waiting: list[tuple[int, bool]] = []
    for level, good, looks, gated in zip(
        played.left.tolist(),
        played.right.tolist(),
        looks_made.tolist(),
        played.gates.tolist(),
        strict=True,
    ):
        asked = len(waiting) < most
        drafts = level < n_blocks and asked
        spent += (level if drafts else n_blocks) * costs.block
        spent += asked * (gated * costs.gate + looks * costs.look)
        if drafts:
            waiting.append((level, good))
            continue
        spent += costs.head  # one product for all rows that are held against the model
        spent += sum(n_blocks - at for at, _ in waiting) * costs.waiting
        first_wrong = next((i for i, (_, fine) in enumerate(waiting) if not fine), None)
        # The wrong draft itself is replaced by the right token; the token that went deep comes only after no wrong one.
        kept += len(waiting) + 1 if first_wrong is None else first_wrong + 1
        waiting = []
    return spent / kept if kept else float("inf")
