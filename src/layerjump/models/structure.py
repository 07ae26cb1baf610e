"""Structure of one model in memory: its anatomy bound to the modules, the tap of each site, states to logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from layerjump.errors import BadEstimator, BadModel, NoPredictions
from layerjump.models.anatomy import (
    Anatomy,
    BlockAnatomy,
    Constant,
    Degree,
    Layout,
    ModuleStep,
    Operation,
    PathStep,
    ReplayedPath,
    Side,
    Task,
    Write,
)
from layerjump.models.hugging_face_config import input_embeddings
from layerjump.models.sites import BLOCK_PARTS, EMBEDDING, FINAL, JointSource, Site
from layerjump.models.weight_forms import describe_storage, execution_device, module_weight

if TYPE_CHECKING:
    from layerjump.models.model import Model


@dataclass(frozen=True)
class Tap:
    """A module's input or output at its `call`-th call in a forward pass.

    A module is called once, except where blocks share weights (ALBERT): there the call identifies the block.
    """

    module: nn.Module
    side: Side
    call: int = 0
    layout: Layout = field(default="btd", compare=False)


class Structure:
    """The modules of one Hugging Face model: its blocks, the tap of each site, the steps from level L to logits."""

    def __init__(self, hf: nn.Module, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self.hf = hf
        self.blocks: list[nn.Module] = [hf.get_submodule(block.path) for block in anatomy.blocks]
        self.n_blocks = len(self.blocks)
        self.d_model = anatomy.d_model
        self.final_steps = [self._callable(step) for step in anatomy.to_final]
        self._logits_steps = [self._callable(step) for step in anatomy.from_unembedding]
        self._unembedding = self._find_unembedding()
        self._points = [dict(block.points) for block in anatomy.blocks]
        path_steps = anatomy.to_final
        self._batched_path = anatomy.n_streams > 1 or not all(map(_is_rowwise, path_steps))
        self._batched_logits = not all(map(_is_rowwise, anatomy.from_unembedding))

    @property
    def task(self) -> Task:
        """What the model predicts."""
        return self.anatomy.task

    @property
    def degree(self) -> Degree:
        """How much of the model is known."""
        if self._unembedding is None and self.task != "encoder":
            return "states"
        return "levels" if any(block.problem for block in self.anatomy.blocks) else "full"

    @property
    def block_list(self) -> str | None:
        """Path of the list whose entries the blocks are; None where blocks share modules or are of several lists."""
        lists = {block.path.rpartition(".")[0] for block in self.anatomy.blocks}
        return lists.pop() if len(lists) == 1 and len(set(self.blocks)) == self.n_blocks else None

    @property
    def unembedding(self) -> nn.Module:
        """The linear layer whose output are the logits; `NoPredictions` if there is none."""
        if self._unembedding is None:
            raise NoPredictions(f"the model has no unembedding: {self.anatomy.no_logits or 'it is an encoder'}")
        return self._unembedding

    @unembedding.setter
    def unembedding(self, module: nn.Module) -> None:
        self._unembedding = module

    def _find_unembedding(self) -> nn.Module | None:
        if self.anatomy.unembedding is not None:
            return self.hf.get_submodule(self.anatomy.unembedding)
        if self.anatomy.unembedding_weight is None:
            return None
        weight = self.constant(self.anatomy.unembedding_weight)
        assert isinstance(weight, Tensor)
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        layer.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        return layer

    def _named(self, name: str) -> Tensor:
        path, _, attribute = name.rpartition(".")
        tensor: Tensor = getattr(self.hf.get_submodule(path), attribute)
        return tensor

    def _callable(self, step: PathStep) -> Callable[[Tensor], Tensor]:
        if isinstance(step, ModuleStep):
            return self.hf.get_submodule(step.path)
        return step if isinstance(step, ReplayedPath) else _BoundOperation(step, self._named)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, or labels, that have a logit."""
        return int(self.unembedding.get_parameter("weight").shape[0])

    def to_final(self, states: Tensor) -> Tensor:
        """From level L to the input of the unembedding."""
        if self._batched_path or self.anatomy.pooled:
            # A head that selects a position reads texts of one position each.
            rows = states.reshape(*((-1, 1) if self.anatomy.pooled else (1, -1)), states.shape[-1])
            final = self._apply(self.final_steps, from_rows(rows, self.anatomy.layout, self.anatomy.n_streams))
            return final.reshape(*states.shape[:-1], final.shape[-1])
        return self._apply(self.final_steps, states)

    def decode(self, final: Tensor) -> Tensor:
        """From the input of the unembedding to logits."""
        weight = next(self.unembedding.parameters(), final)
        # Of a model on several devices, the last norm may be elsewhere. accelerate's hooks see to offloaded weights.
        return self.adjust_logits(self.unembedding(final if weight.is_meta else final.to(weight.device)))

    def adjust_logits(self, logits: Tensor) -> Tensor:
        """The model's logits from the unembedding's output: scale, bias, soft-cap."""
        if self._batched_logits:
            adjusted = self._apply(self._logits_steps, logits.reshape(1, -1, logits.shape[-1]))
            return adjusted.reshape(*logits.shape[:-1], adjusted.shape[-1])
        return self._apply(self._logits_steps, logits)

    @staticmethod
    def _apply(steps: Sequence[Callable[[Tensor], Any]], states: Tensor) -> Tensor:
        for step in steps:
            output = step(states)
            states = output[0] if isinstance(output, tuple) else output
        return states

    def sites(self) -> list[Site]:
        """Every site of this model."""
        sites = [Site(level) for level in range(self.n_blocks + 1)]
        for block, points in enumerate(self._points, start=1):
            sites += [Site(block, part) for part in sorted(points, key=_part_order)]
        return sites if self._unembedding is None else [*sites, FINAL]

    @property
    def token_embedding(self) -> nn.Module:
        """The module that turns tokens into states; `BadModel` if the model does not name it."""
        module = input_embeddings(self.module(self.anatomy.entry)) or input_embeddings(self.hf)
        if module is None:
            raise BadModel("this model does not name its token embedding, so it has no site embedding")
        return module

    def embed(self, tokens: Tensor) -> Tensor:
        """The states at the site `embedding`: (…) tokens to (…, width)."""
        module = self.token_embedding
        states: Tensor = module(tokens.to(execution_device(module)))
        return states

    def check_site(self, site: Site) -> None:
        """Raise `BadModel` if this model does not have a site."""
        if site == EMBEDDING:
            self.token_embedding  # noqa: B018  (raises)
        else:
            self.tap(site)

    def tap(self, site: Site) -> Tap:
        """The tap of a site; `BadModel` if this model does not have the site."""
        if site == EMBEDDING or isinstance(site, JointSource):
            raise BadModel(f"expected a point of the forward pass, got {site}, which only a jump can start from")
        if site == FINAL:
            if self.task == "encoder":
                raise BadModel("the encoder of an encoder–decoder has no unembedding, so no site final")
            return Tap(self.unembedding, "in")
        layout = self.anatomy.layout
        if site.part == "level":
            if site.index > self.n_blocks:
                raise BadModel(f"expected one of levels 0 to {self.n_blocks}, got {site.index}")
            block = self.anatomy.blocks[max(site.index - 1, 0)]
            return Tap(self.blocks[max(site.index - 1, 0)], "out" if site.index else "in", block.call, layout)
        if not 1 <= site.index <= self.n_blocks or site.part not in self._points[site.index - 1]:
            raise BadModel(self._no_such_site(site))
        point = self._points[site.index - 1][site.part]
        return Tap(self.hf.get_submodule(point.path), point.side, point.call, point.layout)

    def width(self, site: Site) -> int:
        """The width of the states at a site."""
        if isinstance(site, JointSource):
            return sum(self.width(term.site) for term in site.terms)
        if site == EMBEDDING:
            return int(self.token_embedding.get_parameter("weight").shape[1])
        if site == FINAL:
            return int(self.unembedding.get_parameter("weight").shape[1])
        return self.d_model if site.part == "level" else self._points[site.index - 1][site.part].width

    def _no_such_site(self, site: Site) -> str:
        if 1 <= site.index <= self.n_blocks and (problem := self.anatomy.blocks[site.index - 1].problem):
            return f"this model has no site {site}: {problem}, so only its levels are known"
        parts = sorted({part for points in self._points for part in points}, key=_part_order)
        return f"this model has no site {site}: its blocks are 1 to {self.n_blocks}, with {', '.join(parts)}"

    def writes(self, block: int) -> tuple[Write, ...]:
        """The residual writes of a block, counted from 1, in order."""
        return self.anatomy.blocks[block - 1].writes

    def constant(self, constant: Constant) -> Tensor | float:
        """The value of a factor or shift."""
        return self._named(constant) if isinstance(constant, str) else constant

    def module(self, path: str) -> nn.Module:
        """The module at a path of the model."""
        return self.hf.get_submodule(path)


@dataclass(frozen=True)
class _BoundOperation:
    """An operation whose weights are looked up at every call."""

    operation: Operation
    look_up: Callable[[str], Tensor]

    def __call__(self, states: Tensor) -> Tensor:
        def operand(item: Any) -> Any:
            if item is Operation.STATES:
                return states
            if isinstance(item, Operation.Weight):
                return self.look_up(item.name)
            return item

        if self.operation.name == "setitem":
            states = states.clone()
        args = [operand(item) for item in self.operation.args]
        result: Tensor = self.operation.function(*args, **{n: operand(v) for n, v in self.operation.kwargs})
        return states if self.operation.name == "setitem" else result


def _is_rowwise(step: PathStep) -> bool:
    return isinstance(step, ModuleStep) or (isinstance(step, Operation) and step.is_rowwise)


def _part_order(part: str) -> tuple[int, str]:
    return BLOCK_PARTS.index(part) if part in BLOCK_PARTS else len(BLOCK_PARTS), part


def to_rows(states: Tensor, layout: Layout) -> Tensor:
    """Hidden states as (rows, positions, width), or (rows · positions, width) where the model holds them so."""
    if layout == "tbd":
        return states.transpose(0, 1)
    if layout == "btnd":
        return states.flatten(2)
    return states.permute(1, 2, 0, 3).flatten(2) if layout == "nbtd" else states


def n_streams(states: Tensor, layout: Layout) -> int:
    """The number of residual streams in hidden states as the model holds them."""
    return states.shape[2] if layout == "btnd" else states.shape[0] if layout == "nbtd" else 1


def from_rows(states: Tensor, layout: Layout, n_streams: int) -> Tensor:
    """The inverse of `to_rows`."""
    if layout == "tbd":
        return states.transpose(0, 1)
    if layout == "btnd":
        return states.unflatten(2, (n_streams, -1))
    return states.unflatten(2, (n_streams, -1)).permute(2, 0, 1, 3) if layout == "nbtd" else states


def rebuild_streams(structure: Structure, block: int, states: dict[Site, Tensor]) -> list[Tensor]:
    """The stream before a block's first step and after each, added up from its captured parts."""
    stream, steps = states[Site(block - 1)], structure.anatomy.blocks[block - 1].steps
    written = (states[Site(block, f"{step.name}.out")] for step in steps if step.kind == "add")
    streams = [stream.to(next(written, stream).device)]  # the block before may be on another device
    for step in steps:
        stream, factor = streams[-1], structure.constant(step.factor)
        if step.kind == "add":
            stream = stream + states[Site(block, f"{step.name}.out")].reshape(stream.shape) * factor
        elif step.kind == "mul":
            stream = stream * factor
        elif step.kind == "shift":
            stream = stream + factor
        else:
            stream = structure.module(step.name)(stream)
        streams.append(stream)
    return streams


def can_restrict(structure: Structure) -> bool:
    """Whether `unembedding_rows` of this model's unembedding give the logits of some tokens."""
    steps = structure.anatomy.from_unembedding
    is_plain = type(structure.unembedding) is nn.Linear and describe_storage(structure.unembedding.weight) is None
    return is_plain and all(isinstance(step, Operation) and step.is_elementwise for step in steps)


def without_parts(structure: Structure, problem: str) -> Structure:
    """The same structure of levels alone, with the reason why the parts of its blocks are left out."""
    anatomy = structure.anatomy
    blocks = tuple(BlockAnatomy(block.path, block.call, problem=problem) for block in anatomy.blocks)
    return Structure(structure.hf, replace(anatomy, blocks=blocks))


def as_a_whole(structure: Structure) -> Structure:
    """The same structure, but the whole model runs for its levels, not an inner module."""
    return Structure(structure.hf, replace(structure.anatomy, entry=""))


def with_unembedding(structure: Structure, unembedding: nn.Linear) -> Structure:
    """The same structure with another unembedding."""
    changed = copy(structure)
    changed.unembedding = unembedding
    return changed


def unembedding_rows(unembedding: nn.Linear, tokens: Tensor) -> nn.Linear:
    """An unembedding of these tokens only, in their order: fewer rows are a cheaper product."""
    rows = tokens.to(unembedding.weight.device)
    has_bias = unembedding.bias is not None
    short = nn.Linear(unembedding.in_features, len(rows), bias=has_bias, device="meta")
    short.weight = nn.Parameter(unembedding.weight.detach()[rows], requires_grad=False)
    if has_bias:
        short.bias = nn.Parameter(unembedding.bias.detach()[rows], requires_grad=False)
    return short


@torch.no_grad()
def unembedding_metric(model: Model, target: Site) -> Tensor:
    """EᵀE of the vocabulary-centred unembedding E; at level L, through the final norm's weight: diag(w) EᵀE diag(w).

    It measures the errors of a state that change logits. A shift of all logits changes no probability, hence the
    centring. The norm's division by the length is left out: it is the same for every coordinate.
    """
    embedding = module_weight(model.structure.unembedding).double()
    embedding = embedding - embedding.mean(0)
    metric = embedding.mT @ embedding
    if target == FINAL:
        return metric
    weight = norm_weight(model)
    if target != Site(model.n_blocks) or weight is None:
        raise BadEstimator(
            f"expected final, or the last level of a model with one final norm, as the target of the unembedding's "
            f"metric, got {target}"
        )
    return weight[:, None] * metric * weight


def norm_weight(model: Model) -> Tensor | None:
    """The final norm's scale of each coordinate; None unless a single norm precedes the unembedding."""
    steps = model.structure.final_steps
    if len(steps) != 1 or not isinstance(steps[0], nn.Module) or not hasattr(steps[0], "weight"):
        return None
    weight = steps[0].get_parameter("weight")
    return norm_factors(steps[0]) if weight.dim() == 1 else None


@torch.no_grad()
def norm_factors(norm: nn.Module) -> Tensor:
    """The factor of each coordinate that a norm applies, in float64: its weight, or one plus its weight (Gemma)."""
    weight = module_weight(norm)
    states = torch.randn(8, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    bias = getattr(norm, "bias", None)
    output = norm(states) if bias is None else norm(states) - bias
    centred = states - states.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else states
    unit = (centred / centred.pow(2).mean(-1, keepdim=True).sqrt()).double()
    factors = (output.double() * unit).sum(0) / unit.pow(2).sum(0)
    offset = round(float((factors - weight.double()).mean()))
    return weight.double() + offset
