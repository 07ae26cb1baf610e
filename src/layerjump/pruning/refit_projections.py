"""Refit output projections around dropped blocks, one linear solve each.

A folded map changes d × d numbers. The output projection of a feed-forward or attention has more inputs, and what it
writes is linear in its weights W. At some site after it, the pruned model's state s differs from the original model's
state t by e = t − s. The change D of W that removes most of the error solves a ridge regression from the projection's
inputs x,

    min_D Σ ‖D x − e‖² / ‖t‖ + strength · mean(diag(Σ x xᵀ / ‖t‖)) · ‖D‖²,

from two sums, Σ x xᵀ and Σ x eᵀ. (What is added with a factor has its error divided by the factor. A bias is one more
input that is always 1, and is not shrunk. The weight 1 / ‖t‖ is that of `replace`.)

The block before the first span comes first: its target is the level after the span. Then each later block, its
attention before its feed-forward, with targets at the same places of the original model. Every regression sees the
states that the projections before it lead to. The strength is the one with the lowest loss of the whole pruned model
on validation documents, and a projection whose change does not lower that loss stays as it was. So the loss on the
validation split falls with every step, and after some blocks that do not help the search stops.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from layerjump.data.batches import Batches
from layerjump.errors import BadModel
from layerjump.io import read_tensors, write_tensors, writing
from layerjump.jumps.layer_pass import can_run_by_layer
from layerjump.jumps.spill_states import StateStore
from layerjump.models.anatomy import Write
from layerjump.models.model import Model
from layerjump.models.sites import Site
from layerjump.models.structure import Tap
from layerjump.pruning.block_pass import BlockPass
from layerjump.pruning.output_weights import output_gain, require_editable
from layerjump.pruning.rotate_stream import StreamTransform
from layerjump.pruning.select import Span, blocks_in_spans

log = logging.getLogger("layerjump")

STRENGTHS = tuple(10 ** (exponent / 2) for exponent in range(-8, 5))
"""Regularisation strengths that are tried, in steps of √10."""
FIRST_STRENGTH = 0.1
_BIAS_STRENGTH = 1e-9
PATIENCE = 3
"""Number of blocks in a row without any improvement after which the search stops."""


class RefitStep(BaseModel):
    """One output projection of the pruned model that was tried."""

    model_config = ConfigDict(frozen=True)

    block: int
    """Block of the pruned model, counted from 1."""
    part: str
    """The part that the projection belongs to: ffn, attn, …"""
    strength: float | None
    """The chosen regularisation strength; None: no change lowered the loss, and the projection stayed as it was."""
    loss: float
    """Loss of the pruned model on validation documents after this step, in nats per token."""


@dataclass(frozen=True, eq=False)
class Projection:
    """An output projection of the pruned model, and the states between which it is refitted."""

    block: int
    write: Write
    layer: nn.Module
    site: Site
    """Where the pruned model's state is compared."""
    gain: Tensor
    """What multiplies each coordinate of the projection's output on its way there."""
    tap: Tap
    """The projection's input."""

    @property
    def weight(self) -> Tensor:
        """A view of the weight, (outputs, inputs)."""
        weight = self.layer.get_parameter("weight")
        return weight.mT if isinstance(self.layer, Conv1D) else weight

    @property
    def bias(self) -> nn.Parameter | None:
        bias: nn.Parameter | None = getattr(self.layer, "bias", None)
        return bias


def cannot_refit(model: Model) -> str | None:
    """Return why no output projection of this model can be refitted, or None if some can be."""
    model_type = model.model_type
    if model.structure.anatomy.n_streams > 1:
        return f"{model_type} has several residual streams"
    if not can_run_by_layer(model):
        return f"the blocks of {model_type} exchange more than the residual stream, so they cannot run one by one"
    reasons = [
        _why_not(model, block, write)
        for block in range(1, model.n_blocks + 1)
        for write in model.structure.writes(block)
    ]
    if not reasons:
        return f"the parts of {model_type} blocks are unknown"
    for block in range(1, model.n_blocks + 1):
        for write in model.structure.writes(block):
            try:  # weights that must not be edited are refused, though others could be
                require_editable(model, *filter(None, [write.output_layer]))
            except BadModel as error:
                return str(error)
    return None if None in reasons else reasons[0]


def _why_not(model: Model, block: int, write: Write) -> str | None:
    """Why the output projection of one part cannot be refitted."""
    part = f"the {write.name} output of block {block} of {model.model_type}"
    if write.output_layer is None or not _is_linear(model.structure.module(write.output_layer)):
        return f"{part} is not written by one linear layer"
    if write.is_normed_after:
        return f"a norm follows {part}"
    if _stream_after(model, block, write) is None:
        return f"the residual stream after {part} cannot be captured"
    return None


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, (nn.Linear, Conv1D))


def _stream_after(model: Model, block: int, write: Write) -> tuple[Site, Tensor] | None:
    """The first site of the residual stream at which all parts of a write's phase are added, and the write's gain."""
    anatomy = model.structure.anatomy.blocks[block - 1]
    phase = {other.name for other in anatomy.writes if other.phase == write.phase}
    end = 1 + max(index for index, step in enumerate(anatomy.steps) if step.kind == "add" and step.name in phase)
    sites = {n_steps: Site(block, name) for name, n_steps in anatomy.mids if name in dict(anatomy.points)}
    is_last = not any(step.kind == "add" for step in anatomy.steps[end:])
    site, until = (Site(block), len(anatomy.steps)) if is_last else (sites.get(end), end)
    gain = output_gain(model, block, write, until=until)
    return None if site is None or gain is None else (site, gain)


def find_projections(model: Model, block: int) -> Iterator[Projection]:
    """Yield the output projections of a block that can be refitted, in the order of computation."""
    points = dict(model.structure.anatomy.blocks[block - 1].points)
    for write in model.structure.writes(block):
        after = _stream_after(model, block, write)
        if _why_not(model, block, write) is None and after is not None and write.output_layer is not None:
            layer = model.structure.module(write.output_layer)
            tap = Tap(layer, "in", layout=points[f"{write.name}.out"].layout)
            yield Projection(block, write, layer, after[0], after[1], tap)


def refit_projections(
    model: Model,
    pruned: Model,
    spans: Sequence[Span],
    fit: Batches,
    validation: Batches,
    *,
    transforms: Sequence[StreamTransform] = (),
    run: Mapping[str, object],
    work_folder: Path | None = None,
) -> tuple[RefitStep, ...]:
    """Refit output projections of `pruned`, a copy of a model without the blocks of some spans, in place.

    `transforms` are those of the pruned model's residual stream. With a `work_folder`, the projections of every
    finished block are stored there, and a second call with the same `run` (everything that the result depends on)
    continues with the next block, to the same bytes.
    """
    dropped = blocks_in_spans(spans)
    remaining = [block for block in range(1, model.n_blocks + 1) if block not in dropped]
    first = spans[0][0] or 1  # the block before the first span; if there is none, the first one
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="layerjump-", dir=work_folder)))
        saved = None if work_folder is None else _SavedBlocks.of(work_folder, run)
        original = stack.enter_context(closing(BlockPass(model, fit, folder, "original")))
        original.advance(first - 1)
        shorter = stack.enter_context(closing(original.fork(pruned, "pruned")))
        tried = stack.enter_context(closing(BlockPass(pruned, validation, folder, "validation")))
        tried.advance(first - 1)
        loss = tried.loss()
        log.info("%s: validation loss %.4f before refitting", pruned.name, loss)
        steps: list[RefitStep] = []
        for block in range(first, pruned.n_blocks + 1):
            twin = remaining[block - 1]  # the same block of the original model
            projections = [
                projection
                for projection in find_projections(pruned, block)
                # Before the end of the last block before a span, the two models are still equal.
                if block > spans[0][0] or projection.site.between_blocks
            ]
            original.advance(twin - 1)
            block_steps = None if saved is None else saved.read(block, projections)
            if block_steps is None:
                target_level = dict(spans).get(twin, twin)
                block_steps = []
                with closing(_Targets(original, twin, projections, target_level, folder)) as targets:
                    for projection in projections:
                        states = targets.read(projection, transforms)
                        chosen = [step.strength for step in (*steps, *block_steps) if step.strength is not None]
                        step = _refit(projection, shorter, tried, states, loss, (*chosen, FIRST_STRENGTH)[-1])
                        block_steps.append(step)
                        loss = step.loss
                if saved is not None:
                    saved.write(block, projections, block_steps)
            steps += block_steps
            loss = steps[-1].loss if steps else loss
            helped = [step.block for step in steps if step.strength is not None]
            if block - max(helped, default=first - 1) >= PATIENCE:
                log.info("%s: %d blocks in a row did not help; refitting stops here", pruned.name, PATIENCE)
                break
            shorter.advance(block)
            tried.advance(block)
    return tuple(steps)


class _Targets:
    """The original model's states that the projections of one block are refitted to, at the picked positions."""

    def __init__(
        self, original: BlockPass, block: int, projections: Sequence[Projection], level: int, folder: Path
    ) -> None:
        self._n_picks = [batch.n_picks for batch in original.batches]
        self._stores: dict[str, StateStore] = {}
        taps = {
            projection.site.part: original.model.structure.tap(Site(block, projection.site.part))
            for projection in projections
            if not projection.site.between_blocks
        }
        for part in (*taps, "level"):
            self._stores[part] = StateStore([Site(block, part)], sum(self._n_picks), folder / f"target {part}")
        for states in original.visit(taps) if taps else ():
            for part, rows in states.items():
                self._append(part, rows)
        original.advance(level)
        for rows in original.picked_states():
            self._append("level", rows)

    def _append(self, part: str, rows: Tensor) -> None:
        (site,) = self._stores[part].sites
        self._stores[part].append({site: rows})

    def read(self, projection: Projection, transforms: Sequence[StreamTransform]) -> Iterator[Tensor]:
        """Yield the targets of a projection for each batch, in the coordinates of the pruned model's stream."""
        site = projection.site
        level = site.index if site.between_blocks else site.index - 1
        transform = next((t for t in reversed(transforms) if t.level <= level), StreamTransform(0))
        store = self._stores[site.part]
        start = 0
        for count in self._n_picks:
            yield transform(store.read(store.sites[0], start, start := start + count))

    def close(self) -> None:
        for store in self._stores.values():
            store.close()


def _refit(
    projection: Projection, shorter: BlockPass, tried: BlockPass, targets: Iterator[Tensor], loss: float, start: float
) -> RefitStep:
    """Change a projection with the strength of the lowest loss, searched from `start` on; not if no loss falls."""
    gram, cross = collect_sums(projection, shorter, targets)
    weight, bias = projection.weight, projection.bias
    parameters = [weight] if bias is None else [weight, bias]
    before = [parameter.detach().clone() for parameter in parameters]
    losses: dict[int, float] = {}

    @torch.no_grad()
    def apply(strength: float | None) -> bool:
        """Change the projection; return False if the strength is too weak for the rounding errors of the sums."""
        if strength is None:
            for parameter, values in zip(parameters, before, strict=True):
                parameter.copy_(values)
            return True
        changes = solve_change(gram, cross, strength, n_inputs=weight.shape[1])
        if not all(bool(change.isfinite().all()) for change in changes):
            return False
        for parameter, values, change in zip(parameters, before, changes, strict=False):
            parameter.copy_(values.double() + change.to(values.device))
        return True

    def loss_with(index: int) -> float:
        if index not in losses:
            losses[index] = tried.loss() if apply(STRENGTHS[index]) else math.inf
        return losses[index]

    best = min(range(len(STRENGTHS)), key=lambda index: abs(math.log(STRENGTHS[index] / start)))
    if bool(gram.any()):  # else nothing reaches the projection
        while True:
            near = [index for index in (best, best - 1, best + 1) if 0 <= index < len(STRENGTHS)]
            last, best = best, min(near, key=loss_with)
            if best == last:
                break
    strength = STRENGTHS[best] if losses.get(best, math.inf) < loss else None
    apply(strength)
    step = RefitStep(
        block=projection.block,
        part=projection.write.name,
        strength=strength,
        loss=loss if strength is None else losses[best],
    )
    chosen = "unchanged" if strength is None else f"strength {strength:.2g}"
    log.info("block %d, %s: %s, validation loss %.4f", step.block, step.part, chosen, step.loss)
    return step


def solve_change(gram: Tensor, cross: Tensor, strength: float, *, n_inputs: int) -> tuple[Tensor, Tensor]:
    """Return the changes of weight and bias from Σ x xᵀ and Σ x eᵀ; without a bias the second is empty.

    They are NaN if the penalised Σ x xᵀ is not positive definite.
    """
    scale = gram.diagonal()[:n_inputs].mean()
    penalty = torch.full((len(gram),), strength, dtype=torch.float64)
    penalty[n_inputs:] = _BIAS_STRENGTH
    factor, failed = torch.linalg.cholesky_ex(gram + (penalty * scale).diag())
    change = torch.cholesky_solve(cross, factor).mT
    if bool(failed):
        change = torch.full_like(change, math.nan)
    return change[:, :n_inputs], change[:, n_inputs:].flatten()


def collect_sums(projection: Projection, shorter: BlockPass, targets: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
    """Σ x xᵀ and Σ x eᵀ, weighted; with a bias, x has one more coordinate that is always 1."""
    outputs, inputs = projection.weight.shape
    inputs += projection.bias is not None
    gram = torch.zeros(inputs, inputs, dtype=torch.float64)
    cross = torch.zeros(inputs, outputs, dtype=torch.float64)
    dtype = torch.float64 if projection.weight.dtype == torch.float64 else torch.float32
    taps = {"input": projection.tap, "state": shorter.model.structure.tap(projection.site)}
    for states, target in zip(shorter.visit(taps), targets, strict=True):
        target, state, x = (rows.cpu().to(dtype) for rows in (target, states["state"], states["input"]))
        error = (target - state.view_as(target)) / projection.gain.to(dtype)
        if projection.bias is not None:
            x = torch.cat([x, torch.ones_like(x[:, :1])], -1)
        weight = target.square().mean(-1, keepdim=True).clamp_min(1e-24) ** -0.25
        x, error = x * weight, error * weight
        gram += x.mT @ x
        cross += x.mT @ error
    return gram, cross


@dataclass(frozen=True)
class _SavedBlocks:
    """The refitted projections of finished blocks, one file a block."""

    folder: Path

    @classmethod
    def of(cls, work_folder: Path, run: Mapping[str, object]) -> _SavedBlocks:
        """Those of one run: another run has another folder."""
        digest = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()
        folder = work_folder / f"refit-{digest[:16]}"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return cls(folder)

    def _path(self, block: int) -> Path:
        return self.folder / f"block-{block}.safetensors"

    @torch.no_grad()
    def read(self, block: int, projections: Sequence[Projection]) -> list[RefitStep] | None:
        """Restore the projections of a finished block, and return its steps; None if it is not finished."""
        if not self._path(block).exists():
            return None
        tensors, metadata = read_tensors(self._path(block))
        for name, parameter in _parameters(projections).items():
            parameter.copy_(tensors[name])
        return [RefitStep.model_validate(step) for step in json.loads(metadata["steps"])]

    def write(self, block: int, projections: Sequence[Projection], steps: Sequence[RefitStep]) -> None:
        """Store the projections of a finished block."""
        metadata = {"steps": json.dumps([step.model_dump() for step in steps])}
        write_tensors(self._path(block), _parameters(projections), metadata)


def _parameters(projections: Sequence[Projection]) -> dict[str, Tensor]:
    return {
        f"{projection.write.output_layer}.{name}": parameter
        for projection in projections
        for name, parameter in projection.layer.named_parameters()
    }
