"""Select which blocks to drop.

Which blocks go: how many were asked for, which must stay, and the runs that the others make.

Which blocks to drop: by linearity, by how little they turn the stream, by depth, or by the loss without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerjump.data.batches import Batches
from layerjump.errors import BadPruning
from layerjump.interventions.patching import Rerun
from layerjump.jumps.block_linearity import block_map, block_pair, explained
from layerjump.jumps.collect import product_dtype
from layerjump.jumps.estimators.registry import solve
from layerjump.jumps.maps import Affine, apply_map, to_module
from layerjump.jumps.pairs import Pair
from layerjump.jumps.scoring import residual
from layerjump.jumps.statistics import Moments
from layerjump.metrics.token_loss import token_losses_at
from layerjump.models.activations import capture_states
from layerjump.models.model import Model
from layerjump.models.structure import Site
from layerjump.pruning.drop_layers import without_blocks

Span = tuple[int, int]
"""(i, j): blocks i + 1 to j are cut out, so that level i has to stand for level j."""
SINK = 3.0
"""A block makes an attention sink if it lengthens the first position's state so many times, and the others' not."""


def parse_drop_count(drop: int | str, n_blocks: int) -> int:
    """Read a number of blocks or a share of them, such as 8 or `25%`."""
    text = str(drop).strip()
    try:
        share = float(text.removesuffix("%")) / 100 * n_blocks if text.endswith("%") else None
        count = round(share) if share is not None and math.isfinite(share) else int(text)
    except ValueError:
        raise BadPruning(
            f"what to drop was given as {drop!r}; give a number of blocks (8) or a share of them (25%)"
        ) from None
    if count >= n_blocks:
        raise BadPruning(
            f"{drop} of {n_blocks} blocks were to be dropped, which leaves none; drop at most {n_blocks - 1}"
        )
    if count < 1:
        raise BadPruning(f"{drop} of {n_blocks} blocks is less than one; drop at least 1")
    return count


def contiguous_spans(dropped: Collection[int]) -> list[Span]:
    """The runs that dropped blocks make, in order."""
    runs: list[Span] = []
    for block in sorted(dropped):
        if runs and runs[-1][1] == block - 1:
            runs[-1] = (runs[-1][0], block)
        else:
            runs.append((block - 1, block))
    return runs


def blocks_in_spans(cuts: Sequence[Span]) -> tuple[int, ...]:
    """The blocks that runs cut out."""
    return tuple(block for i, j in cuts for block in range(i + 1, j + 1))


def required_blocks(model: Model, batches: Batches) -> dict[int, str]:
    """The blocks that are never dropped unasked, and why: the first, the last, and those that make a sink."""
    stay = {1: "the first block", model.n_blocks: "the last block"}
    return stay | dict.fromkeys(find_sink_blocks(model, batches), "it forms the attention sink")


def find_sink_blocks(model: Model, batches: Batches) -> list[int]:
    """The blocks in which the first position's state outgrows all others: later blocks attend to it."""
    levels = range(model.n_blocks + 1)
    first, rest = torch.zeros(len(levels)), torch.zeros(len(levels))
    for found in capture_states(model, [batches[0]], levels):
        at_start = found.batch.position == 0
        if not bool(at_start.any()):
            return []
        for level in levels:
            norm = found[level].float().norm(dim=-1).cpu()
            first[level] += norm[at_start].median()
            rest[level] += norm[~at_start].median() if bool((~at_start).any()) else norm.median()
    growth = (first[1:] / first[:-1]) / (rest[1:] / rest[:-1])
    return [level + 1 for level in range(model.n_blocks) if float(growth[level]) > SINK]


CRITERIA = {
    "loss": "what costs least on select documents with stand-ins in place: the best run, or blocks found greedily",
    "linearity": "the blocks that a linear map explains best",
    "linearity-iterative": "the same, scored anew on what is left after each one",
    "influence": "the blocks that change the direction of the stream least (ShortGPT's Block Influence)",
    "angle": "the run of blocks whose two ends are nearest in angle",
    "deepest": "the deepest run of blocks but the last",
}
LONGEST = 6
"""Blocks in one run when blocks are chosen by loss: longer runs are not tried."""
TRIED = 6
"""Blocks tried again at each greedy step: the likeliest by what they cost when tried last."""


@dataclass(frozen=True)
class BlockSelector:
    """What a choice may look at: sums on fit documents, losses on select documents."""

    model: Model
    fit: Batches
    validation: Batches
    protected: Collection[int]
    """Blocks that may not go."""
    use_maps: bool = True
    """Whether a map stands in for what goes, or nothing."""
    contiguous: bool = False

    @property
    def candidates(self) -> list[int]:
        return [block for block in range(1, self.model.n_blocks + 1) if block not in self.protected]

    def runs(self, count: int) -> list[Span]:
        """All runs of so many free blocks."""
        starts = range(self.model.n_blocks - count + 1)
        return [
            (i, i + count)
            for i in starts
            if not set(range(i + 1, i + count + 1)) & set(self.protected)
        ]

    def sums(self, pairs: Sequence[Pair], model: Model | None = None) -> Moments:
        """Sums over the fit documents, the first position left out: its state alone would decide."""
        found = Moments(pairs, reservoir=0, products=product_dtype(self.model))
        for one in capture_states(model or self.model, self.fit, found.sites):
            later = one.batch.position > 0
            if bool(later.any()):
                found.add({site: state[later] for site, state in one.at.items()})
        return found


def check_criterion(how: str) -> None:
    """Refuse a way to choose that there is not."""
    if how not in CRITERIA:
        raise BadPruning(f"blocks were to be chosen by {how!r}; give one of {', '.join(CRITERIA)}")


def select_blocks(how: str, count: int, given: BlockSelector) -> tuple[int, ...]:
    """So many blocks to drop, counted from 1, in order."""
    check_criterion(how)
    if count > len(given.candidates):
        raise BadPruning(
            f"{count} blocks were to be dropped, but only {len(given.candidates)} may go; ask for fewer, or say with "
            f"`protect` which blocks must stay"
        )
    makers: dict[str, Callable[[int, BlockSelector], Collection[int]]] = {
        "loss": _by_loss,
        "linearity": lambda n, g: _least(n, g, {b: -s for b, s in linearity(g).items()}),
        "linearity-iterative": _again,
        "influence": lambda n, g: _least(n, g, influence(g)),
        "angle": _by_angle,
        "deepest": lambda n, g: blocks_in_spans([_one_of(g, n)[-1]]),
    }
    return tuple(sorted(makers[how](count, given)))


def linearity(given: BlockSelector, model: Model | None = None) -> dict[int, float]:
    """1 − error / variance of the affine map over each block (in sample, as in arXiv 2405.12250)."""
    blocks = (model or given.model).n_blocks
    sums = given.sums([block_pair(level) for level in range(blocks)], model)
    found = {}
    for level in range(blocks):
        source, target = block_pair(level)
        held = sums.source(source), sums.target(source, target)
        error = float(residual(block_map(sums, level), *held).sum())
        found[level + 1] = explained(error, float(held[1].spread.sum()))
    return found


def influence(given: BlockSelector) -> dict[int, float]:
    """Block Influence: 1 − the mean cosine between what enters and what leaves each block (arXiv 2403.03853)."""
    pairs = [block_pair(level) for level in range(given.model.n_blocks)]
    sums = given.sums(pairs)
    return {pair[1].index: 1 - sums.mean_cosine(pair) for pair in pairs}


def _least(count: int, given: BlockSelector, score: dict[int, float]) -> Collection[int]:
    """The free blocks of least score, or the run of least sum."""
    if given.contiguous:
        runs = _one_of(given, count)
        return blocks_in_spans(
            [min(runs, key=lambda run: sum(score[b] for b in blocks_in_spans([run])))]
        )
    return sorted(given.candidates, key=lambda block: score[block])[:count]


def _again(count: int, given: BlockSelector) -> Collection[int]:
    """One at a time, each the most linear of what is left when the earlier ones are gone."""
    gone: list[int] = []
    for _ in range(count):
        kept = [block for block in range(1, given.model.n_blocks + 1) if block not in gone]
        scores = linearity(given, without_blocks(given.model, gone) if gone else given.model)
        named = {kept[new - 1]: score for new, score in scores.items()}
        gone.append(max((b for b in kept if b in given.candidates), key=lambda block: named[block]))
    return gone


def _by_angle(count: int, given: BlockSelector) -> Collection[int]:
    """arccos(cos)/π between the ends of a run, least on average (arXiv 2403.17887)."""
    runs = _one_of(given, count)
    sums = given.sums([(Site(i), Site(j)) for i, j in runs])
    return blocks_in_spans(
        [min(runs, key=lambda run: sums.mean_angle((Site(run[0]), Site(run[1]))))]
    )


def _by_loss(count: int, given: BlockSelector) -> Collection[int]:
    tried = SpanTrials(given, count)
    if given.contiguous:
        return blocks_in_spans([min(_one_of(given, count), key=lambda run: tried.loss([run]))])
    return _greedily(count, given, tried)


def order_by_loss(count: int, given: BlockSelector) -> list[int]:
    """So many blocks in the order in which they go, greedily by loss: the first few are the choice of fewer."""
    return _greedily(count, given, SpanTrials(given, count))


def _greedily(count: int, given: BlockSelector, tried: SpanTrials) -> list[int]:
    gone: list[int] = []
    cost = {block: tried.loss(contiguous_spans([block])) for block in given.candidates}
    while len(gone) < count:
        left = sorted((b for b in cost if b not in gone), key=lambda block: cost[block])
        left = [block for block in left if tried.allows(contiguous_spans([*gone, block]))]
        if not left:
            raise BadPruning(
                f"{count} blocks cannot be dropped in runs of at most {LONGEST}; choose them by angle"
            )
        if gone:
            for block in left[:TRIED]:
                cost[block] = tried.loss(contiguous_spans([*gone, block]))
        gone.append(min(left[:TRIED], key=lambda block: cost[block]))
    return gone


def _one_of(given: BlockSelector, count: int) -> list[Span]:
    runs = given.runs(count)
    if not runs:
        raise BadPruning(
            f"there is no run of {count} blocks that may go: blocks {', '.join(map(str, sorted(given.protected)))} "
            f"must stay; ask for fewer, or choose by loss, linearity or influence, which take blocks from anywhere"
        )
    return runs


class SpanTrials:
    """Losses on select documents with runs of blocks cut out, a full linear map (or nothing) in their place.

    The map is a near guide to what a fold will do, and needs no copy of the model: everything runs from recorded calls.
    """

    def __init__(self, given: BlockSelector, longest: int) -> None:
        self._given = given
        self._longest = longest if given.contiguous else min(longest, LONGEST)
        self._reruns = [Rerun(given.model, batch) for batch in given.validation]
        self._maps: dict[Span, torch.nn.Module] = {}
        if given.use_maps:
            self._fit_maps()

    def allows(self, cuts: Sequence[Span]) -> bool:
        return all(j - i <= self._longest for i, j in cuts)

    def loss(self, cuts: Sequence[Span]) -> float:
        """The mean loss with these runs cut out."""
        model = self._given.model
        each = [
            token_losses_at(model, rerun.batch, rerun.pick(self._last(rerun, cuts)))[0]
            for rerun in self._reruns
        ]
        return float(torch.cat(each).mean())

    @torch.no_grad()
    def _last(self, rerun: Rerun, cuts: Sequence[Span]) -> Tensor:
        level = cuts[0][0]
        hidden = rerun.levels[level]
        for i, j in cuts:
            hidden = rerun.from_level(level, hidden, to=i)
            hidden = apply_map(self._maps[i, j], hidden) if self._maps else hidden
            level = j
        return rerun.from_level(level, hidden)

    def _fit_maps(self) -> None:
        lengths = [self._longest] if self._given.contiguous else range(1, self._longest + 1)
        runs = [run for length in lengths for run in self._given.runs(length)]
        # Applied everywhere, so fitted everywhere: the first position, too.
        sums = Moments(
            [(Site(i), Site(j)) for i, j in runs],
            reservoir=0,
            products=product_dtype(self._given.model),
        )
        for one in capture_states(self._given.model, self._given.fit, sums.sites):
            sums.add(one.at)
        by_start: dict[int, list[int]] = {}
        for i, j in runs:
            by_start.setdefault(i, []).append(j)
        for i, ends in by_start.items():
            targets = [sums.target(Site(i), Site(j)) for j in ends]
            solved: list[Affine] = solve("affine", sums.source(Site(i)), targets)
            self._maps |= {(i, j): to_module(jump) for j, jump in zip(ends, solved, strict=True)}
