"""Select the blocks to drop: by loss, linearity, Block Influence, angle or depth."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from layerjump.data.batches import Batches
from layerjump.errors import BadPruning, argument
from layerjump.interventions.rerun_from_level import Rerun
from layerjump.jumps.collect_moments import product_dtype
from layerjump.jumps.estimators.registry import solve
from layerjump.jumps.maps import apply_map, to_module
from layerjump.jumps.moments import Moments
from layerjump.jumps.score_from_moments import block_map, block_pair, block_scores
from layerjump.metrics.token_loss import token_losses_at
from layerjump.models.model import Model, capture_states
from layerjump.models.sites import Pair, Site
from layerjump.pruning.drop_blocks import without_blocks

Span = tuple[int, int]
"""(i, j): blocks i + 1 to j are dropped, and a replacement maps level i to level j."""
SINK_GROWTH = 3.0
"""Growth of the first position's norm in a block, relative to other positions, that marks an attention sink."""
CRITERIA = {
    "loss": "lowest loss on the validation split with replacement maps: the best span, or blocks found greedily",
    "linearity": "blocks that an affine map explains best",
    "linearity-iterative": "the same, with scores of the remaining model after each dropped block",
    "influence": "blocks that change the direction of the residual stream least (ShortGPT's Block Influence)",
    "angle": "the span with the smallest angle between its two levels",
    "deepest": "the deepest span below the last block",
}
MAX_SPAN = 6
"""Longest span in a greedy selection by loss."""
N_RETRIED = 6
"""Number of blocks whose loss a greedy step measures again: those with the lowest loss so far."""


def parse_drop_count(drop: int | str, n_blocks: int) -> int:
    """Read a number of blocks (8) or a share of them ("25%")."""
    text = str(drop).strip()
    try:
        share = float(text.removesuffix("%")) / 100 * n_blocks if text.endswith("%") else None
        count = round(share) if share is not None and math.isfinite(share) else int(text)
    except ValueError:
        raise BadPruning(
            f"expected {argument('drop')} to be a number of blocks (8) or a share of them (25%), got {drop!r}"
        ) from None
    if count >= n_blocks:
        raise BadPruning(f"dropping {drop} of {n_blocks} blocks leaves none; drop at most {n_blocks - 1}")
    if count < 1:
        raise BadPruning(f"{drop} of {n_blocks} blocks is less than one; drop at least 1")
    return count


def contiguous_spans(dropped: Collection[int]) -> list[Span]:
    """Return the contiguous spans of dropped blocks, in order."""
    spans: list[Span] = []
    for block in sorted(dropped):
        if spans and spans[-1][1] == block - 1:
            spans[-1] = (spans[-1][0], block)
        else:
            spans.append((block - 1, block))
    return spans


def blocks_in_spans(spans: Sequence[Span]) -> tuple[int, ...]:
    """Return the blocks of spans, in order."""
    return tuple(block for i, j in spans for block in range(i + 1, j + 1))


def required_blocks(model: Model, batches: Batches) -> dict[int, str]:
    """Return blocks that stay by default, and why: the first, the last, and those that form an attention sink."""
    required = {1: "the first block", model.n_blocks: "the last block"}
    return required | dict.fromkeys(find_sink_blocks(model, batches), "it forms the attention sink")


def find_sink_blocks(model: Model, batches: Batches) -> list[int]:
    """Return the blocks in which the norm of the first position outgrows all others: later blocks attend to it."""
    levels = range(model.n_blocks + 1)
    (states,) = capture_states(model, [batches[0]], levels)
    is_first = states.batch.position == 0
    if not bool(is_first.any()):
        return []
    norms = torch.stack([states[level].float().norm(dim=-1).cpu() for level in levels])
    first = norms[:, is_first].median(dim=1).values
    others = (norms if bool(is_first.all()) else norms[:, ~is_first]).median(dim=1).values
    growth = (first[1:] / first[:-1]) / (others[1:] / others[:-1])
    return [block for block, factor in enumerate(growth.tolist(), start=1) if factor > SINK_GROWTH]


def check_criterion(criterion: str) -> None:
    """Raise `BadPruning` for an unknown criterion."""
    if criterion not in CRITERIA:
        raise BadPruning(f"expected {argument('criterion')} to be one of {', '.join(CRITERIA)}, got {criterion!r}")


@dataclass(frozen=True)
class BlockSelector:
    """Selects blocks of a model, with second moments of fit documents and losses on validation documents."""

    model: Model
    fit: Batches
    validation: Batches
    protected: Collection[int]
    """Blocks that must stay."""
    use_maps: bool = True
    """Whether candidates are tried with replacement maps, or with nothing in place of the blocks."""
    contiguous: bool = False
    """Whether to select a single span of blocks."""

    @property
    def candidates(self) -> list[int]:
        """Blocks that may be dropped."""
        return [b for b in range(1, self.model.n_blocks + 1) if b not in self.protected]

    def spans(self, count: int) -> list[Span]:
        """Return all spans of `count` candidate blocks."""
        spans = [(i, i + count) for i in range(self.model.n_blocks - count + 1)]
        return [span for span in spans if not set(blocks_in_spans([span])) & set(self.protected)]

    def select(self, criterion: str, count: int) -> tuple[int, ...]:
        """Return `count` blocks to drop, counted from 1, in order."""
        check_criterion(criterion)
        if count > len(self.candidates):
            raise BadPruning(
                f"{count} blocks are to be dropped, but only {len(self.candidates)} may go; drop fewer, or pass the "
                f"blocks that must stay as {argument('protect')}"
            )
        if criterion == "linearity-iterative":
            return tuple(sorted(self._order_by_linearity(count)))
        if criterion == "loss" and not self.contiguous:
            return tuple(sorted(self.order_by_loss(count)))
        low_first: dict[int, float] = {}  # block → score, low for those to drop
        if criterion == "linearity":
            low_first = {block: -score for block, score in self.linearity().items()}
        elif criterion == "influence":
            low_first = self.influence()
        if low_first and not self.contiguous:
            return tuple(sorted(sorted(self.candidates, key=low_first.__getitem__)[:count]))

        spans = self.spans(count)
        if not spans:
            raise BadPruning(
                f"no span of {count} blocks may be dropped: blocks "
                f"{', '.join(map(str, sorted(self.protected)))} must stay; drop fewer, or select by loss, linearity or "
                f"influence, which take separate blocks"
            )
        if criterion == "loss":
            trials = SpanTrials(self, count)
            scores = {span: trials.loss([span]) for span in spans}
        elif criterion == "angle":  # the mean angle arccos(cos)/π between the levels of a span (arXiv 2403.17887)
            moments = self.collect([(Site(i), Site(j)) for i, j in spans])
            scores = {(i, j): moments.mean_angle((Site(i), Site(j))) for i, j in spans}
        elif criterion == "deepest":
            scores = {(i, j): -float(i) for i, j in spans}
        else:
            scores = {span: sum(low_first[block] for block in blocks_in_spans([span])) for span in spans}
        return blocks_in_spans([min(spans, key=scores.__getitem__)])

    def linearity(self, model: Model | None = None) -> dict[int, float]:
        """Return 1 − error / variance of the affine map over each block (in sample, as in arXiv 2405.12250)."""
        n_blocks = (model or self.model).n_blocks
        moments = self.collect([block_pair(level) for level in range(n_blocks)], model)
        maps = [block_map(moments, level) for level in range(n_blocks)]
        scores = [block_scores(fitted, moments, moments, level) for level, fitted in enumerate(maps)]
        return {block: score["with residual"] for block, score in enumerate(scores, start=1)}

    def influence(self) -> dict[int, float]:
        """Return Block Influence: 1 − mean cosine between the input and output of each block (arXiv 2403.03853)."""
        pairs = [block_pair(level) for level in range(self.model.n_blocks)]
        moments = self.collect(pairs)
        return {pair[1].index: 1 - moments.mean_cosine(pair) for pair in pairs}

    def _order_by_linearity(self, count: int) -> list[int]:
        dropped: list[int] = []
        for _ in range(count):
            remaining = [b for b in range(1, self.model.n_blocks + 1) if b not in dropped]
            scores = self.linearity(without_blocks(self.model, dropped) if dropped else None)
            scores = {remaining[new - 1]: score for new, score in scores.items()}
            dropped.append(max((b for b in self.candidates if b not in dropped), key=scores.__getitem__))
        return dropped

    def order_by_loss(self, count: int) -> list[int]:
        """Return `count` blocks in the greedy order by loss: the first n of them are the selection of n blocks."""
        trials = SpanTrials(self, count)
        dropped: list[int] = []
        loss = {block: trials.loss(contiguous_spans([block])) for block in self.candidates}
        while len(dropped) < count:
            candidates = [
                block
                for block in sorted(set(loss) - set(dropped), key=lambda block: (loss[block], block))
                if trials.covers(contiguous_spans([*dropped, block]))
            ][:N_RETRIED]
            if not candidates:
                raise BadPruning(
                    f"{count} blocks cannot be dropped in spans of at most {MAX_SPAN}; pass "
                    f"{argument('criterion', 'angle')}"
                )
            if dropped:
                for block in candidates:
                    loss[block] = trials.loss(contiguous_spans([*dropped, block]))
            dropped.append(min(candidates, key=lambda block: loss[block]))
        return dropped

    def collect(self, pairs: Sequence[Pair], model: Model | None = None, *, skip_first: bool = True) -> Moments:
        """Collect second moments of fit documents, without the first position, whose state would dominate."""
        moments = Moments(pairs, reservoir=0, products=product_dtype(self.model))
        for states in capture_states(model or self.model, self.fit, moments.sites):
            selected = states.batch.position >= int(skip_first)
            if bool(selected.any()):
                moments.add({site: state[selected] for site, state in states.at.items()})
        moments.release_buffers()
        return moments


class SpanTrials:
    """Losses on validation documents with spans dropped, and a full affine map (or nothing) in their place.

    The map predicts well what folded weights achieve, and needs no copy of the model: recorded calls are run again.
    """

    def __init__(self, selector: BlockSelector, count: int) -> None:
        self._model = selector.model
        self._max_span = count if selector.contiguous else min(count, MAX_SPAN)
        self._reruns = [Rerun(selector.model, batch) for batch in selector.validation]
        self._maps: dict[Span, torch.nn.Module] = {}
        if not selector.use_maps:
            return
        lengths = [self._max_span] if selector.contiguous else range(1, self._max_span + 1)
        spans = [span for length in lengths for span in selector.spans(length)]
        # The maps apply to all positions, so they are fitted on all, the first included.
        moments = selector.collect([(Site(i), Site(j)) for i, j in spans], skip_first=False)
        for i in dict.fromkeys(i for i, _ in spans):
            same_source = [span for span in spans if span[0] == i]
            targets = moments.targets(Site(i), [Site(j) for _, j in same_source])
            solved = solve("affine", moments.source(Site(i)), targets)
            self._maps |= {span: to_module(affine) for span, affine in zip(same_source, solved, strict=True)}

    def covers(self, spans: Sequence[Span]) -> bool:
        """Return whether no span is longer than those that maps are fitted for."""
        return all(j - i <= self._max_span for i, j in spans)

    @torch.no_grad()
    def loss(self, spans: Sequence[Span]) -> float:
        """Return the mean loss with these spans dropped."""
        losses = []
        for rerun in self._reruns:
            level = spans[0][0]
            states = rerun.levels[level]
            for i, j in spans:
                states = rerun.from_level(level, states, to=i)
                states = apply_map(self._maps[i, j], states) if self._maps else states
                level = j
            last = rerun.pick(rerun.from_level(level, states))
            losses.append(token_losses_at(self._model, rerun.batch, last)[0])
        return float(torch.cat(losses).mean())
