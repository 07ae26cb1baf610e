"""Which blocks go: how many were asked for, which must stay, and the runs that the others make."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch

from layerjump.errors import BadPruning
from layerjump.inputs.batches import Batches
from layerjump.inputs.models import Model
from layerjump.inputs.states import states

Span = tuple[int, int]
"""(i, j): blocks i + 1 to j are cut out, so that level i has to stand for level j."""
SINK = 3.0
"""A block makes an attention sink if it lengthens the first position's state so many times, and the others' not."""


def how_many(drop: int | str, n_blocks: int) -> int:
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


def spans(dropped: Collection[int]) -> list[Span]:
    """The runs that dropped blocks make, in order."""
    runs: list[Span] = []
    for block in sorted(dropped):
        if runs and runs[-1][1] == block - 1:
            runs[-1] = (runs[-1][0], block)
        else:
            runs.append((block - 1, block))
    return runs


def blocks_in(cuts: Sequence[Span]) -> tuple[int, ...]:
    """The blocks that runs cut out."""
    return tuple(block for i, j in cuts for block in range(i + 1, j + 1))


def must_stay(model: Model, batches: Batches) -> dict[int, str]:
    """The blocks that are never dropped unasked, and why: the first, the last, and those that make a sink."""
    stay = {1: "the first block", model.n_blocks: "the last block"}
    return stay | dict.fromkeys(sink_blocks(model, batches), "it forms the attention sink")


def sink_blocks(model: Model, batches: Batches) -> list[int]:
    """The blocks in which the first position's state outgrows all others: later blocks attend to it."""
    levels = range(model.n_blocks + 1)
    first, rest = torch.zeros(len(levels)), torch.zeros(len(levels))
    for found in states(model, [batches[0]], levels):
        at_start = found.batch.position == 0
        if not bool(at_start.any()):
            return []
        for level in levels:
            norm = found[level].float().norm(dim=-1).cpu()
            first[level] += norm[at_start].median()
            rest[level] += norm[~at_start].median() if bool((~at_start).any()) else norm.median()
    growth = (first[1:] / first[:-1]) / (rest[1:] / rest[:-1])
    return [level + 1 for level in range(model.n_blocks) if float(growth[level]) > SINK]
