"""Listen to a model while it runs: capture hidden states, patch them, record how modules are called.

    with Capture(structure, [Site(3)]) as capture:    # hidden states at sites, of a pass that you run
        capture.start()
        model.hf(input_ids)
        states = capture.take()[Site(3)]

    with Patch({structure.tap(Site(3)): change}):     # hidden states replaced on their way
        model.hf(input_ids)

    with record_calls(structure) as calls:            # masks, rotary embeddings, biases of every block
        model.hf(input_ids)

Every hook is removed when its `with` block ends, also after an exception; `attach_map` alone installs one for good.
Blocks can share one module (ALBERT), so a `Tap` names the call of a module, and `Hooks` counts calls in a forward pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from layerjump.errors import BadModel
from layerjump.models.anatomy import Layout
from layerjump.models.sites import Site
from layerjump.models.structure import Structure, Tap, from_rows, n_streams, to_rows

if TYPE_CHECKING:
    from layerjump.data.batches import Batch
    from layerjump.models.model import Model


def _is_states(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2


def _hidden_key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | str:
    """Which argument of a module's call holds the hidden states: most callers pass them first, some by keyword."""
    if args and (isinstance(args[0], tuple) or _is_states(args[0])):
        return 0
    if "hidden_states" in kwargs:
        return "hidden_states"
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return next((key for key, value in named if _is_states(value)), 0)


def hidden_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The hidden states among the arguments of a module's call."""
    key = _hidden_key(args, kwargs)
    states = args[key] if isinstance(key, int) else kwargs[key]
    # A block list whose caller hands on the block's whole output: the states are its first entry.
    return states[0] if isinstance(states, tuple) else states


def hidden_output(output: Any) -> Tensor:
    """The hidden states in a module's output, which may be a tuple or a dictionary with more in it."""
    if isinstance(output, Mapping):
        return next(value for value in output.values() if _is_states(value))
    return output[0] if isinstance(output, (tuple, list)) else output


def _replace_hidden_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], states: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    key = _hidden_key(args, kwargs)
    if isinstance(key, str):
        return args, kwargs | {key: states}
    return (*args[:key], states, *args[key + 1 :]), kwargs


def _replace_hidden_output(output: Any, states: Tensor) -> Any:
    if isinstance(output, Mapping):
        key = next(name for name, value in output.items() if _is_states(value))
        return type(output)(**{**output, key: states})
    return (states, *output[1:]) if isinstance(output, (tuple, list)) else states


class Hooks:
    """Hooks that show the states at taps to `visit` while a model runs; they are removed when the `with` block ends.

    Calls of a module are counted from the last `start`. A call of one of the `entries` starts a forward pass too.
    Without `counts_calls`, every call of a module is its first: for blocks that run one by one.
    """

    def __init__(self, taps: Iterable[Tap], *, entries: Iterable[nn.Module] = (), counts_calls: bool = True) -> None:
        self._taps = {tap: tap.layout for tap in taps}
        self._entries = set(entries)
        self._counts_calls = counts_calls
        self._handles: list[RemovableHandle] = []
        self._n_calls: dict[tuple[nn.Module, str], int] = defaultdict(int)

    def visit(self, tap: Tap, states: Tensor) -> Tensor | None:
        """See the states at a tap; return the states to go on with in their place, or None to leave them."""
        raise NotImplementedError

    def start(self) -> None:
        """Begin a forward pass: no module has been called yet."""
        self._n_calls.clear()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See the arguments of an entry, which begins a forward pass."""
        self.start()

    def __enter__(self) -> Self:
        for module in self._entries:
            self._handles.append(module.register_forward_pre_hook(self.enter, with_kwargs=True))
        for module, side in dict.fromkeys((tap.module, tap.side) for tap in self._taps):
            if side == "in":
                handle = module.register_forward_pre_hook(self._before, with_kwargs=True)
            else:
                handle = module.register_forward_hook(self._after)
            self._handles.append(handle)
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        states = self._count_and_visit(module, "in", hidden_input(args, kwargs))
        return None if states is None else _replace_hidden_input(args, kwargs, states)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        states = self._count_and_visit(module, "out", hidden_output(output))
        return None if states is None else _replace_hidden_output(output, states)

    def _count_and_visit(self, module: nn.Module, side: Any, states: Tensor) -> Tensor | None:
        tap = Tap(module, side, self._n_calls[module, side])
        self._n_calls[module, side] += self._counts_calls
        if tap not in self._taps:
            return None
        layout = self._taps[tap]
        changed = self.visit(tap, to_rows(states, layout))
        return None if changed is None else from_rows(changed, layout, n_streams(states, layout))


class _AllCaptured(Exception):  # noqa: N818  (a signal, not an error)
    """Every site is captured: the rest of the model need not run."""


class Capture(Hooks):
    """Hooks that hold the hidden states at sites of one forward pass.

    `start()` asks for whole states as the model hands them on, not copied and differentiable; `start(rows)` for copies
    of some rows of the flattened (batch · positions) states. With `reuse_buffer_rows` (the most rows that any pass asks
    for), each pass writes its copies over those of the last: fresh tensors of ever new sizes would fragment the heap.
    """

    def __init__(
        self,
        structure: Structure,
        sites: Sequence[Site],
        *,
        reuse_buffer_rows: int = 0,
        entries: Iterable[nn.Module] = (),
    ) -> None:
        self.sites = list(sites)
        self._sites_at: dict[Tap, list[Site]] = defaultdict(list)
        for site in self.sites:
            self._sites_at[structure.tap(site)].append(site)
        self._buffer_rows = reuse_buffer_rows
        self._buffers: dict[Site, Tensor] = {}
        self._rows: Tensor | None = None
        self._n_positions = 0
        self._is_exact = False
        self._states: dict[Site, Tensor] = {}
        self._stops_early = False
        super().__init__(self._sites_at, entries=entries)

    def start(self, rows: Tensor | None = None, n_positions: int = 0, *, is_exact: bool = False) -> None:
        """Begin a forward pass; `n_positions` of a row of tokens tells padding that the model adds (Longformer).

        `is_exact`: more states than tokens are an error, because what is added may stand before the tokens (images).
        """
        super().start()
        self._rows, self._n_positions, self._states, self._is_exact = rows, n_positions, {}, is_exact

    def take(self) -> dict[Site, Tensor]:
        """Hand over the states of the last forward pass, and let go of them."""
        missing = [str(site) for site in self.sites if site not in self._states]
        if missing:
            raise BadModel(
                f"the forward pass never reached {', '.join(missing)}: this model does not run the modules "
                f"that its structure names (an unusual configuration?)"
            )
        states, self._states = self._states, {}
        return states

    @torch.no_grad()
    def run(self, model: Model, batch: Batch) -> dict[Site, Tensor]:
        """Run a batch no further than the last of the sites; return the states of its picked positions."""
        # Row and position become one index: some modules see (batch · positions, d), most (batch, positions, d).
        n_positions = batch.input_ids.shape[1]
        has_more = batch.extra_inputs is not None
        self.start(batch.row * n_positions + batch.position, n_positions, is_exact=has_more)
        # accelerate moves weights to and from a device around each module: those passes must run to their end.
        self._stops_early = not any(hasattr(module, "_hf_hook") for module in model.hf.modules())
        try:
            with suppress(_AllCaptured):
                model.run_body(
                    batch.input_ids, batch.attention_mask, batch.source_ids, batch.source_mask, batch.extra_inputs
                )
        finally:
            self._stops_early = False
        return self.take()

    def visit(self, tap: Tap, states: Tensor) -> None:
        for site in self._sites_at[tap]:
            self._states[site] = self._select(site, states)
        if self._stops_early and len(self._states) == len(set(self.sites)):
            raise _AllCaptured

    def _select(self, site: Site, states: Tensor) -> Tensor:
        if self._rows is None:
            return states
        # Always a copy: Falcon adds to its feed-forward output in place afterwards.
        rows = self._rows.to(states.device)
        if states.dim() == 3 and self._n_positions not in (0, states.shape[1]):
            if self._is_exact:
                raise BadModel(
                    f"expected a hidden state for each of the {self._n_positions} tokens, got {states.shape[1]}: "
                    f"this model adds positions of its own for images, so no token can be told; read text alone"
                )
            rows = rows // self._n_positions * states.shape[1] + rows % self._n_positions
        states = states.reshape(-1, states.shape[-1])
        if len(rows) > self._buffer_rows:
            return states.index_select(0, rows)
        if site not in self._buffers:
            self._buffers[site] = states.new_empty(self._buffer_rows, states.shape[-1])
        return torch.index_select(states, 0, rows, out=self._buffers[site][: len(rows)])


class Patch(Hooks):
    """Hooks that replace the hidden states at taps by functions of them."""

    def __init__(self, changes: Mapping[Tap, Callable[[Tensor], Tensor]]) -> None:
        super().__init__(changes)
        self._changes = changes

    def visit(self, tap: Tap, states: Tensor) -> Tensor:
        return self._changes[tap](states)


def attach_map(tap: Tap, module: nn.Module, apply: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Make `apply(module, states)` of the states at a tap part of a model: at every call, for good, and in copies."""
    if tap.side == "in":
        tap.module.register_forward_pre_hook(_MapInput(module, apply), with_kwargs=True)
    else:
        tap.module.register_forward_hook(_MapOutput(module, apply))


def attached_maps(hf: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name of each module at which `attach_map` attached something, and what it attached."""
    for name, module in hf.named_modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if isinstance(hook, _AttachedMap):
                yield name, hook.module


def apply_attached(module: nn.Module, output: Tensor) -> Tensor:
    """What the maps attached to a module's output make of an output."""
    for hook in module._forward_hooks.values():
        if isinstance(hook, _MapOutput):
            output = hook.apply(hook.module, output)
    return output


@dataclass
class _AttachedMap:
    """A hook that is an object, because `copy.deepcopy` copies what an object holds, but not what a closure does."""

    module: nn.Module
    apply: Callable[[nn.Module, Tensor], Tensor]


class _MapInput(_AttachedMap):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        states = self.apply(self.module, hidden_input(args, kwargs))
        return _replace_hidden_input(args, kwargs, states)


class _MapOutput(_AttachedMap):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _replace_hidden_output(output, self.apply(self.module, hidden_output(output)))


@contextmanager
def watch_outputs(modules: Iterable[nn.Module], see: Callable[[Any], None]) -> Iterator[None]:
    """Show `see` the whole output of every call of the modules, such as a tuple of states and attention weights."""

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        see(output)

    handles = [module.register_forward_hook(after) for module in set(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Call:
    """One call of a block: its hidden states, and its other arguments (masks, rotary embeddings, biases, a cache)."""

    states: Tensor
    """(rows, positions, width)."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """All arguments; those that hold the hidden states are replaced when the call is repeated."""
    layout: Layout = "btd"
    n_streams: int = 1

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout = "btd") -> Call:
        """Tell the hidden states from the other arguments."""
        states = hidden_input(args, kwargs)
        count = n_streams(states, layout)
        return cls(to_rows(states, layout), *_replace_hidden_input(args, kwargs, states), layout, count)

    def repeat(self, block: nn.Module, states: Tensor) -> Tensor:
        """Call a block again with other hidden states; return those that leave it."""
        states = from_rows(states, self.layout, self.n_streams)
        args, kwargs = _replace_hidden_input(self.args, self.kwargs, states)
        return to_rows(hidden_output(block(*args, **kwargs)), self.layout)


@contextmanager
def record_calls(structure: Structure) -> Iterator[list[Call]]:
    """Record every call of the blocks, in order, while the model runs as ever."""
    calls: list[Call] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(Call.of(args, kwargs, structure.anatomy.layout))

    handles = [module.register_forward_pre_hook(before, with_kwargs=True) for module in set(structure.blocks)]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def intercept_calls(structure: Structure, n_outputs: int = 1) -> Iterator[list[Call]]:
    """Record how a model would call its blocks, once each, without running them or what follows them.

    `n_outputs` is how many values the caller of a block expects; all but the states are None.

    Blocks are swapped for recorders rather than hooked, so that hooks on the blocks do not run either.
    """
    calls: list[Call] = []
    places = []
    try:
        for path, block in {a.path: b for a, b in zip(structure.anatomy.blocks, structure.blocks, strict=True)}.items():
            parent_path, _, name = path.rpartition(".")
            parent = structure.module(parent_path)
            places.append((parent, name, block))
            parent._modules[name] = _CallRecorder(calls, block, structure.anatomy.layout, structure.n_blocks, n_outputs)
        with suppress(_AllCalled):
            yield calls
    finally:
        for parent, name, block in places:
            parent._modules[name] = block


class _AllCalled(Exception):  # noqa: N818  (a signal, not an error)
    """The last block was called: what follows the blocks need not run."""


class _CallRecorder(nn.Module):
    """Records a block's call in its place, and hands the states on unchanged."""

    def __init__(self, calls: list[Call], block: nn.Module, layout: Layout, n_calls: int, n_outputs: int) -> None:
        super().__init__()
        # In a list, so that the block does not become a sub-module.
        self._calls, self._block, self._layout = calls, [block], layout
        self._n_calls, self._n_outputs = n_calls, n_outputs

    def __getattr__(self, name: str) -> Any:
        # Some models ask a block for its attention type before they call it.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        self._calls.append(Call.of(args, kwargs, self._layout))
        if len(self._calls) == self._n_calls:
            raise _AllCalled
        # A tuple, because some families take a block's first output; others hand the tuple to the next block as its
        # states, which `hidden_input` unpacks.
        return (hidden_input(args, kwargs), *[None] * (self._n_outputs - 1))
