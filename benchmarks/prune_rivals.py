"""Rival replacements of dropped blocks, from the formulas of their papers, on the calibration text of `prune.py`.

  LinearPatch (arXiv 2505.24680)   h → H D Hᵀ h with a Hadamard matrix H, D the ratio of mean magnitudes |Hᵀ h| of each
                                   channel after and before the span
  Prune&Comp (arXiv 2507.18212)    h → α h, α the ratio of mean magnitudes after and before; blocks one at a time by
                                   Block Influence of the compensated model
  SLEB (arXiv 2402.09025)          nothing in place; blocks one at a time by the loss of the model without them
Maps are attached at the level before a span, which is what folding them into weights computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from scipy.linalg import hadamard
from torch import Tensor, nn

from layerjump.data.batches import Batches
from layerjump.jumps.maps import apply_map
from layerjump.models.hooks import attach_map
from layerjump.models.model import Model, capture_states
from layerjump.models.sites import Site
from layerjump.pruning.drop_blocks import without_blocks
from layerjump.pruning.fit_replacements import level_after_pruning
from layerjump.pruning.prune import CalibrationData
from layerjump.pruning.select import BlockSelector, Span, blocks_in_spans, contiguous_spans


def hadamard_matrix(width: int) -> Tensor:
    """Return an orthogonal matrix whose entries are all ±1/√width: a Kronecker product of Sylvester's and Paley's."""
    for order, prime in ((1, 0), (12, 5), (20, 19), (28, 13), (36, 17)):
        power, rest = divmod(width, order)
        if rest == 0 and power & (power - 1) == 0:
            small = torch.ones(1, 1) if order == 1 else _paley(prime)
            large = torch.tensor(hadamard(power), dtype=torch.float64)
            return torch.kron(large, small.double()) / width**0.5
    raise ValueError(f"no Hadamard matrix of order {width} is known here")


def _paley(prime: int) -> Tensor:
    """Paley's construction: of order prime + 1 if prime ≡ 3 (mod 4), else of order 2 (prime + 1)."""
    squares = {number * number % prime for number in range(1, prime)}
    residue = torch.tensor(
        [[0 if i == j else 1 if (i - j) % prime in squares else -1 for j in range(prime)] for i in range(prime)]
    )
    core = torch.ones(prime + 1, prime + 1, dtype=torch.int64)
    core[1:, 1:] = residue
    core[0, 0] = 0
    identity = torch.eye(prime + 1, dtype=torch.int64)
    if prime % 4 == 3:
        core[1:, 0] = -1
        return core + identity
    two = torch.tensor([[1, 1], [1, -1]])
    return torch.kron(core, two) + torch.kron(identity, torch.tensor([[1, -1], [-1, -1]]))


def with_linear_patch(model: Model, spans: Sequence[Span], fit: Batches) -> Model:
    """Return the model without the blocks of spans, with LinearPatch in place of each."""
    matrix = hadamard_matrix(model.d_model)
    shorter = without_blocks(model, blocks_in_spans(spans))
    for source, target in spans:
        level = level_after_pruning(source, spans)
        sums = torch.zeros(2, model.d_model, dtype=torch.float64)
        before = capture_states(shorter, fit, [level])
        for states, originals in zip(before, capture_states(model, fit, [target]), strict=True):
            for row, rows in enumerate((originals[target], states[level])):
                sums[row] += (rows.double() @ matrix).abs().sum(0)
        _attach(shorter, level, matrix @ (sums[0] / sums[1]).diag() @ matrix.mT)
    return shorter


def with_compensation(model: Model, spans: Sequence[Span], fit: Batches) -> Model:
    """Return the model without the blocks of spans, with a factor of the state in place of each (Prune&Comp)."""
    shorter = without_blocks(model, blocks_in_spans(spans))
    for source, target in spans:
        level = level_after_pruning(source, spans)
        factors = []
        before = capture_states(shorter, fit, [level])
        for states, originals in zip(before, capture_states(model, fit, [target]), strict=True):
            factors.append(originals[target].abs().sum(-1) / states[level].abs().sum(-1))
        _attach(shorter, level, float(torch.cat(factors).mean()) * torch.eye(model.d_model))
    return shorter


def _attach(model: Model, level: int, weight: Tensor) -> None:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data.copy_(weight)
    attach_map(model.structure.tap(Site(level)), layer, apply_map)


def compensated_selection(model: Model, calibration: CalibrationData, count: int) -> list[Span]:
    """Return the blocks of Prune&Comp: the least Block Influence in the compensated model, one at a time."""
    dropped: list[int] = []
    for _ in range(count):
        remaining = [block for block in range(1, model.n_blocks + 1) if block not in dropped]
        shorter = with_compensation(model, contiguous_spans(dropped), calibration.fit) if dropped else model
        influence = BlockSelector(shorter, calibration.fit, calibration.validation, ()).influence()
        # Without a block before it, the state of the first one cannot be compensated.
        dropped.append(
            min((block for block in remaining if block > 1), key=lambda b: influence[remaining.index(b) + 1])
        )
    return contiguous_spans(dropped)


def sleb_selection(selector: BlockSelector, count: int) -> list[Span]:
    """Return the blocks of SLEB: by the loss without them, one at a time."""
    return contiguous_spans(replace(selector, use_maps=False, contiguous=False).select("loss", count))
