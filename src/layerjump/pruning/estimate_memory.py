"""Estimate the memory that pruning a model takes beyond the model, before it starts.

It has two phases. To select blocks, sums and maps of many spans are held; then each selection that competes is a copy
of the model, into which replacements are fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from layerjump.data.batches import Batches
from layerjump.errors import argument
from layerjump.jumps.collect_moments import product_dtype
from layerjump.jumps.cost_estimate import estimate_cost, format_size, require_memory
from layerjump.jumps.moments import Moments
from layerjump.models.model import Model
from layerjump.models.sites import Pair, Site
from layerjump.pruning.fit_replacements import REFITTED_METHODS
from layerjump.pruning.select import MAX_SPAN, BlockSelector

REPLACEMENT_MATRICES = {"remove": 0, "linear": 12, "replaceme": 14, "fold": 14, "rotation": 20, "auto": 20}
"""Float64 matrices of d_model² that fitting one replacement holds at once, its sums included."""
REFIT_MATRICES = 3
"""Float64 matrices of inputs² that refitting one output projection holds: sums, penalised sums, their factor."""


@dataclass(frozen=True)
class PruningMemory:
    """Bytes that the phases of a pruning hold beyond the model."""

    selection_bytes: int
    """Sums and maps of spans, and hidden states of the validation documents."""
    copies_bytes: int
    """Copies of the model without some of its blocks."""
    replacement_bytes: int
    """Sums and temporaries of one replacement."""

    @property
    def bytes(self) -> int:
        """Bytes held at once."""
        return max(self.selection_bytes, self.copies_bytes + self.replacement_bytes)

    def __str__(self) -> str:
        return (
            f"memory {format_size(self.bytes)} beyond the model (selection {format_size(self.selection_bytes)}; copies "
            f"{format_size(self.copies_bytes)}, replacement {format_size(self.replacement_bytes)})"
        )

    def require(self, device: torch.device) -> None:
        """Raise `TooLarge` if that is more than what is free now."""
        parts = f"{format_size(self.selection_bytes)} to select, {format_size(self.copies_bytes)} for copies"
        advice = f"use {argument('criterion', 'angle')}, fewer blocks, or {argument('method', 'remove')}"
        require_memory(self.bytes, parts, device, advice=advice)


def estimate_memory(selector: BlockSelector, criterion: str, count: int | None, method: str) -> PruningMemory:
    """Estimate the memory of dropping `count` blocks (None: as many as a limit of the loss allows)."""
    model = selector.model
    most = len(selector.candidates) if count is None else count
    # Two selections of several blocks compete by loss; where their number is searched for, the best so far waits.
    n_copies = (2 if criterion == "loss" and not selector.contiguous and most > 1 else 1) + (count is None)
    dropped = most if count is not None else 1
    sites = Moments([(Site(0), Site(1)), (Site(0), Site(2))], reservoir=0, products=product_dtype(model))
    batch_bytes = estimate_cost(model, sites, {"fit": selector.fit}).batch_bytes
    return PruningMemory(
        selection_bytes=_selection_bytes(selector, criterion, most),
        copies_bytes=n_copies * _copy_bytes(model, dropped),
        replacement_bytes=_replacement_bytes(model, method) + batch_bytes,
    )


def _replacement_bytes(model: Model, method: str) -> int:
    """Sums and temporaries of one replacement, or of one output projection that is refitted after it."""
    replacement = 8 * REPLACEMENT_MATRICES[REFITTED_METHODS.get(method, method)] * model.d_model**2
    if method not in REFITTED_METHODS:
        return replacement
    layers = {write.output_layer for block in range(1, model.n_blocks + 1) for write in model.structure.writes(block)}
    weights = [model.structure.module(layer).get_parameter("weight") for layer in layers if layer is not None]
    inputs = max((weight.numel() // model.d_model for weight in weights), default=0)
    return max(replacement, 8 * (REFIT_MATRICES * inputs**2 + 3 * inputs * model.d_model))


def _selection_bytes(selector: BlockSelector, criterion: str, count: int) -> int:
    model = selector.model
    pairs: list[Pair] = []
    states_bytes = maps_bytes = 0
    if criterion == "loss":
        n_tokens = sum(batch.input_ids.numel() for batch in selector.validation)
        states_bytes = (model.n_blocks + 1) * n_tokens * model.d_model * model.dtype.itemsize
        if selector.use_maps:
            lengths = [count] if selector.contiguous else range(1, min(count, MAX_SPAN) + 1)
            pairs = [(Site(i), Site(j)) for length in lengths for i, j in selector.spans(length)]
            maps_bytes = 4 * len(pairs) * model.d_model**2
    elif criterion == "angle":
        pairs = [(Site(i), Site(j)) for i, j in selector.spans(count)]
    elif criterion != "deepest":
        pairs = [(Site(level), Site(level + 1)) for level in range(model.n_blocks)]
    return states_bytes + maps_bytes + (_sums_bytes(model, pairs, selector.fit) if pairs else 0)


def _sums_bytes(model: Model, pairs: Sequence[Pair], batches: Batches) -> int:
    moments = Moments(pairs, reservoir=0, products=product_dtype(model))
    cost = estimate_cost(model, moments, {"fit": batches}, "affine")
    return cost.sums_bytes + max(cost.batch_bytes, cost.solve_bytes)


def _copy_bytes(model: Model, dropped: int) -> int:
    """Bytes of the weights of a copy without some blocks; weights on the disk are not copied."""

    def weight_bytes(module: nn.Module) -> int:
        return sum(weight.numel() * weight.itemsize for weight in module.parameters() if not weight.is_meta)

    blocks = list(dict.fromkeys(model.structure.blocks))
    mean_block = sum(map(weight_bytes, blocks)) // len(blocks)
    return weight_bytes(model.hf) - dropped * mean_block
