"""Structure of a model: its sites, pairs of sites, blocks, and the path from the last level to the logits.

A site names a point in the network where hidden states can be captured or patched:

    5             level 5: the output of block 5 (0: the input of block 1; L: the output of the last block)
    5.attn.in     the input of attention in block 5       5.attn.out   what attention adds to the residual stream
    5.ln1.in …    likewise ln1, ln2 and ffn               5.mid        the stream after attention is added
    5.heads       the attention heads' outputs, side by   5.attn_raw   attention's output before its post-norm
                  side: the output projection's input     5.ffn_raw    likewise of the feed-forward
    5.xattn.in …  cross-attention and its norm lnx        5.mid2       the stream after cross-attention is added
    5.mixer.in …  a mixer of positions without softmax:   5.moe.router the scores of the experts
                  state space, linear attention, …        5.moe.out    the output of the experts
    final         the input of the unembedding

Level l is `blocks.{l-1}.hook_resid_post` in TransformerLens and `hidden_states[l]` in Hugging Face (but level L is
before the final norm); `5.mid` is `hook_resid_mid`, `5.attn.out` `hook_attn_out`, `5.ffn.out` `hook_mlp_out`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from layerjump.errors import BadEstimator, BadModel, NoPredictions, NoSuchJump, argument

if TYPE_CHECKING:
    from layerjump.models.model import Model

Side = Literal["in", "out"]
BLOCK_PARTS = (
    *("ln1.in", "ln1.out", "attn.in", "heads", "attn_raw", "attn.out", "mixer.in", "mixer_raw", "mixer.out", "mid"),
    *("lnx.in", "lnx.out", "xattn.in", "xattn_raw", "xattn.out", "mid2"),
    *("ln2.in", "ln2.out", "ffn.in", "moe.router", "moe.out", "ffn_raw", "ffn.out"),
)
"""The parts that blocks commonly have, in the order of computation."""
_PART = re.compile(
    r"(ln1|ln2|lnx|ln_\w+|(attn|mixer|xattn|ffn|aside)\d*)\.(in|out)|(attn|mixer|xattn|ffn|aside)\d*_raw|mid\d*|"
    r"heads\d*|moe\.(router|out)"
)


@dataclass(frozen=True, order=True)
class Site:
    """A level, a part of block `index` (blocks count from 1), or `final`."""

    index: int
    part: str = "level"

    def __str__(self) -> str:
        if self.part == "final":
            return "final"
        return str(self.index) if self.part == "level" else f"{self.index}.{self.part}"

    @property
    def between_blocks(self) -> bool:
        """Whether this is a level or `final`, not a part of a block."""
        return self.part in ("level", "final")

    @classmethod
    def parse(cls, text: str | int | Site) -> Site:
        """Parse a site's name, such as `5`, `5.attn.in` or `final`."""
        if isinstance(text, Site):
            return text
        name = str(text).strip()
        if name == "final":
            return FINAL
        index, _, part = name.partition(".")
        if index.isdecimal() and (not part or _PART.fullmatch(part)):
            return cls(int(index), part or "level")
        raise BadModel(
            f"expected a site, which is a level (5), a part of a block (5.attn.in; parts: {', '.join(BLOCK_PARTS)}) "
            f"or final, got {name[:50]!r}"
        )


FINAL = Site(-1, "final")


Layout = Literal["btd", "tbd", "btnd", "nbtd"]
"""Order of rows (b), positions (t), streams (n) and coordinates (d) in the hidden states as the model holds them."""
Task = Literal["causal", "masked", "seq2seq", "encoder", "classification"]
"""`encoder` is the encoder of an encoder–decoder by itself; `classification` predicts labels instead of tokens."""
Pooled = Literal["first", "last"]
"""The one position of a text whose state a classification head reads."""
Degree = Literal["full", "levels", "states"]
"""Levels, predictions and parts are proven; levels and predictions; levels, and no linear head predicts."""
Constant = float | str | Tensor
"""A number, the name of a parameter or buffer, or a tensor computed from several."""


@dataclass(frozen=True)
class Tap:
    """A module's input or output at its `call`-th call in a forward pass.

    A module is called once, except where blocks share weights (ALBERT): there the call identifies the block.
    """

    module: nn.Module
    side: Side
    call: int = 0
    layout: Layout = field(default="btd", compare=False)


@dataclass(frozen=True)
class Point:
    """A tap by the path of its module."""

    path: str
    side: Side
    call: int = 0
    layout: Layout = "btd"
    width: int = 0
    """Coordinates of a state there."""


@dataclass(frozen=True)
class Step:
    """One step of the residual stream through a block."""

    kind: Literal["add", "mul", "shift", "norm"]
    name: str = ""
    """add: the write whose output is added; norm: the path of the module that the stream passes."""
    factor: Constant = 1.0
    """add, mul: the factor of the addend, of the stream; shift: the constant that is added."""


@dataclass(frozen=True)
class Write:
    """What one part of a block adds to the residual stream."""

    name: str
    """The role, numbered from the second of its kind: attn, mixer, xattn, ffn, aside, ffn2 …"""
    role: str
    phase: int
    """Writes of one phase read the same stream: attention and feed-forward of a parallel block have one."""
    steps_before: int
    """The number of the block's steps that lead to the stream that it reads."""
    norm: str | None
    """The name of the norm before the part, or of the one that the stream passes after it."""
    norm_first: bool
    """Whether that norm is before the part."""
    is_normed_after: bool
    """Whether a norm follows the part, before or after its output is added."""
    factor: Constant = 1.0
    """Multiplies the part's output when it is added (Granite's residual multiplier, a layer scale)."""
    output_layer: str | None = None
    """Path of the linear layer whose output the part is; None if there is none."""
    linear_readers: tuple[str, ...] | None = None
    """Paths of the linear layers that read the norm; None if anything else reads it."""
    reads_aside: bool = False
    """Whether the part reads activations besides the stream."""
    is_routed: bool = False
    """Whether a router selects experts (MoE)."""


@dataclass(frozen=True)
class BlockAnatomy:
    """One block: its module, the way of the stream through it, and its parts."""

    path: str
    call: int = 0
    steps: tuple[Step, ...] = ()
    writes: tuple[Write, ...] = ()
    points: tuple[tuple[str, Point], ...] = ()
    """Part (`attn.in`) → where it is."""
    mids: tuple[tuple[str, int], ...] = ()
    """Name of the stream inside the block → the number of steps before it."""
    problem: str | None = None
    """Why the parts of the block are unknown."""


@dataclass(frozen=True)
class ModuleStep:
    """A module on the path to the logits."""

    path: str


@dataclass(frozen=True)
class Operation:
    """An operation on the path to the logits whose other operands are constants."""

    @dataclass(frozen=True)
    class Weight:
        """A parameter or buffer by its name: a model that moves to another device gets new ones."""

        name: str

    STATES: ClassVar[object] = object()
    """Stands for the states among the operands."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    @property
    def is_elementwise(self) -> bool:
        """Whether the operation treats every coordinate alike, whatever the shape of the states."""
        return self.name in _ELEMENTWISE and not any(
            isinstance(item, (Tensor, Operation.Weight)) for item in self.operands
        )

    @property
    def is_rowwise(self) -> bool:
        """Whether the operation may be applied to rows of states, (n, d)."""
        return self.name in _ELEMENTWISE

    @property
    def operands(self) -> tuple[Any, ...]:
        return (*self.args, *(value for _, value in self.kwargs))


_ARITHMETIC = {"add", "radd", "iadd", "sub", "mul", "rmul", "imul", "div", "truediv", "itruediv", "true_divide"}
_ACTIVATIONS = {"tanh", "tanh_", "gelu", "relu", "silu", "sigmoid", "softplus"}
_CASTS = {"float", "to", "type", "dropout", "contiguous", "clone", "bfloat16", "half", "double"}
_ELEMENTWISE = frozenset(_ARITHMETIC | _ACTIVATIONS | _CASTS)


@dataclass(frozen=True, eq=False)
class Replay:
    """Operations on the path to the logits that do not follow one another; they are run again as they were traced."""

    start: tuple[int, int]
    end: tuple[int, int]
    nodes: tuple[Any, ...]
    tensors: dict[tuple[int, int], Tensor]
    rows: int
    positions: int

    def __call__(self, states: Tensor) -> Tensor:
        """Run the operations on states (rows, positions, …)."""
        values: dict[tuple[int, int], Tensor] = {self.start: states}
        for node in self.nodes:
            operands = iter(node.inputs)

            def operand(item: Any, operands: Iterator[tuple[int, int]] = operands) -> Any:
                if isinstance(item, Tensor):
                    value = next(operands)
                    return values.get(value, self.tensors[value])
                if isinstance(item, dict):
                    return {name: operand(entry) for name, entry in item.items()}
                return type(item)(operand(entry) for entry in item) if isinstance(item, (list, tuple)) else item

            args, kwargs = operand(node.args), operand(node.kwargs)
            if node.name in ("view", "reshape", "expand"):
                # Sizes that were read off the traced batch.
                sizes = list(args[1] if isinstance(args[1], (list, tuple)) else args[1:])
                if sizes[:2] == [self.rows, self.positions]:
                    sizes[:2] = states.shape[:2]
                elif sizes[:1] == [self.rows * self.positions]:
                    sizes[0] = states.shape[0] * states.shape[1]
                args = (args[0], *sizes)
            output = node.function(*args, **kwargs)
            outputs = [args[0]] if node.name == "setitem" else output if isinstance(output, (list, tuple)) else [output]
            values.update(zip(node.outputs, outputs, strict=False))
        return values[self.end]


PathStep = ModuleStep | Operation | Replay


@dataclass(frozen=True)
class Anatomy:
    """Where a model has its blocks, their parts and its path to the logits: module paths, no modules."""

    task: Task
    entry: str
    """Path of the module that reads the tokens and runs the blocks."""
    blocks: tuple[BlockAnatomy, ...]
    layout: Layout
    d_model: int
    n_streams: int = 1
    is_chain: bool = True
    """Whether each block reads the last one's output as it is."""
    is_causal: bool = True
    """Whether no state depends on a later token."""
    to_final: tuple[PathStep, ...] = ()
    unembedding: str | None = None
    unembedding_weight: str | Tensor | None = None
    """The unembedding's weight (vocabulary, width) where no module holds it: its name, or the product of several."""
    from_unembedding: tuple[PathStep, ...] = ()
    pooled: Pooled | None = None
    """The position that the logits come from; None: every position has logits of its own."""
    no_logits: str | None = None
    """Why there is no path to logits."""
    read_logits: Callable[[Any], Tensor] | None = None
    """The model's output → its logits, where an override tells."""
    notes: tuple[str, ...] = ()

    @property
    def is_portable(self) -> bool:
        """Whether it holds no tensor, so that it describes every model of this class and configuration."""
        path = (*self.to_final, *self.from_unembedding)
        operands = [item for step in path if isinstance(step, Operation) for item in step.operands]
        factors = [step.factor for block in self.blocks for step in block.steps]
        return not any(isinstance(step, Replay) for step in path) and not any(
            isinstance(item, Tensor) for item in (*operands, *factors, self.unembedding_weight)
        )


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
        return step if isinstance(step, Replay) else _BoundOperation(step, self._named)

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
        return self.adjust_logits(self.unembedding(final))

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

    def tap(self, site: Site) -> Tap:
        """The tap of a site; `BadModel` if this model does not have the site."""
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


def can_restrict(structure: Structure) -> bool:
    """Whether `unembedding_rows` of this model's unembedding give the logits of some tokens."""
    steps = structure.anatomy.from_unembedding
    return type(structure.unembedding) is nn.Linear and all(
        isinstance(step, Operation) and step.is_elementwise for step in steps
    )


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
    embedding = model.structure.unembedding.get_parameter("weight").double()
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
    weight = norm.get_parameter("weight")
    states = torch.randn(8, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    bias = getattr(norm, "bias", None)
    output = norm(states) if bias is None else norm(states) - bias
    centred = states - states.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else states
    unit = (centred / centred.pow(2).mean(-1, keepdim=True).sqrt()).double()
    factors = (output.double() * unit).sum(0) / unit.pow(2).sum(0)
    offset = round(float((factors - weight.double()).mean()))
    return weight.double() + offset


Pair = tuple[Site, Site]
"""Source and target of a jump."""

PREDICTIONS = "predictions"
"""Every level to `final`, and the last levels to level L as well: the candidates of `calibrated`."""
SUBMODULES = ("ln1", "attn", "mixer", "lnx", "xattn", "ln2", "ffn")


def parse_pairs(text: str, structure: Structure) -> list[Pair]:
    """Parse to-last, to-final, predictions, adjacent, all, submodules, or a list: `0:6,2.attn.in:2.attn.out`."""
    levels = [Site(index) for index in range(structure.n_blocks + 1)]
    if text == "to-last":
        return [(source, levels[-1]) for source in levels[:-1]]
    if text == "to-final":
        return [(source, FINAL) for source in levels[:-1]]
    if text == PREDICTIONS:
        late = levels[-1 - max(2, structure.n_blocks // 6) : -1]
        both = [(source, target) for source in late for target in (levels[-1], FINAL)]
        return [(source, FINAL) for source in levels[:-1] if source not in late] + both
    if text == "adjacent":
        return list(zip(levels, levels[1:], strict=False))
    if text == "all":
        return [(a, b) for i, a in enumerate(levels) for b in levels[i + 1 :]]
    present = set(structure.sites())
    if text == "submodules":  # input → output of every norm, attention and feed-forward module
        pairs = [
            (Site(block, f"{part}.in"), Site(block, f"{part}.out"))
            for block in range(1, structure.n_blocks + 1)
            for part in SUBMODULES
        ]
        return [pair for pair in pairs if pair[0] in present]
    pairs = []
    for item in text.split(","):
        source, colon, target = item.partition(":")
        if not colon:
            raise BadModel(
                f"expected {argument('pairs')} to-last, to-final, predictions, adjacent, all, submodules, or a list "
                f"such as 0:6,3:6, got {text!r}"
            )
        pair = Site.parse(source), Site.parse(target)
        for site in pair:
            if site not in present:
                structure.tap(site)  # raises, and names the sites of the model
        if pair[0] == pair[1]:
            raise BadModel(f"the pair {item} maps a site to itself, which is the identity; leave it out")
        pairs.append(pair)
    return list(dict.fromkeys(pairs))


def sites_of(pairs: Sequence[Pair]) -> list[Site]:
    """Return every site of the pairs once, in order."""
    return sorted({site for pair in pairs for site in pair})


def parse_pair(pair: Any) -> Pair:
    """Parse a source and a target, each a level's number, a site's name or a `Site`."""
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise NoSuchJump(f"expected a source and a target, such as jumps[3, 6], got {pair!r}")
    return Site.parse(pair[0]), Site.parse(pair[1])
