"""Anatomy of a model by module paths: its blocks, their parts and steps, and the path from level L to the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

Side = Literal["in", "out"]
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
class Point:
    """A tap by the path of its module."""

    path: str
    side: Side
    call: int = 0
    layout: Layout = "btd"
    width: int = 0
    """Coordinates of a state there."""


@dataclass(frozen=True)
class StreamStep:
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
    steps: tuple[StreamStep, ...] = ()
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
class ReplayedPath:
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


PathStep = ModuleStep | Operation | ReplayedPath


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
    """The model's output → its logits, where a hint tells."""
    notes: tuple[str, ...] = ()

    @property
    def is_portable(self) -> bool:
        """Whether it holds no tensor, so that it describes every model of this class and configuration."""
        path = (*self.to_final, *self.from_unembedding)
        operands = [item for step in path if isinstance(step, Operation) for item in step.operands]
        factors = [step.factor for block in self.blocks for step in block.steps]
        return not any(isinstance(step, ReplayedPath) for step in path) and not any(
            isinstance(item, Tensor) for item in (*operands, *factors, self.unembedding_weight)
        )
