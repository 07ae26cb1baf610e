"""Structures misread on purpose. The self-check must refuse every one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from layerjump.models.anatomy import Anatomy, BlockAnatomy, ModuleStep, Operation
from layerjump.models.model import Model, capture_states
from layerjump.models.self_check import sample, self_check
from layerjump.models.sites import FINAL
from layerjump.models.structure import Structure

Misreading = Callable[[Anatomy], Anatomy | None]
"""Anatomy → a wrong one; None where the mistake cannot be made."""


def is_accepted(model: Model, misread: Misreading) -> bool:
    """Whether the self-check passes a misread structure."""
    try:
        anatomy = misread(model.structure.anatomy)
        if anatomy is None:
            return False
        wrong = replace(model, structure=Structure(model.hf, anatomy))
        return not _are_alike(model, wrong) and all(check.passed for check in self_check(wrong))
    except Exception:
        return False


def _are_alike(model: Model, other: Model) -> bool:
    """Whether two structures of a model give the same states and logits: then neither is wrong."""
    if model.n_blocks != other.n_blocks:
        return False
    batch = sample(model)
    sites = [site for site in model.structure.sites() if site != FINAL]
    (ours,), (theirs,) = (capture_states(m, [batch], sites, logits=True) for m in (model, other))
    assert ours.logits is not None
    assert theirs.logits is not None
    same_parts = all(torch.equal(ours[site], theirs[site]) for site in sites)
    steps = [m.structure.anatomy.blocks for m in (model, other)]
    arithmetic = [[(b.steps, [w.steps_before for w in b.writes]) for b in blocks] for blocks in steps]
    return same_parts and torch.equal(ours.logits, theirs.logits) and arithmetic[0] == arithmetic[1]


def _blocks(change: Callable[[BlockAnatomy], BlockAnatomy | None]) -> Misreading:
    """A mistake in every block where it can be made."""

    def misread(anatomy: Anatomy) -> Anatomy | None:
        changed = [change(block) for block in anatomy.blocks]
        if not any(changed):
            return None
        return replace(anatomy, blocks=tuple(new or old for new, old in zip(changed, anatomy.blocks, strict=True)))

    return misread


def _point(part: str, instead: str) -> Misreading:
    """One part's place taken for another's."""

    def change(block: BlockAnatomy) -> BlockAnatomy | None:
        points = dict(block.points)
        if part not in points or instead not in points or points[part] == points[instead]:
            return None
        return replace(block, points=tuple((points | {part: points[instead]}).items()))

    return _blocks(change)


def _swap(first: str, second: str) -> Misreading:
    def change(block: BlockAnatomy) -> BlockAnatomy | None:
        points = dict(block.points)
        if first not in points or second not in points:
            return None
        swapped = points | {first: points[second], second: points[first]}
        return replace(block, points=tuple(swapped.items()))

    return _blocks(change)


def _factor(block: BlockAnatomy) -> BlockAnatomy | None:
    if not block.steps:
        return None
    return replace(block, steps=(replace(block.steps[0], factor=1.05), *block.steps[1:]))


def _scale_dropped(block: BlockAnatomy) -> BlockAnatomy | None:
    if all(isinstance(step.factor, float) and step.factor == 1.0 for step in block.steps):
        return None
    return replace(block, steps=tuple(replace(s, factor=1.0) for s in block.steps))


def _reads_too_early(block: BlockAnatomy) -> BlockAnatomy | None:
    if not any(write.steps_before for write in block.writes):
        return None
    return replace(block, writes=tuple(replace(write, steps_before=0) for write in block.writes))


def _swapped_blocks(anatomy: Anatomy) -> Anatomy | None:
    first, second, *others = anatomy.blocks
    return replace(anatomy, blocks=(second, first, *others)) if first.path != second.path else None


def _parts_of_the_next(anatomy: Anatomy) -> Anatomy | None:
    blocks = anatomy.blocks
    if len({block.path for block in blocks}) < 2:
        return None
    shifted = [replace(a, points=b.points) for a, b in zip(blocks, (*blocks[1:], blocks[0]), strict=True)]
    return replace(anatomy, blocks=tuple(shifted))


def _no_bias(anatomy: Anatomy) -> Anatomy | None:
    if anatomy.unembedding is None:
        return None
    return replace(anatomy, unembedding=None, unembedding_weight=f"{anatomy.unembedding}.weight")


def _norm_of_a_block(anatomy: Anatomy) -> Anatomy | None:
    norms = [point.path for part, point in anatomy.blocks[-1].points if part in ("ln1.out", "ln2.out")]
    return replace(anatomy, to_final=(ModuleStep(norms[0]),)) if norms and anatomy.to_final else None


def _scaled_path(anatomy: Anatomy) -> Anatomy:
    scale = Operation("mul", torch.mul, (Operation.STATES, 1.05))
    return replace(anatomy, from_unembedding=(*anatomy.from_unembedding, scale))


MISREADINGS: dict[str, Misreading] = {
    "level 0 one block late": lambda anatomy: replace(anatomy, blocks=anatomy.blocks[1:]),
    "level L one block early": lambda anatomy: replace(anatomy, blocks=anatomy.blocks[:-1]),
    "two blocks swapped": _swapped_blocks,
    "blocks in reverse": lambda a: replace(a, blocks=a.blocks[::-1]) if a.blocks[0] != a.blocks[-1] else None,
    "the parts of the next block": _parts_of_the_next,
    "no final norm": lambda a: replace(a, to_final=()) if a.to_final else None,
    "the final norm twice": lambda a: replace(a, to_final=a.to_final * 2) if a.to_final else None,
    "a block's norm for the final norm": _norm_of_a_block,
    "logits scaled": _scaled_path,
    "no soft-cap or logit scale": lambda a: replace(a, from_unembedding=()) if a.from_unembedding else None,
    "no bias of the unembedding": _no_bias,
    "attention and feed-forward swapped": _swap("attn.out", "ffn.out"),
    "attention's input for its output": _point("attn.out", "attn.in"),
    "attention's input for feed-forward's": _point("ffn.in", "attn.in"),
    "attention's output for its heads": _point("heads", "attn.out"),
    "the norm's input for its output": _point("ln1.out", "ln1.in"),
    "the first norm for the second": _point("ln2.out", "ln1.out"),
    "level for the stream after attention": _point("mid", "ln1.in"),
    "a part with a wrong factor": _blocks(_factor),
    "a residual multiplier dropped": _blocks(_scale_dropped),
    "a part missing": _blocks(lambda block: replace(block, steps=block.steps[1:]) if block.steps else None),
    "the mixer's output for attention's": _point("attn.out", "mixer.out"),
    "feed-forward that reads too early": _blocks(_reads_too_early),
    "the output before its norm": _point("attn.out", "attn_raw"),
}
