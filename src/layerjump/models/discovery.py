"""Find the structure of any model by running it once on a few tokens, without a table of families.

One forward pass is traced: every operation on tensors and every call of a module (`operation_graph.py`). From the
trace follow

    stack    the longest chain of module calls in which each hands its output to the next: levels 0 to L
    path     the modules and operations that lead from level L to the logits
    parts    back from a block's output to its input along sums, constant factors and norms: what is added on the way
             are the residual writes; each is named by its role and by the module that computes it

Names of modules decide nothing. The self-check (`self_check.py`) then proves the result on other tokens.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from layerjump.errors import BadModel, NoPredictions, UnsupportedModel, one_line
from layerjump.models.anatomy import (
    Anatomy,
    BlockAnatomy,
    Constant,
    Layout,
    ModuleStep,
    Operation,
    PathStep,
    Point,
    Pooled,
    ReplayedPath,
    StreamStep,
    Task,
    Write,
)
from layerjump.models.hugging_face_config import example_tokens, forward_arguments, task_of
from layerjump.models.operation_graph import PASSED_ON, ModuleCall, Node, Trace, Value
from layerjump.models.structure import Structure, from_rows, n_streams, to_rows
from layerjump.models.weight_forms import execution_device, is_offloaded, quantized_weights, small_stand_ins

_ADD, _SUBTRACT = {"add", "radd", "iadd", "add_"}, {"sub", "isub", "subtract"}
_MULTIPLY, _DIVIDE = {"mul", "rmul", "imul", "multiply"}, {"div", "truediv", "itruediv", "divide", "true_divide"}
_ATTENTION = {"softmax", "scaled_dot_product_attention", "flex_attention", "multi_head_attention_forward"}
_ROUTING = {"topk"}
_ROWS, _LENGTH = 2, 9


ExtraInputs = Callable[[Tensor], Mapping[str, Any]]
"""Token ids → further arguments of the model's `forward`, such as the pixels of an image."""


@dataclass(frozen=True)
class StructureHints:
    """What discovery cannot find by itself; every field is optional."""

    task: Task | None = None
    """What the model predicts, where its class does not tell."""
    blocks: str | None = None
    """Path of the list of blocks, where discovery takes another chain of modules for the blocks."""
    logits: Callable[[Any], Tensor] | None = None
    """The model's output → its logits, where they are not `output.logits`, the output itself or its first entry."""


HINTS: dict[str, StructureHints] = {}
"""Model type → its hints."""


def discover(
    hf: nn.Module,
    *,
    encoder: bool = False,
    extra_inputs: ExtraInputs | None = None,
    hints: StructureHints | None = None,
) -> Structure:
    """Find the blocks, sites and path to the logits of a model; `UnsupportedModel` says what is missing.

    With `encoder`, the structure of the encoder of an encoder–decoder. `extra_inputs` are for a model that does not
    run on tokens alone, `hints` for one whose structure discovery misses.
    """
    hints = hints or HINTS.get(getattr(getattr(hf, "config", None), "model_type", ""), StructureHints())
    task = hints.task or task_of(hf)
    if task == "seq2seq" and type(hf).__name__.endswith("ForSequenceClassification"):
        raise UnsupportedModel(
            f"expected a classification head on one stack of blocks, got {type(hf).__name__}, whose encoder and "
            f"decoder both read the text; wrap the checkpoint's language model or bare encoder instead"
        )
    if encoder and task != "seq2seq":
        raise UnsupportedModel("expected an encoder–decoder, got a model that has no encoder next to its decoder")
    key = _cache_key(hf, task, encoder) if hints == StructureHints() else None
    anatomy = _CACHE.get(key) if key else None
    if anatomy is None:
        with small_stand_ins(hf) if is_offloaded(hf) else nullcontext():
            anatomy = _trace_and_read(hf, task, encoder, extra_inputs, hints)
        if is_offloaded(hf) and not anatomy.is_portable:
            raise UnsupportedModel(
                f"expected a {type(hf).__name__} in memory, got offloaded weights, values of which are part of its "
                f"structure; load it without offloading"
            )
        if key and anatomy.is_portable:
            _CACHE[key] = anatomy
    return Structure(hf, anatomy)


_CACHE: dict[tuple[type, str], Anatomy] = {}
"""(class, configuration and shape) → anatomy, of models whose anatomy holds no tensor of its own."""


def _cache_key(hf: nn.Module, task: Task, encoder: bool) -> tuple[type, str] | None:
    config = getattr(hf, "config", None)
    if config is None or not hasattr(config, "to_json_string"):
        return None
    # Maps attached to a model, or blocks that were taken out, change what the configuration does not tell.
    modules = [f"{path}:{type(module).__name__}" for path, module in hf.named_modules()]
    return type(hf), f"{task} {encoder} {config.to_json_string()} {modules}"


def _trace_and_read(
    hf: nn.Module, task: Task, encoder: bool, extra_inputs: ExtraInputs | None, hints: StructureHints
) -> Anatomy:
    device = execution_device(hf)
    length = _LENGTH
    ids = example_tokens(hf, _ROWS, length).to(device)
    source = example_tokens(hf, _ROWS, length - 2, seed=1).to(device) if task == "seq2seq" else None
    mask = torch.ones_like(ids)
    source_mask = None if source is None else torch.ones_like(source)
    extra = {} if extra_inputs is None else extra_inputs(ids if source is None else source)
    arguments = forward_arguments(hf, task, ids, mask, source, source_mask, **extra)
    in_training = [module for module in hf.modules() if module.training]
    hf.eval()
    try:
        trace = Trace(hf, lambda: hf(**arguments), [ids] if source is None else [ids, source])
    except Exception as error:  # a model that loads may still not run
        name = getattr(getattr(hf, "config", None), "name_or_path", "") or type(hf).__name__
        cause = (
            f"its quantised layers do not run on {device.type}: load it unquantised, or in another format"
            if quantized_weights(hf)
            else "its configuration and its weights do not belong together, or it needs more than tokens: "
            "Model.wrap(…, extra_inputs=…)"
        )
        raise BadModel(f"{name} loads, but does not run: {type(error).__name__}: {one_line(error)}; {cause}") from error
    finally:
        for module in in_training:
            module.training = True
    reader = _Reader(hf, trace, task, hints)
    anatomy = reader.encoder() if encoder else reader.decoder(ids)
    # An inner module would not take the further arguments.
    entry = anatomy.entry if extra_inputs is None else ""
    return replace(anatomy, entry=entry, read_logits=hints.logits)


@dataclass(frozen=True)
class _Stack:
    """Calls of blocks, each of which hands its output to the next."""

    calls: list[ModuleCall]
    is_chain: bool
    """Whether each block's input is the last one's output and nothing else."""

    @property
    def weight(self) -> int:
        modules = {call.module for call in self.calls}
        return sum(parameter.numel() for module in modules for parameter in module.parameters())


class _Reader:
    """Reads the structure off a trace."""

    def __init__(self, hf: nn.Module, trace: Trace, task: Task, hints: StructureHints) -> None:
        self.hf, self.trace, self.task, self.hints = hf, trace, task, hints
        self._down: dict[Value, set[Value]] = {}
        self._norms: dict[nn.Module, bool] = {}
        self._linear: dict[nn.Module, bool] = {}
        self._pooled: Pooled | None = None

    # --- stacks -------------------------------------------------------------------------------------------------

    def decoder(self, ids: Tensor) -> Anatomy:
        """The anatomy of the stack that leads to the logits, or to the last hidden states of a model without any."""
        trace = self.trace
        stacks = self._stacks()
        if (path := self.hints.blocks) is not None:
            stacks = [stack for stack in stacks if stack.calls[0].path.startswith(f"{path}.")]
        output = (self.hints.logits or main_output)(trace.output)
        if output is None:
            raise UnsupportedModel("expected a model that returns logits or hidden states, got neither")
        target = trace.value(output)
        leading = [stack for stack in stacks if self._reaches(stack.calls[-1], target)]
        if not leading:
            raise UnsupportedModel("no chain of blocks leads to the model's output")
        # The logits of a whole text have no positions.
        tokens = ids if self.task == "classification" else output
        aligned = [stack for stack in leading if self._layout(stack, tokens)] or leading
        largest = max(stack.weight for stack in aligned)
        stack = next(stack for stack in reversed(aligned) if stack.weight >= 0.3 * largest)
        layout = self._layout(stack, tokens)
        if layout is None:
            shape = tuple(trace.tensors[self._out(stack.calls[-1])].shape)
            raise UnsupportedModel(
                f"expected hidden states of (rows, positions, …), got {shape} for {tuple(tokens.shape[:2])} tokens"
            )
        anatomy = self._anatomy(stack, layout, target, self._entry(stack, trace.value(ids)))
        self._require_positions(stack, anatomy, output)
        return anatomy

    def _require_positions(self, stack: _Stack, anatomy: Anatomy, output: Tensor) -> None:
        """Raise `UnsupportedModel` if the states have more positions than the text, and not just padding after it."""
        states = to_rows(self.trace.tensors[self._out(stack.calls[-1])], anatomy.layout).detach()
        if self.task == "classification" or states.dim() != 3 or states.shape[1] == output.shape[1]:
            return
        structure = Structure(self.hf, anatomy)
        with suppress(RuntimeError, NoPredictions), torch.no_grad():
            logits = structure.decode(structure.to_final(states[:, : output.shape[1]]))
            if logits.shape == output.shape and torch.allclose(logits, output, rtol=1e-3, atol=1e-3):
                return
        raise UnsupportedModel(
            f"expected hidden states of one position a token, got {states.shape[1]} for {output.shape[1]} tokens"
        )

    def encoder(self) -> Anatomy:
        """The anatomy of the encoder of an encoder–decoder; it has no path to logits."""
        encoder = getattr(self.hf, "get_encoder", lambda: None)()
        root = next((call for call in self.trace.calls if call.module is encoder), None)
        stacks = [stack for stack in self._stacks() if root is not None and root.contains(stack.calls[0])]
        if root is None or not stacks:
            raise UnsupportedModel("the encoder has no chain of blocks")
        stack = max(stacks, key=lambda stack: stack.weight)
        shape = self.trace.tensors[root.inputs[0]]
        layout = self._layout(stack, shape[..., None] if shape.dim() == 2 else shape)
        if layout is None:
            raise UnsupportedModel("the encoder's hidden states are not (rows, positions, width)")
        anatomy = self._anatomy(stack, layout, None, root.path)
        return replace(anatomy, task="encoder")

    def _stacks(self) -> list[_Stack]:
        """Chains of blocks that stand in no other chain, in the order in which they end."""
        trace = self.trace
        groups: dict[tuple[ModuleCall | None, str], list[ModuleCall]] = defaultdict(list)
        of_parent: dict[ModuleCall | None, list[ModuleCall]] = defaultdict(list)
        for call in trace.calls:
            outer, _, index = call.path.rpartition(".")
            before, after = trace.main(call.inputs), trace.main(call.outputs)
            if not index.isdigit() or before is None or after is None:
                continue
            if (
                trace.tensors[before].shape != trace.tensors[after].shape
                or next(call.module.parameters(), None) is None
            ):
                continue
            groups[call.parent, outer].append(call)
            of_parent[call.parent].append(call)
        for parent, calls in of_parent.items():
            # Several lists whose entries take turns are one chain.
            if len({call.path.rpartition(".")[0] for call in calls}) > 1 and self._is_chain(calls):
                groups = {key: group for key, group in groups.items() if key[0] is not parent}
                groups[parent, ""] = calls
        stacks = []
        for calls in groups.values():
            if any(self._feeds(first, second) for first, second in zip(calls, calls[1:], strict=False)):
                stacks.append(_Stack(calls, self._is_chain(calls)))
            elif len(calls) == 1:
                stacks.append(_Stack(calls, True))
        outermost = [
            stack
            for stack in stacks
            if not any(outer.contains(stack.calls[0]) for other in stacks for outer in other.calls)
        ]
        return sorted(map(self._descend, outermost), key=lambda stack: stack.calls[-1].end)

    def _descend(self, stack: _Stack) -> _Stack:
        """The blocks inside groups of blocks (ALBERT): a group is nothing but a chain of equal modules."""
        inner: list[ModuleCall] = []
        for call in stack.calls:
            children = [child for child in self.trace.calls_in(call) if child.parent is call]
            same_type = len({type(child.module) for child in children}) == 1
            if not children or not same_type or not self._is_chain(children):
                return stack
            if self._in(children[0]) != self._in(call) or self._out(children[-1]) != self._out(call):
                return stack
            inner += children
        return _Stack(inner, stack.is_chain)

    def _is_chain(self, calls: Sequence[ModuleCall]) -> bool:
        return all(self._hands_on(first, second) for first, second in zip(calls, calls[1:], strict=False))

    def _hands_on(self, first: ModuleCall, second: ModuleCall) -> bool:
        source = self.trace.source
        return source(self._out(first)) == source(self._in(second))

    def _feeds(self, first: ModuleCall, second: ModuleCall) -> bool:
        """Whether the second block reads the first one's output, perhaps with something added to it."""
        if self._hands_on(first, second):
            return True
        return self._stream_steps(self._out(first), self._in(second), first.end) is not None

    def _in(self, call: ModuleCall) -> Value:
        value = self.trace.main(call.inputs)
        assert value is not None
        return value

    def _out(self, call: ModuleCall) -> Value:
        value = self.trace.main(call.outputs)
        assert value is not None
        return value

    def _raw_out(self, call: ModuleCall) -> Value:
        """The block's own output, before maps attached to it."""
        return self.trace.main(call.raw_outputs) or self._out(call)

    def _reaches(self, call: ModuleCall, target: Value) -> bool:
        return target in self._descendants(self._out(call))

    def _layout(self, stack: _Stack, of_tokens: Tensor) -> Layout | None:
        """How the hidden states of a stack lie in memory; None if they are not one row for each token."""
        shape, tokens = self.trace.tensors[self._out(stack.calls[-1])].shape, tuple(of_tokens.shape[:2])
        # Some models pad a text to whole windows.
        if shape[0] == tokens[0] and shape[1] >= tokens[1] and len(shape) in (3, 4):
            return "btd" if len(shape) == 3 else "btnd"
        if len(shape) == 3 and tuple(shape[:2]) == tokens[::-1]:
            return "tbd"
        if len(shape) == 4 and tuple(shape[1:3]) == tokens:
            return "nbtd"
        if len(shape) == 2 and shape[0] == math.prod(tokens):
            return "btd"
        return None

    def _entry(self, stack: _Stack, ids: Value) -> str:
        """The innermost module that reads the tokens and runs all blocks."""
        first, last = stack.calls[0], stack.calls[-1]
        of_model = self.trace.calls[0].inputs
        around = [call for call in self.trace.calls if call.contains(first) and call.contains(last)]
        with_ids = [
            call.path
            for call in around
            if ids in call.inputs and "input_ids" in inspect.signature(call.module.forward).parameters
            # Nothing that an outer module computed, but for the encoder's states.
            if self.task == "seq2seq" or not any(v in self.trace.dynamic and v not in of_model for v in call.inputs)
        ]
        return with_ids[-1] if with_ids else ""

    def _anatomy(self, stack: _Stack, layout: Layout, target: Value | None, entry: str) -> Anatomy:
        trace = self.trace
        last = self._out(stack.calls[-1])
        kinds: dict[Any, _BlockPattern] = {}
        blocks = [self._block(call, layout, kinds) for call in stack.calls]
        shape = trace.tensors[last].shape
        notes = [] if stack.is_chain else ["something is added to the stream between blocks"]
        if layout in ("btnd", "nbtd"):
            count = shape[2] if layout == "btnd" else shape[0]
            notes.append(f"{count} residual streams; a level is all of them side by side")
        if self.task != "seq2seq" and any(self._reads_past_the_stream(call) for call in stack.calls):
            notes.append("blocks read more than the stream (per-layer inputs, shared keys and values, the embedding)")
        anatomy = Anatomy(
            task=self.task,
            entry=entry,
            blocks=tuple(blocks),
            layout=layout,
            d_model=math.prod(shape) // (_ROWS * _n_positions(shape, layout)),
            is_causal=self.task != "masked" and self._is_causal(self._in(stack.calls[0]), last, layout),
            n_streams={"btnd": shape[-2], "nbtd": shape[0]}.get(layout, 1),
            is_chain=stack.is_chain,
            notes=tuple(notes),
        )
        if target is None:
            return anatomy
        return self._with_path(anatomy, last, target)

    def _is_causal(self, first: Value, last: Value, layout: Layout) -> bool:
        """Whether the last level depends on no later position of level 0; without gradients, the self-check tells."""
        trace, middle = self.trace, _LENGTH // 2
        edge, source = trace.edges.get(last), trace.edges.get(first)
        if edge is None or source is None:
            return True
        states = trace.tensors[last]
        weight = torch.zeros_like(to_rows(states, layout))
        if weight.dim() != 3:
            return True
        weight[-1, middle].normal_(generator=torch.Generator(weight.device).manual_seed(0))
        try:
            rows = from_rows(weight, layout, n_streams(states, layout))
            (gradient,) = torch.autograd.grad([edge], [source], [rows], retain_graph=True)
        except RuntimeError:  # a kernel without gradient
            return True
        return not bool(to_rows(gradient, layout)[-1, middle + 1 : _LENGTH].any())

    def _reads_past_the_stream(self, call: ModuleCall) -> bool:
        trace, stream = self.trace, self.trace.source(self._in(call))
        for node in trace.nodes[call.start : call.end]:
            for value in node.inputs:
                if value[1] < call.start and self._is_activation(value) and trace.source(value) != stream:
                    return True
        return False

    def _is_activation(self, value: Value) -> bool:
        """Whether a value depends on the token embeddings: masks and position biases do not."""
        return value in self.trace.dynamic and value in self.trace.edges

    # --- from the last level to the logits ----------------------------------------------------------------------

    def _with_path(self, anatomy: Anatomy, last: Value, target: Value) -> Anatomy:
        trace = self.trace
        after, before = self._descendants(last), self._ancestors(target, last)
        on_path = after & before | {target}
        if self.task == "classification":
            anatomy = self._with_pooled_position(anatomy, last, target)
            if anatomy.no_logits:
                return anatomy
            self._pooled = anatomy.pooled
        aside = {
            value
            for index in sorted({value[1] for value in on_path if value[1] >= 0 and value != last})
            if not self._selects_position(trace.nodes[index])  # it may find the last token in the tokens themselves
            for value in trace.nodes[index].inputs
            if value in trace.dynamic and value not in after and value != last
        }
        if aside:
            return replace(anatomy, no_logits="the path to the logits reads more than the last level")
        n_logits = trace.tensors[target].shape[-1]
        unembedding = self._unembedding(on_path, last, n_logits)
        if unembedding is None:
            return replace(anatomy, no_logits="no linear layer leads to the output")
        value_in, value_out, module, weight = unembedding
        to_final = self._path_steps(last, value_in, on_path, around=module)
        from_logits = self._path_steps(value_out, target, on_path, around=None)
        return replace(
            anatomy,
            to_final=tuple(to_final),
            unembedding=None if module is None else module.path,
            unembedding_weight=weight,
            from_unembedding=tuple(from_logits),
        )

    def _with_pooled_position(self, anatomy: Anatomy, last: Value, target: Value) -> Anatomy:
        """Find the position of level L that the labels of a text come from, by the gradient of their logits."""
        trace = self.trace
        logits = trace.tensors[target]
        if logits.shape[-1] < 2:
            return replace(anatomy, no_logits="its head returns one number, not the logits of labels")
        if getattr(getattr(self.hf, "config", None), "problem_type", None) == "multi_label_classification":
            return replace(anatomy, no_logits="its labels do not exclude each other (multi-label classification)")
        if logits.dim() == 3:
            return anatomy
        edge, source = trace.edges.get(target), trace.edges.get(last)
        if logits.dim() != 2 or edge is None or source is None:
            return replace(anatomy, no_logits="the position that its labels come from is unknown")
        weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits)
        (gradient,) = torch.autograd.grad([edge], [source], [weight], retain_graph=True)
        by_position = to_rows(gradient, anatomy.layout).reshape(_ROWS, -1, anatomy.d_model)
        rows, positions = by_position.abs().sum(-1).nonzero(as_tuple=True)
        read, ends = set(positions.tolist()), {0: "first", _LENGTH - 1: "last"}
        if len(rows) != _ROWS or len(read) != 1 or not read <= set(ends):
            places = "no position" if not read else "one position" if len(read) == 1 else f"{len(read)} positions"
            reason = f"its head reads {places} of {_LENGTH} (a mean, for example); expected the first or the last alone"
            return replace(anatomy, no_logits=reason)
        pooled: Any = ends[read.pop()]
        return replace(anatomy, pooled=pooled)

    def _selects_position(self, node: Node) -> bool:
        """Whether an operation selects the position of each row that the labels of a text come from."""
        if self._pooled is None or node.name not in ("getitem", "select") or len(node.outputs) != 1:
            return False
        before, after = self.trace.tensors[node.inputs[0]], self.trace.tensors[node.outputs[0]]
        if before.dim() != 3 or before.shape[:2] != (_ROWS, _LENGTH):
            return False
        at = before[:, 0 if self._pooled == "first" else -1]
        return after.numel() == at.numel() and torch.equal(after.reshape(at.shape), at)

    def _unembedding(
        self, on_path: set[Value], last: Value, n_logits: int
    ) -> tuple[Value, Value, ModuleCall | None, str | Tensor | None] | None:
        """Input, output and call of the last linear layer on the path, or its weight where no module holds it."""
        trace = self.trace
        for call in reversed(trace.calls):
            if call.start <= last[1] or any(True for _ in call.module.children()) or not call.outputs:
                continue
            weight = getattr(call.module, "weight", None)
            if not isinstance(weight, Tensor) or weight.dim() != 2 or trace.main(call.inputs) is None:
                continue
            if self._out(call) in on_path and trace.tensors[self._out(call)].shape[-1] >= n_logits:
                return self._in(call), self._out(call), call, None
        for index in sorted({value[1] for value in on_path}, reverse=True):
            node = trace.nodes[index] if index > last[1] else None
            if node is None or node.name not in ("linear", "matmul"):
                continue
            weights = [value for value in node.inputs if value not in trace.dynamic]
            if len(weights) != 1 or trace.tensors[node.outputs[0]].shape[-1] < n_logits:
                continue
            source = trace.source(weights[0])
            weight = trace.tensors[weights[0]].detach()
            name = trace.names.get(source[0])
            if name is not None and trace.tensors[source].shape[0] == trace.tensors[node.outputs[0]].shape[-1]:
                return node.inputs[0], node.outputs[0], None, name
            if weight.dim() == 2:
                return node.inputs[0], node.outputs[0], None, weight if node.name == "linear" else weight.mT
        return None

    def _path_steps(
        self, start: Value, end: Value, on_path: set[Value], *, around: ModuleCall | None
    ) -> list[PathStep]:
        """The modules and operations from one value to another, as few and as large as possible."""
        trace, steps, value = self.trace, list[PathStep](), start
        between = self._ancestors(end, start) & self._descendants(start) | {end}
        while trace.source(value) != trace.source(end) and value != end:
            call = self._next_module(value, between, around)
            if call is not None:
                steps.append(ModuleStep(call.path))
                value = self._out(call)
                continue
            readers = [
                index
                for index in trace.readers[value]
                if any(output in between for output in trace.nodes[index].outputs)
            ]
            node = trace.nodes[readers[0]] if readers else None
            selects = node is not None and self._selects_position(node)
            if len(readers) == 1 and node is not None and (selects or self._is_pure(node, value)):
                if not selects and not self._keeps_rows(node, value):
                    steps.append(self._operation(node, value))
                value = next(output for output in node.outputs if output in between)
                continue
            steps.append(self._replay(value, end, between))
            break
        return steps

    def _keeps_rows(self, node: Node, value: Value) -> bool:
        """Whether an operation hands on each position's state as it is, and drops at most padding after them."""
        before, after = self.trace.tensors[value], self.trace.tensors[node.outputs[0]]
        if node.name not in PASSED_ON:
            return False
        if node.name == "getitem" and before.dim() == after.dim() == 3:
            return before.shape[::2] == after.shape[::2] and torch.equal(before[:, : after.shape[1]], after)
        return before.shape == after.shape

    def _next_module(self, value: Value, between: set[Value], around: ModuleCall | None) -> ModuleCall | None:
        for call in self.trace.calls_reading[value]:
            # A module that returns its input unchanged (a dropout) is not a step.
            if around is not None and (call is around or call.contains(around)):
                continue
            others = [v for v in call.inputs if v in self.trace.dynamic and v != value]
            main = self.trace.main(call.outputs)
            if main is not None and main in between and main != value and not others and call.start > value[1]:
                return call
        return None

    def _is_pure(self, node: Node, value: Value) -> bool:
        return node.function is not None and all(v == value or v not in self.trace.dynamic for v in node.inputs)

    def _operation(self, node: Node, value: Value) -> Operation:
        assert node.function is not None
        tensor = self.trace.tensors[value]
        names = self.trace.names

        def operand(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return item
            if item is tensor:
                return Operation.STATES
            name = names.get(id(item))
            return Operation.Weight(name) if name is not None else item.detach()

        args = tuple(operand(item) for item in node.args)
        kwargs = {name: operand(item) for name, item in node.kwargs.items()}
        return Operation(node.name, node.function, args, tuple(kwargs.items()))

    def _replay(self, start: Value, end: Value, between: set[Value]) -> ReplayedPath:
        indices = sorted({value[1] for value in between if value != start and value[1] > start[1]})
        nodes = [self.trace.nodes[index] for index in indices]
        if any(node.function is None for node in nodes):
            raise UnsupportedModel("the path to the logits runs through an operation that the trace cannot see")
        return ReplayedPath(start, end, tuple(nodes), dict(self.trace.tensors), _ROWS, _LENGTH)

    # --- blocks -------------------------------------------------------------------------------------------------

    def _block(self, call: ModuleCall, layout: Layout, kinds: dict[Any, _BlockPattern]) -> BlockAnatomy:
        bare = BlockAnatomy(call.path, call.index)
        norms = {inner.module for inner in self.trace.calls_in(call) if self._is_norm(inner)}
        try:
            steps = self._stream_steps(self._in(call), self._raw_out(call), call.start, norms)
            if steps is None:
                return replace(bare, problem="the block's output is not a sum that begins at its input")
            return self._read_block(call, bare, steps, layout, kinds)
        except _NotAModule as error:
            return replace(bare, problem=str(error))

    def _stream_steps(
        self, start: Value, end: Value, first_node: int, norms: Collection[nn.Module] = ()
    ) -> list[_StreamStep] | None:
        """The stream's way from one value to another; None if there is no such way.

        Of two summands the stream is the one that `start` leads to through fewer norms.
        """
        trace = self.trace
        n_norms: dict[Value, float] = {start: 0}

        def distance(value: Value) -> float:
            if value not in n_norms:
                n_norms[value] = math.inf  # cuts cycles
                step = step_to(value)
                n_norms[value] = math.inf if step is None else distance(step.stream) + (step.kind == "norm")
            return n_norms[value]

        def step_to(value: Value) -> _StreamStep | None:
            node = trace.node(value)
            if node is None or not node.is_dynamic or value[1] < first_node:
                return None
            live = [v for v in node.inputs if v in trace.dynamic]
            sign = (-1.0 if node.name in _SUBTRACT else 1.0) * node.kwargs.get("alpha", 1)
            if node.name in _ADD | _SUBTRACT and len(live) == 2:
                left, right = node.inputs[:2]
                of_left, of_right = distance(left), distance(right) if node.name in _ADD else math.inf
                if min(of_left, of_right) < math.inf:
                    if of_left <= of_right:
                        return _StreamStep(left, "add", value=right, factor=sign)
                    return _StreamStep(right, "add", value=left)
            if node.name in _ADD | _SUBTRACT and len(live) == 1 and distance(live[0]) < math.inf:
                if node.args[0] is trace.tensors[live[0]]:
                    return _StreamStep(live[0], "shift", factor=_times(sign, self._constant(node.args[1])))
                if node.name in _ADD:
                    return _StreamStep(live[0], "shift", factor=self._constant(node.args[0]))
            if node.name in _MULTIPLY | _DIVIDE and len(live) == 1 and distance(live[0]) < math.inf:
                return _StreamStep(live[0], "mul", factor=self._factor(node, live[0]))
            if node.name in PASSED_ON:
                same = trace.tensors[node.inputs[0]].numel() == trace.tensors[value].numel()
                if same and distance(node.inputs[0]) < math.inf:
                    return _StreamStep(node.inputs[0], "same")
            for call in trace.calls_writing.get(value, ()):
                inner = trace.main(call.inputs)
                if call.module in norms and inner is not None and inner != value and distance(inner) < math.inf:
                    return _StreamStep(inner, "norm", call=call)
            return None

        steps: list[_StreamStep] = []
        value = end
        if distance(end) == math.inf:
            return None
        while value != start:
            step = step_to(value)
            if step is None:
                return None
            steps.append(step)
            value = step.stream
        return steps[::-1]

    def _factor(self, node: Node, live: Value) -> Constant:
        """The constant of a multiplication or division."""
        other = next((item for item in node.args if item is not self.trace.tensors[live]), 1.0)
        constant = self._constant(other)
        if node.name in _DIVIDE:
            return 1 / constant if not isinstance(constant, str) else 1 / self._tensor(constant)
        return constant

    def _constant(self, operand: Any) -> Constant:
        if isinstance(operand, Tensor) and (name := self.trace.names.get(id(operand))):
            return name
        if isinstance(operand, Tensor) and operand.numel() > 1:
            rows = operand.detach().reshape(-1, operand.shape[-1])
            if not torch.equal(rows, rows[:1].expand_as(rows)):
                raise _NotAModule("a constant of the block differs from position to position")
            return rows[0].clone()
        # A number computed from weights is this model's alone: as a tensor it keeps the anatomy out of the cache.
        return operand.detach().clone() if isinstance(operand, Tensor) else float(operand)

    def _tensor(self, constant: Constant) -> Tensor | float:
        if not isinstance(constant, str):
            return constant
        return next(t for t in (*self.hf.parameters(), *self.hf.buffers()) if self.trace.names.get(id(t)) == constant)

    def _is_norm(self, call: ModuleCall) -> bool:
        """Whether a module forgets the scale of what it reads; told by trying, not by its name."""
        module = call.module
        main = self.trace.main(call.inputs)
        if module not in self._norms:
            self._norms[module] = main is not None and is_norm(module, self.trace.tensors[main].shape[-1])
        return self._norms[module]

    def _is_linear(self, module: nn.Module) -> bool:
        if module not in self._linear:
            self._linear[module] = is_linear(module)
        return self._linear[module]

    def _read_block(
        self,
        call: ModuleCall,
        bare: BlockAnatomy,
        stream_steps: list[_StreamStep],
        layout: Layout,
        kinds: dict[Any, _BlockPattern],
    ) -> BlockAnatomy:
        streams, n_steps = [self._in(call)], [0]  # values of the stream so far, and how many steps lead to each
        steps: list[StreamStep] = []
        terms: list[_Term] = []
        for position, step in enumerate(stream_steps):
            following = stream_steps[position + 1].stream if position + 1 < len(stream_steps) else self._raw_out(call)
            if step.kind == "add":
                assert step.value is not None
                for term in self._terms(call, step.value, step.factor):
                    if term.call is None:
                        steps.append(StreamStep("shift", factor=term.factor))
                        continue
                    steps.append(StreamStep("add", factor=term.factor))  # named below
                    terms.append(replace(term, streams=tuple(streams), step=len(steps) - 1))
            elif step.kind == "norm":
                assert step.call is not None
                steps.append(StreamStep("norm", step.call.path))
                if terms and not terms[-1].post_norm:
                    terms[-1] = replace(terms[-1], post_norm=step.call)
            elif step.kind != "same":
                steps.append(StreamStep(step.kind, factor=step.factor))
            streams.append(following)
            n_steps.append(len(steps))
        if not terms:
            return replace(bare, steps=tuple(steps), problem="the block adds nothing to the stream")
        # Blocks of one class whose stream takes the same way are alike: what their parts read is looked up once.
        pattern_key = (type(call.module), tuple((t.call.path.removeprefix(call.path), t.step) for t in terms if t.call))
        if pattern_key not in kinds:
            kinds[pattern_key] = _BlockPattern(tuple(self._reading(call, term) for term in terms))
        return self._name_parts(call, bare, steps, terms, kinds[pattern_key], streams, n_steps, layout)

    def _terms(self, block: ModuleCall, value: Value, factor: Constant) -> list[_Term]:
        """The module outputs that make up an addend, each with its factor."""
        trace, node = self.trace, self.trace.node(value)
        calls = [
            call
            for call in trace.calls_writing.get(value, ())
            if block.contains(call) and value in (trace.main(call.outputs), call.outputs[0])
        ]
        if calls:
            return [_Term(calls[0], factor, value)]
        if node is None or value[1] < block.start:
            raise _NotAModule("the block adds a value from outside it")
        live = [v for v in node.inputs if v in trace.dynamic]
        if node.name in PASSED_ON and trace.tensors[node.inputs[0]].numel() == trace.tensors[value].numel():
            return self._terms(block, node.inputs[0], factor)
        if node.name in _ADD | _SUBTRACT and len(live) == 2:
            sign = -1.0 if node.name in _SUBTRACT else 1.0
            return self._terms(block, live[0], factor) + self._terms(block, live[1], _times(sign, factor))
        if node.name in _ADD and len(live) == 1:
            constant = next((item for item in node.args if item is not trace.tensors[live[0]]), 0.0)
            shift = _Term(None, _times(factor, self._constant(constant), self._tensor), value)
            return [*self._terms(block, live[0], factor), shift]
        if node.name in _MULTIPLY | _DIVIDE and len(live) == 1:
            return self._terms(block, live[0], _times(factor, self._factor(node, live[0]), self._tensor))
        names = ", ".join(getattr(trace.node(v), "name", "weight") for v in node.inputs)
        raise _NotAModule(f"a part is not the output of a module but of {node.name}({names})")

    def _reading(self, block: ModuleCall, term: _Term) -> _Reading:
        """What a part reads: which stream, whether it mixes positions, and which operations it runs."""
        trace = self.trace
        operations, reads_aside = set(), False
        seen: set[Value] = set()
        todo = [term.value]
        while todo:
            value = todo.pop()
            if value in seen or value in term.streams:
                continue
            seen.add(value)
            if value[1] >= block.start:
                operations.add(trace.nodes[value[1]].name)
                todo += trace.nodes[value[1]].inputs
            else:
                reads_aside |= self._is_activation(value)
        for index in range(len(term.streams) - 1, -1, -1):
            own, others = self._depends(term.value, term.streams[index])
            if own or others:
                return _Reading(index, others, reads_aside, frozenset(operations))
        # No gradient: a kernel without one. Any value of the stream among the ancestors will do.
        ancestors = self._ancestors(term.value, term.streams[0])
        index = max((i for i, stream in enumerate(term.streams) if stream in ancestors), default=0)
        return _Reading(index, bool(operations & (_ATTENTION | {"unseen"})), reads_aside, frozenset(operations))

    def _depends(self, value: Value, stream: Value) -> tuple[bool, bool]:
        """Whether a value depends on the stream at its own position, and at others.

        Two positions are tried, because a window of attention may end at one of them.
        """
        trace, own, others = self.trace, False, False
        edge, source = trace.edges.get(value), trace.edges.get(stream)
        if edge is None or source is None:
            return False, False
        for position in (-1, -2):
            weight = torch.zeros_like(trace.tensors[value])
            try:
                weight.view(_ROWS, _LENGTH, -1)[-1, position].normal_(
                    generator=torch.Generator(weight.device).manual_seed(0)
                )
                (gradient,) = torch.autograd.grad([edge], [source], [weight], retain_graph=True, allow_unused=True)
                gradient = gradient.reshape(_ROWS, _LENGTH, -1).clone()
            except Exception:  # no gradient, or another layout
                continue
            own |= bool(gradient[-1, position].any())
            gradient[-1, position] = 0
            others |= bool(gradient.any())
        return own, others

    def _name_parts(
        self,
        block: ModuleCall,
        bare: BlockAnatomy,
        steps: list[StreamStep],
        terms: list[_Term],
        pattern: _BlockPattern,
        streams: list[Value],
        n_steps: list[int],
        layout: Layout,
    ) -> BlockAnatomy:
        points: dict[str, Point] = {}
        writes: list[Write] = []
        used_norms: dict[nn.Module, str] = {}
        counts: dict[str, int] = defaultdict(int)
        phase, phase_stream, phases = 0, -1, list[int]()
        inside = self.trace.calls_in(block)
        # A norm that parallel parts share is named by the one that mixes positions, whichever is added first.
        in_order = sorted(
            zip(terms, pattern.readings, strict=True), key=lambda pair: (pair[1].stream, not pair[1].mixes)
        )
        for term, reading in in_order:
            assert term.call is not None
            role = self._role(reading)
            counts[role] += 1
            name = role if counts[role] == 1 else f"{role}{counts[role]}"
            steps[term.step] = replace(steps[term.step], name=name)
            if reading.stream != phase_stream:
                phase, phase_stream = phase + (phase_stream >= 0), reading.stream
            stream = term.streams[reading.stream]
            ancestors = self._ancestors(term.value, stream) | {term.value}
            pre_norm = next(
                (
                    call
                    for call in inside
                    if self._is_norm(call)
                    and self.trace.source(self._in(call)) == self.trace.source(stream)
                    and self._out(call) in ancestors
                    and call is not term.call
                ),
                None,
            )
            read = self.trace.source(stream if pre_norm is None else self._out(pre_norm))
            reader = next(
                (
                    call
                    for call in inside
                    if self.trace.main(call.inputs) is not None
                    and self.trace.source(self._in(call)) == read
                    and not self._is_norm(call)
                    and (call is term.call or call.contains(term.call) or self._any_out(call, ancestors))
                ),
                None,
            )
            is_sandwich = self._is_norm(term.call)
            raw = self._in(term.call) if is_sandwich else term.value
            raw_writers = [c for c in self._writers(raw) if block.contains(c)]
            raw_call = next(iter(self.trace.calls_writing.get(raw, ())), None) if is_sandwich else None
            output_layer = next((c for c in reversed(raw_writers) if self._is_linear(c.module)), None)
            norm = pre_norm or (None if is_sandwich else term.post_norm)
            norm_name = None
            if norm is not None:
                norm_name = used_norms.get(norm.module)
                if norm_name is None:
                    norm_name = _NORM_OF.get(name, f"ln_{name}")
                    if norm_name in used_norms.values():
                        norm_name = f"ln_{name}"
                    used_norms[norm.module] = norm_name
                    points[f"{norm_name}.in"] = self._point(norm, "in", layout)
                    points[f"{norm_name}.out"] = self._point(norm, "out", layout)
            if reader is not None:
                points[f"{name}.in"] = self._point(reader, "in", layout)
            points[f"{name}.out"] = self._point(term.call, "out", layout)
            if raw_call is not None:
                points[f"{name}_raw"] = self._point(raw_call, "out", layout)
            if role == "attn" and output_layer is not None:
                points["heads" if name == "attn" else f"heads{name[4:]}"] = self._point(output_layer, "in", layout)
            if reading.operations & _ROUTING and role == "ffn":
                if router := self._router(block, inside, ancestors):
                    points["moe.router"] = self._point(router, "out", layout)
                points["moe.out"] = points.get(f"{name}_raw", points[f"{name}.out"])
            readers_of_norm = self._linear_readers(block, pre_norm) if pre_norm is not None else None
            writes.append(
                Write(
                    name=name,
                    role=role,
                    phase=phase,
                    steps_before=n_steps[reading.stream],
                    norm=norm_name,
                    norm_first=pre_norm is not None,
                    is_normed_after=is_sandwich or (term.post_norm is not None and pre_norm is None),
                    factor=term.factor,
                    output_layer=None if output_layer is None else output_layer.path,
                    linear_readers=readers_of_norm,
                    reads_aside=reading.reads_aside,
                    is_routed=bool(reading.operations & _ROUTING) and role == "ffn",
                )
            )
            if len(phases) <= phase:
                phases.append(reading.stream)
        mids = self._mids(inside, phases, points, streams, n_steps, layout)
        return replace(
            bare, steps=tuple(steps), writes=tuple(writes), points=tuple(sorted(points.items())), mids=tuple(mids)
        )

    def _writers(self, value: Value) -> list[ModuleCall]:
        """The calls that return a value, or the one that it was handed on from; outermost first."""
        source = self.trace.source(value)
        calls = list(self.trace.calls_writing.get(value, ()))
        while value != source:
            node = self.trace.node(value)
            assert node is not None
            value = node.inputs[0]
            calls += self.trace.calls_writing.get(value, ())
        return calls

    def _any_out(self, call: ModuleCall, values: Collection[Value]) -> bool:
        return any(value in values for value in call.outputs)

    def _role(self, reading: _Reading) -> str:
        if reading.mixes:
            return "attn" if reading.operations & _ATTENTION else "mixer"
        if reading.reads_aside:
            return "xattn" if self.task == "seq2seq" or reading.operations & _ATTENTION else "aside"
        return "ffn"

    def _router(self, block: ModuleCall, inside: list[ModuleCall], ancestors: set[Value]) -> ModuleCall | None:
        trace = self.trace
        for index in range(block.start, block.end):
            node = trace.nodes[index]
            if node.name not in _ROUTING or not any(output in ancestors for output in node.outputs):
                continue
            n_experts = trace.tensors[node.inputs[0]].shape[-1]
            upstream = self._ancestors(node.inputs[0], self._in(block)) | {node.inputs[0]}
            for call in inside:
                if not call.outputs or trace.tensors[call.outputs[0]].shape[-1:] != (n_experts,):
                    continue
                if call.outputs[0] in upstream or call.start <= index < call.end:
                    return call
        return None

    def _linear_readers(self, block: ModuleCall, norm: ModuleCall) -> tuple[str, ...] | None:
        """The linear layers that read a norm's output; None if anything else reads it too."""
        trace, value = self.trace, self._out(norm)
        family = {value}
        paths: dict[str, None] = {}
        linear = [call for call in trace.calls_in(block) if self._is_linear(call.module)]
        for index in range(value[1] + 1, block.end):
            node = trace.nodes[index]
            sources = [v for v in node.inputs if v in family]
            if not sources:
                continue
            if node.name in PASSED_ON and trace.tensors[node.outputs[0]].numel() == trace.tensors[value].numel():
                family.update(node.outputs)
                continue
            leaf = next((call for call in linear if call.start <= index < call.end), None)
            if leaf is None or trace.source(self._in(leaf)) != trace.source(value):
                return None
            paths[leaf.path] = None
        return tuple(paths)

    def _mids(
        self,
        inside: list[ModuleCall],
        phases: list[int],
        points: dict[str, Point],
        streams: list[Value],
        n_steps: list[int],
        layout: Layout,
    ) -> list[tuple[str, int]]:
        """Name the stream after each phase but the last, `mid`, `mid2` …, wherever a module reads or writes it."""
        trace, mids = self.trace, list[tuple[str, int]]()
        for phase, index in enumerate(phases[1:], start=1):
            stream, name = streams[index], "mid" if phase == 1 else f"mid{phase}"
            writing = next((c for c in inside if c.outputs and trace.main(c.outputs) == stream), None)
            reading = next(
                (c for c in inside if trace.main(c.inputs) and trace.source(self._in(c)) == trace.source(stream)), None
            )
            if writing is not None:
                points[name] = self._point(writing, "out", layout)
            elif reading is not None:
                points[name] = self._point(reading, "in", layout)
            else:
                continue
            mids.append((name, n_steps[index]))
        return mids

    def _point(self, call: ModuleCall, side: Any, layout: Layout) -> Point:
        value = self._in(call) if side == "in" else (self.trace.main(call.outputs) or call.outputs[0])
        tensor = self.trace.tensors[value]
        own = layout if tensor.dim() == (4 if layout in ("btnd", "nbtd") else 3) else "btd"
        return Point(call.path, side, call.index, own, tensor.numel() // (_ROWS * _LENGTH))

    # --- graph --------------------------------------------------------------------------------------------------

    def _descendants(self, value: Value) -> set[Value]:
        if value not in self._down:
            reached = {value}
            for node in self.trace.nodes[value[1] + 1 :]:
                if node.is_dynamic and any(v in reached for v in node.inputs):
                    reached.update(node.outputs)
            self._down[value] = reached
        return self._down[value]

    def _ancestors(self, value: Value, limit: Value) -> set[Value]:
        """Everything that a value was computed from, no further back than `limit`."""
        seen: set[Value] = set()
        todo = [value]
        while todo:
            node = self.trace.node(todo.pop())
            for parent in node.inputs if node is not None else ():
                if parent not in seen and parent[1] >= limit[1] and parent in self.trace.dynamic:
                    seen.add(parent)
                    if parent != limit:
                        todo.append(parent)
        return seen


_NORM_OF = {"attn": "ln1", "mixer": "ln1", "xattn": "lnx", "ffn": "ln2"}


class _NotAModule(Exception):  # noqa: N818  (a reason, not an error)
    """What a block adds to the stream is not the output of a module."""


@dataclass(frozen=True)
class _StreamStep:
    stream: Value
    """The stream before the step."""
    kind: Any
    value: Value | None = None
    factor: Constant = 1.0
    call: ModuleCall | None = None


@dataclass(frozen=True)
class _Term:
    call: ModuleCall | None
    factor: Constant
    value: Value
    streams: tuple[Value, ...] = ()
    step: int = -1
    post_norm: ModuleCall | None = None


@dataclass(frozen=True)
class _Reading:
    stream: int
    mixes: bool
    reads_aside: bool
    operations: frozenset[str]


@dataclass(frozen=True)
class _BlockPattern:
    readings: tuple[_Reading, ...]


def _times(first: Constant, second: Constant, look_up: Callable[[Constant], Any] | None = None) -> Constant:
    if not isinstance(second, (str, Tensor)) and second == 1.0:
        return first
    if isinstance(first, float) and first == 1.0:
        return second
    if look_up is None:
        assert not isinstance(first, str)
        assert not isinstance(second, str)
        return first * second
    product: Constant = look_up(first) * look_up(second)
    return product.detach() if isinstance(product, Tensor) else product


def main_output(output: Any) -> Tensor | None:
    """The logits, or else the last hidden states, that a model returns."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(tensor := getattr(output, name, None), Tensor):
            return tensor
    if isinstance(output, Tensor):
        return output
    if isinstance(output, (tuple, list)):
        return next((item for item in output if isinstance(item, Tensor) and item.is_floating_point()), None)
    return None


def _n_positions(shape: Sequence[int], layout: Layout) -> int:
    return shape[0] // _ROWS if len(shape) == 2 else shape[{"btd": 1, "tbd": 0, "btnd": 1, "nbtd": 2}[layout]]


def is_linear(module: nn.Module) -> bool:
    """Whether a module is one matrix product, such as `nn.Linear` or GPT-2's `Conv1D`."""
    if any(True for _ in module.children()):
        return False
    weight = getattr(module, "weight", None)
    return isinstance(module, (nn.Linear, Conv1D)) or (
        isinstance(weight, Tensor) and weight.dim() == 2 and hasattr(module, "in_features")
    )


@torch.no_grad()
def is_norm(module: nn.Module, width: int) -> bool:
    """Whether a module forgets the scale of what it reads."""
    if any(True for _ in module.children()) or any(parameter.dim() > 1 for parameter in module.parameters()):
        return False
    like = next(module.parameters(), torch.ones(1))
    if like.is_meta or not like.is_floating_point():
        return "norm" in type(module).__name__.lower()
    states = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(0)).to(like)
    try:
        once, thrice = module(states), module(3 * states)
    except Exception:  # not a function of one tensor
        return False
    if not isinstance(once, Tensor) or once.shape != states.shape:
        return False
    scale = once.abs().max().clamp_min(1e-12)
    unscaled = bool((once - thrice).abs().max() <= 2e-2 * scale)
    return unscaled and not bool((once - states).abs().max() <= 1e-6 * scale)


@torch.no_grad()
def is_rms_norm(module: nn.Module, width: int) -> bool:
    """Whether a norm leaves the mean of what it reads: its output turns with its input when its weights are one."""
    if not is_norm(module, width):
        return False
    like = next(module.parameters(), torch.ones(1))
    states = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(0)).to(like)
    shifted = module(states + 3 * states.abs().max()) - module(states)
    return bool(shifted.abs().max() > 0.1 * module(states).abs().max())
