"""Trace of one forward pass: every operation on tensors and every call of a module, and the values they read and write.

    trace = Trace(hf, lambda: hf(input_ids), [input_ids])
    trace.calls                    # module calls in the order in which they began
    trace.node(value)              # the operation that wrote a value

A value is a tensor at one moment: the identity of the tensor and the operation that wrote it last, so that operations
in place make new values. Values that depend on the input tokens are `dynamic`; masks, positions and weights are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

Value = tuple[int, int]
"""(id of a tensor, index of the node that wrote it; −1 if no node did)."""
_VIEWS = {
    "view",
    "reshape",
    "flatten",
    "squeeze",
    "unsqueeze",
    "transpose",
    "permute",
    "expand",
    "view_as",
    "reshape_as",
}
_COPIES = {"to", "contiguous", "clone", "dropout", "float", "type", "type_as", "detach", "bfloat16", "half", "double"}
PASSED_ON = frozenset(_VIEWS | _COPIES | {"getitem", "alias"})
"""Operations that may hand on a tensor's numbers unchanged."""


@dataclass(frozen=True)
class Node:
    """One operation."""

    function: Callable[..., Any] | None
    """None for an operation that the trace could not see, such as a scripted function or a custom kernel."""
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    is_dynamic: bool


@dataclass(eq=False)
class ModuleCall:
    """One call of a module."""

    module: nn.Module
    path: str
    index: int
    """How many calls of the module came before in the pass."""
    parent: ModuleCall | None
    start: int
    """Number of nodes before the call."""
    inputs: list[Value]
    number: int
    """Number of calls that began before."""
    outputs: list[Value] = field(default_factory=list)
    raw_outputs: list[Value] = field(default_factory=list)
    """The outputs before hooks that were on the module, such as attached maps, changed them."""
    end: int = -1
    last: int = -1
    """Number of the last call that began before this one ended."""

    def contains(self, other: ModuleCall) -> bool:
        """Whether the other call was made, directly or not, by this one."""
        return self.number < other.number <= self.last


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor inside the arguments or the result of a call, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


class Trace(TorchFunctionMode):
    """The graph of one forward pass of `run`, a function of no arguments that calls the model."""

    def __init__(self, model: nn.Module, run: Callable[[], Any], dynamic: Sequence[Tensor]) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.calls: list[ModuleCall] = []
        self.tensors: dict[Value, Tensor] = {}
        """Every value's tensor. They stay alive, so that no identity is used twice."""
        self.edges: dict[Value, GradientEdge] = {}
        self._last_node: dict[int, int] = {}
        self._open: list[ModuleCall] = []
        self._n_calls: dict[nn.Module, int] = defaultdict(int)
        # Of several names of a shared module, the first.
        self._paths = {module: path for path, module in reversed(list(model.named_modules(remove_duplicate=False)))}
        self.dynamic = {self.value(tensor) for tensor in dynamic}
        self._known = {id(tensor) for tensor in (*model.parameters(), *model.buffers(), *dynamic)}
        self.names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        """Identity of a parameter or buffer → its name."""
        with self._hooks(), torch.enable_grad(), self:
            self.output = run()
        self.calls_writing: dict[Value, list[ModuleCall]] = defaultdict(list)
        """Value → the calls that return it, outermost first."""
        self.calls_reading: dict[Value, list[ModuleCall]] = defaultdict(list)
        """Value → the calls whose main input it is, in order."""
        self.readers: dict[Value, list[int]] = defaultdict(list)
        """Value → the indices of the nodes that read it."""
        for call in self.calls:
            for value in dict.fromkeys(call.outputs):
                self.calls_writing[value].append(call)
            if (main := self.main(call.inputs)) is not None:
                self.calls_reading[main].append(call)
        for index, node in enumerate(self.nodes):
            for value in dict.fromkeys(node.inputs):
                self.readers[value].append(index)

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        handles: list[Any] = []
        try:
            for module in self._paths:
                handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                handles.append(module.register_forward_hook(self._see_raw, with_kwargs=True, prepend=True))
                handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
                if isinstance(module, nn.Embedding):
                    # Frozen or quantised weights record no gradients by themselves.
                    handles.append(module.register_forward_hook(_require_gradient, prepend=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def value(self, tensor: Tensor) -> Value:
        """The tensor's present value."""
        value = (id(tensor), self._last_node.get(id(tensor), -1))
        if value not in self.tensors:
            self.tensors[value] = tensor
            if tensor.grad_fn is not None:
                self.edges[value] = get_gradient_edge(tensor)
        return value

    def node(self, value: Value) -> Node | None:
        """The operation that wrote a value; None for inputs and weights."""
        return self.nodes[value[1]] if value[1] >= 0 else None

    def calls_in(self, call: ModuleCall) -> list[ModuleCall]:
        """The calls that a call made, directly or not."""
        return self.calls[call.number + 1 : call.last + 1]

    def main(self, values: Sequence[Value]) -> Value | None:
        """The first value that can be hidden states: floating-point, dynamic, of two dimensions or more."""
        for value in values:
            tensor = self.tensors[value]
            if value in self.dynamic and tensor.is_floating_point() and tensor.dim() >= 2:
                return value
        return None

    def source(self, value: Value) -> Value:
        """The value that a chain of operations without arithmetic (views, casts, copies) handed on."""
        while (node := self.node(value)) is not None and node.name in PASSED_ON:
            if self.tensors[node.inputs[0]].numel() != self.tensors[value].numel():
                break
            value = node.inputs[0]
        return value

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        operands = tensors_in((args, kwargs))
        inputs = [self.value(tensor) for tensor in operands]
        # A tensor that no traced operation wrote and that is not a weight: the output of a kernel.
        self.dynamic.update(value for value in inputs if value[1] < 0 and value[0] not in self._known)
        output = func(*args, **kwargs)
        results = [args[0]] if name == "__setitem__" else tensors_in(output)
        in_place = name.startswith(("__i", "__setitem")) or (name.endswith("_") and not name.endswith("__"))
        if results and (in_place or not all(any(result is tensor for tensor in operands) for result in results)):
            self._record(func, name.strip("_"), args, kwargs, results, inputs)
        return output

    def _record(
        self,
        function: Callable[..., Any] | None,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: Sequence[Tensor],
        inputs: Sequence[Value],
    ) -> None:
        # `expand_as` and its like read only the shape of their second operand.
        carrying = inputs[:1] if name.endswith("_as") else inputs
        is_dynamic = any(value in self.dynamic for value in carrying)
        for tensor in results:
            self._last_node[id(tensor)] = len(self.nodes)
        outputs = tuple(self.value(tensor) for tensor in results)
        if is_dynamic:
            self.dynamic.update(outputs)
        self.nodes.append(Node(function, name, args, kwargs, tuple(inputs), outputs, is_dynamic))

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = [self.value(tensor) for tensor in tensors_in((args, kwargs))]
        parent = self._open[-1] if self._open else None
        n_nodes, n_calls = len(self.nodes), len(self.calls)
        call = ModuleCall(module, self._paths[module], self._n_calls[module], parent, n_nodes, inputs, n_calls)
        self._n_calls[module] += 1
        self._open.append(call)
        self.calls.append(call)

    def _see_raw(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = self._open[-1]
        self._record_unseen(call, output)
        call.raw_outputs = [self.value(tensor) for tensor in tensors_in(output)]

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = self._open.pop()
        self._record_unseen(call, output)
        call.outputs, call.end = [self.value(tensor) for tensor in tensors_in(output)], len(self.nodes)
        call.last = len(self.calls) - 1

    def _record_unseen(self, call: ModuleCall, output: Any) -> None:
        """Record outputs that no operation in sight wrote, such as those of a scripted function."""
        read = {value[0] for value in call.inputs}
        unseen = [
            tensor
            for tensor in tensors_in(output)
            if id(tensor) not in self._last_node and id(tensor) not in self._known and id(tensor) not in read
        ]
        if unseen:
            self._record(None, "unseen", (), {}, unseen, call.inputs)


def _require_gradient(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if isinstance(output, Tensor) and output.is_floating_point() and not output.requires_grad:
        return output.detach().requires_grad_() * 1
    return None
