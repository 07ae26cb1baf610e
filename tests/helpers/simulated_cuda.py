"""Simulated CUDA devices: tensors that claim to be on `cuda:k`, hold CPU values, and refuse what CUDA refuses.

    with simulated_cuda() as device:
        model = lj.load(folder, device="cuda")   # the values of every operation are those of a CPU
        device.reads.clear()
        lj.fit(model, text)
        device.reads                              # what copied values to the host, by line of layerjump

An operation on two devices raises torch's own error, except with CPU scalars, CPU indices and copies; so does `numpy`.
Operations that read values on the host (`item`, `bool`, `tolist`, `nonzero`, Boolean masks, `cpu`) are counted: on a
real device the host waits there for everything before. Gradients work. What is not simulated: which kernels exist,
speed, memory and streams.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

GUARD_SOURCE = Path(__file__).with_name("simulated_guard.cpp")
COPIES = {"aten::copy_", "aten::_to_copy", "aten::_copy_from", "aten::_copy_from_and_resize"}
INDEXING = {"aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
READS = {
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::repeat_interleave",
}
"""Operations whose result, or the shape of it, needs values on the host."""
CPU_ONLY = ("mkldnn", "onednn", "quantized", "_for_cpu", "fbgemm")


class NoCompiler(Exception):
    """There is no C++ compiler, and this torch is built without CUDA."""


@dataclass
class SimulatedDevices:
    """What the simulated devices counted."""

    reads: Counter[str] = field(default_factory=Counter)
    """Reads by the host: operation and line of layerjump → how often."""
    synchronizations: int = 0
    """Explicit waits of the host for a device."""
    guard: Any = None

    def count_read(self, operation: str) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None and f"{os.sep}layerjump{os.sep}" not in frame.f_code.co_filename:
            frame = frame.f_back
        place = "elsewhere"
        if frame is not None:
            place = f"{frame.f_code.co_filename.rpartition(f'{os.sep}layerjump{os.sep}')[2]}:{frame.f_lineno}"
        self.reads[f"{operation} {place}"] += 1

    def resolve(self, device: Any) -> torch.device:
        """The device with its index."""
        device = torch.device(device)
        return torch.device("cuda", self.current()) if device.type == "cuda" and device.index is None else device

    def current(self) -> int:
        """The index of the current device, which torch changes itself inside some operations."""
        return 0 if self.guard is None else int(self.guard.current_device())


_devices = SimulatedDevices()


class SimulatedTensor(torch.Tensor):
    """A tensor that claims a CUDA device; its values are in `host`, on the CPU."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor, device: torch.device) -> SimulatedTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=device,
        )
        tensor.host = host
        return tensor

    def __init__(self, host: Tensor, device: torch.device) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"SimulatedTensor({self.host}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied: Tensor = SimulatedTensor(self.host.detach().clone(), self.device)
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]

    # Addresses are those of the values, so that shared tensors are recognised.
    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> Any:
        return self.host.untyped_storage()

    def tolist(self) -> Any:
        _devices.count_read("tolist")
        return self.host.tolist()


def _on_host(value: Any) -> Any:
    if isinstance(value, SimulatedTensor):
        return value.host
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the values, after the checks that CUDA would make."""
    schema = func._schema
    name = schema.name
    if name == "aten::_pin_memory":
        return args[0]
    if name == "aten::set_":
        args[0].host = args[1].host
        return args[0]
    if name == "aten::_fused_sdp_choice":
        return 0  # SDPBackend.MATH: the fused kernels of a device are not simulated
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    devices = list(dict.fromkeys(t.device for t in tensors if t.dim() or t.device.type != "cpu"))
    explicit = kwargs.get("device")
    target = None if explicit is None else _devices.resolve(explicit)
    if name not in COPIES:
        _require_one_device(name, args, devices)
    for generator in leaves:
        if isinstance(generator, torch._C.Generator):
            wanted = (target or (devices[0] if devices else torch.device("cpu"))).type
            claimed = "cuda" if generator._cdata in _Generator.claimed else "cpu"
            if claimed != wanted:
                raise RuntimeError(f"Expected a '{wanted}' device type for generator but found '{claimed}'")
    device = target
    if device is None:
        if name in COPIES | INDEXING:
            device = args[0].device
        else:
            candidates = devices or [tensor.device for tensor in tensors]
            device = next((d for d in candidates if d.type == "cuda"), torch.device("cpu"))
    if device.type == "cuda" and any(mark in name for mark in CPU_ONLY):
        raise NotImplementedError(f"Could not run '{name}' with arguments from the 'CUDA' backend.")
    _count_reads(name, args, device, tensors)
    host_args, host_kwargs = tree_map(_on_host, (args, kwargs))
    if host_kwargs.get("pin_memory"):
        host_kwargs["pin_memory"] = False
    with _disable_current_modes():
        result = func(*host_args, **host_kwargs)
    if torch.Tag.inplace_view in func.tags and isinstance(args[0], SimulatedTensor):
        with torch.utils._mode_utils.no_dispatch():
            func(*args, **kwargs)  # the shape and strides of the claim itself
        return args[0]
    written = _written(schema, args, kwargs)
    if written and all(returned.alias_info is not None for returned in schema.returns):
        return written[0] if isinstance(result, Tensor) else (tuple(written) if result is not None else None)
    if device.type != "cuda":
        return result
    return tree_map(lambda leaf: SimulatedTensor(leaf, device) if isinstance(leaf, Tensor) else leaf, result)


def _require_one_device(name: str, args: tuple[Any, ...], devices: list[torch.device]) -> None:
    if len(devices) < 2:
        return
    if name in INDEXING:
        home = args[0].device
        indices = [index for index in args[1] or () if isinstance(index, Tensor)]
        values = [value for value in args[2:3] if isinstance(value, Tensor) and value.dim()]
        if home.type == "cuda" and all(index.device in (home, torch.device("cpu")) for index in indices):
            devices = list(dict.fromkeys([home, *(value.device for value in values)]))
    if len(devices) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {devices[0]} and "
            f"{devices[1]}! (in {name})"
        )


def _count_reads(name: str, args: tuple[Any, ...], device: torch.device, tensors: list[Tensor]) -> None:
    simulated = any(isinstance(tensor, SimulatedTensor) for tensor in tensors)
    to_host = name in COPIES and device.type == "cpu" and isinstance(args[1 if name == "aten::copy_" else 0], Tensor)
    masks = name in INDEXING and any(
        isinstance(index, SimulatedTensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1] or ()
    )
    if simulated and (name in READS or to_host or masks):
        _devices.count_read(name.removeprefix("aten::"))


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes to."""
    passed = [
        kwargs.get(argument.name) if argument.kwarg_only else (args[i] if i < len(args) else kwargs.get(argument.name))
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [tensor for tensor in passed if isinstance(tensor, Tensor)]


class _CreateOnDevices(TorchDispatchMode):
    """Sends operations that create tensors on a CUDA device, or move CPU tensors there, to the simulation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        is_simulated = any(isinstance(leaf, SimulatedTensor) for leaf in tree_leaves((args, kwargs)))
        if is_simulated or (device is not None and torch.device(device).type == "cuda"):
            return _dispatch(func, args, kwargs)
        return func(*args, **kwargs)


class _GeneratorType(type(torch._C.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


class _Generator(torch._C.Generator, metaclass=_GeneratorType):
    """Makes generators, all on the CPU, of which some claim a CUDA device."""

    claimed: ClassVar[dict[int, Any]] = {}
    """Address → generator that claims a CUDA device: operations receive another Python object of the same address."""

    def __new__(cls, device: Any = "cpu") -> Any:
        generator = torch._C.Generator()
        if torch.device(device).type == "cuda":
            cls.claimed[generator._cdata] = generator
        return generator


def load_guard() -> Any:
    """Build the device guard if it is not built yet, and load it into this process; None if torch has its own."""
    if torch.version.cuda is not None:
        return None
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        raise NoCompiler("simulated devices need a C++ compiler, or a torch that is built with CUDA")
    key = hashlib.sha256(GUARD_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"layerjump-simulated-guard-{os.getuid()}-{key}.so"
    if not library.exists():
        folder = Path(torch.__file__).parent
        # Written elsewhere and renamed: several processes may build it at once.
        built = library.with_suffix(f".{os.getpid()}")
        abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
        flags = ["-shared", "-fPIC", "-std=c++20", f"-I{folder / 'include'}", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
        libraries = [f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu"]
        command = [compiler, *flags, "-o", built, GUARD_SOURCE, *libraries]
        subprocess.run(command, check=True)
        built.rename(library)
    return ctypes.CDLL(str(library))


@contextmanager
def simulated_cuda(n_devices: int = 2) -> Iterator[SimulatedDevices]:
    """Simulate CUDA devices while the block runs."""
    guard = load_guard()
    _devices.__init__(guard=guard)  # type: ignore[misc]

    def synchronize(device: Any = None) -> None:
        _devices.synchronizations += 1

    def set_device(device: Any) -> None:
        _devices.guard.set_current_device(device if isinstance(device, int) else _devices.resolve(device).index)

    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "is_initialized", lambda: True),
        (torch.cuda, "device_count", lambda: n_devices),
        (torch.cuda, "current_device", _devices.current),
        (torch.cuda, "set_device", set_device),
        (torch.cuda, "synchronize", synchronize),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.cuda, "mem_get_info", lambda device=None: (2**34, 2**34)),
        (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
        (torch.cuda, "get_device_capability", lambda device=None: (8, 6)),  # a consumer's: slow in float64
        (torch.accelerator, "is_available", lambda: True),
        (torch.accelerator, "device_count", lambda: n_devices),
        (torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")),
        (torch.accelerator, "synchronize", synchronize),
        (torch, "Generator", _Generator),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    only_lifts_cpu = torch._C._only_lift_cpu_tensors()
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    for owner, name, value in replaced:
        setattr(owner, name, value)
    # transformers would read checkpoints in threads of its own, where no mode is active.
    loads_at_once = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    torch._C._set_only_lift_cpu_tensors(True)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    if guard is not None:
        guard.exchange_hooks()
    try:
        with _CreateOnDevices():
            yield _devices
    finally:
        if guard is not None:
            guard.exchange_hooks()
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
        torch._C._set_only_lift_cpu_tensors(only_lifts_cpu)
        for owner, name, value in before:
            setattr(owner, name, value)
        del os.environ["HF_DEACTIVATE_ASYNC_LOAD"]
        if loads_at_once is not None:
            os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = loads_at_once
