"""Listen to a model while it runs: capture hidden states, patch them, record how modules are called.

    with Capture(structure, [Site(3)]) as capture:    # hidden states at sites, of a pass that you run
        capture.start()
        model.hf(input_ids)
        states = capture.take()[Site(3)]

    with Patch({structure.tap(Site(3)): change}):     # hidden states replaced on their way
        model.hf(input_ids)

    with record_calls(structure.blocks) as calls:     # masks, rotary embeddings, biases of every block
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
from layerjump.models.structure import Site, Structure, Tap

if TYPE_CHECKING:
    from layerjump.data.batches import Batch
    from layerjump.models.model import Model


def hidden_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The hidden states among the arguments of a module's call; most callers pass them first, some by keyword."""
    states = args[0] if args else kwargs["hidden_states"]
    # A block list whose caller hands on the block's whole output: the states are its first entry.
    return states[0] if isinstance(states, tuple) else states


def hidden_output(output: Any) -> Tensor:
    """The hidden states in a module's output, which may be a tuple with more in it."""
    return output[0] if isinstance(output, tuple) else output


def _replace_hidden_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], states: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((states, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": states})


def _replace_hidden_output(output: Any, states: Tensor) -> Any:
    return (states, *output[1:]) if isinstance(output, tuple) else states


class Hooks:
    """Hooks that show the states at taps to `visit` while a model runs; they are removed when the `with` block ends.

    Calls of a module are counted from the last `start`. A call of one of the `entries` starts a forward pass too.
    """

    def __init__(self, taps: Iterable[Tap], *, entries: Iterable[nn.Module] = ()) -> None:
        self._taps = set(taps)
        self._entries = set(entries)
        self._handles: list[RemovableHandle] = []
        self._n_calls: dict[tuple[nn.Module, str], int] = defaultdict(int)

    def visit(self, tap: Tap, states: Tensor) -> Tensor | None:
        """See the states at a tap; return the states to go on with in their place, or None to leave them."""
        raise NotImplementedError

    def start(self) -> None:
        """Begin a forward pass: no module has been called yet."""
        self._n_calls.clear()

    def __enter__(self) -> Self:
        for module in self._entries:
            self._handles.append(module.register_forward_pre_hook(lambda *_: self.start()))
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
        self._n_calls[module, side] += 1
        return self.visit(tap, states) if tap in self._taps else None


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
        self._states: dict[Site, Tensor] = {}
        self._stops_early = False
        super().__init__(self._sites_at, entries=entries)

    def start(self, rows: Tensor | None = None) -> None:
        super().start()
        self._rows, self._states = rows, {}

    def take(self) -> dict[Site, Tensor]:
        """Hand over the states of the last forward pass, and let go of them."""
        missing = [str(site) for site in self.sites if site not in self._states]
        if missing:
            raise BadModel(
                f"the forward pass never reached {', '.join(missing)}: this model does not run the modules "
                f"its family's row names (an unusual configuration?)"
            )
        states, self._states = self._states, {}
        return states

    @torch.no_grad()
    def run(self, model: Model, batch: Batch) -> dict[Site, Tensor]:
        """Run a batch no further than the last of the sites; return the states of its picked positions."""
        # Row and position become one index: some modules see (batch · positions, d), most (batch, positions, d).
        self.start(batch.row * batch.input_ids.shape[1] + batch.position)
        # accelerate moves weights to and from a device around each module: those passes must run to their end.
        self._stops_early = not hasattr(model.hf, "hf_device_map")
        try:
            with suppress(_AllCaptured):
                model.run_body(batch.input_ids, batch.attention_mask, batch.source_ids, batch.source_mask)
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
        states = states.reshape(-1, states.shape[-1])
        rows = self._rows.to(states.device)
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
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Tell the hidden states from the other arguments."""
        others = {name: value for name, value in kwargs.items() if args or name != "hidden_states"}
        return cls(hidden_input(args, kwargs), args[1:], others)

    def repeat(self, block: nn.Module, states: Tensor) -> Tensor:
        """Call a block again with other hidden states; return those that leave it."""
        return hidden_output(block(states, *self.args, **self.kwargs))


@contextmanager
def record_calls(blocks: Iterable[nn.Module]) -> Iterator[list[Call]]:
    """Record every call of the blocks, in order, while the model runs as ever."""
    calls: list[Call] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(Call.of(args, kwargs))

    handles = [module.register_forward_pre_hook(before, with_kwargs=True) for module in set(blocks)]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def intercept_calls(block_list: nn.Module) -> Iterator[list[Call]]:
    """Record how a model would call the blocks of its list, once each, without running them or what follows them.

    Blocks are swapped for recorders rather than hooked, so that hooks on the blocks do not run either.
    """
    calls: list[Call] = []
    blocks = dict(block_list._modules)
    try:
        for index, name in enumerate(blocks, start=1):
            block_list._modules[name] = _CallRecorder(calls, is_last=index == len(blocks))
        with suppress(_AllCalled):
            yield calls
    finally:
        block_list._modules.update(blocks)


class _AllCalled(Exception):  # noqa: N818  (a signal, not an error)
    """The last block was called: what follows the blocks need not run."""


class _CallRecorder(nn.Module):
    """Records a block's call in its place, and hands the states on unchanged."""

    def __init__(self, calls: list[Call], *, is_last: bool) -> None:
        super().__init__()
        self._calls, self._is_last = calls, is_last

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor]:
        self._calls.append(Call.of(args, kwargs))
        if self._is_last:
            raise _AllCalled
        # A tuple, because some families take a block's first output; others hand the tuple to the next block as its
        # states, which `hidden_input` unpacks.
        return (self._calls[-1].states,)
