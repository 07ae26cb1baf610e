"""How a model stores its weights: as plain tensors, quantised, offloaded by accelerate, or split over devices.

A plain weight is a floating-point tensor in memory whose values are the weight. Only those can be edited or packed. The
others hold codes and scales (bitsandbytes, torchao), or nothing until a hook loads them for one call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from layerjump.errors import BadModel

PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def describe_storage(weight: Tensor) -> str | None:
    """How a weight is stored that is not a plain tensor, such as "is quantised (torch.uint8)"; None for a plain one."""
    if weight.is_meta:
        return "is not in memory (offloaded)"
    if hasattr(weight, "full_tensor"):
        return "is split over several devices (DTensor)"
    if is_quantized(weight):
        return f"is quantised ({type(weight).__name__}, {str(weight.dtype).removeprefix('torch.')})"
    return None


def is_quantized(weight: Tensor) -> bool:
    """Whether a weight holds codes instead of values; its dtype alone does not tell (4-bit codes in bfloat16)."""
    kind = type(weight)
    return (
        weight.dtype not in PLAIN_DTYPES
        or (issubclass(kind, nn.Parameter) and kind is not nn.Parameter)
        or (is_traceable_wrapper_subclass(weight) and not hasattr(weight, "full_tensor"))
    )


def require_plain(weight: Tensor, name: str) -> None:
    """Raise `BadModel` for a weight that cannot be edited: arithmetic on codes would damage it without a sign."""
    if (storage := describe_storage(weight)) is not None:
        raise BadModel(
            f"the weight {name} {storage}, and only plain weights can be edited (load the model unquantised, "
            f"without offloading)"
        )


def shared_weights(hf: nn.Module) -> set[int]:
    """The identities of the parameters that several modules use."""
    counts = Counter(id(weight) for _, weight in hf.named_parameters(remove_duplicate=False))
    return {identity for identity, count in counts.items() if count > 1}


def quantized_weights(hf: nn.Module) -> list[str]:
    """The names of the quantised weights of a model."""
    return [name for name, weight in hf.named_parameters() if is_quantized(weight)]


def mixes_rows(hf: nn.Module) -> bool:
    """Whether a layer computes a row differently beside other rows: bitsandbytes' int8, whose outliers are columns."""
    return any(hasattr(weight, "SCB") for weight in hf.parameters())


def execution_device(hf: nn.Module) -> torch.device:
    """The device that a model reads its tokens on; of offloaded weights, the one that they are loaded to."""
    name, first = next(hf.named_parameters())
    if not first.is_meta:
        return first.device
    for hook, _ in _offloading_hooks(hf, name):
        return (
            torch.device("cuda", device) if isinstance(device := hook.execution_device, int) else torch.device(device)
        )
    return first.device


def is_offloaded(hf: nn.Module) -> bool:
    """Whether accelerate loads some of the weights for each call of their module."""
    return any(weight.is_meta for weight in hf.parameters())


def load_weight(hf: nn.Module, name: str) -> Tensor:
    """A weight by name; an offloaded one is read from where its hook keeps it."""
    weight: Tensor = hf.get_parameter(name)
    if not weight.is_meta:
        return weight
    for hook, key in _offloading_hooks(hf, name):
        with suppress(KeyError):  # asking first would read the weight twice
            stored: Tensor = hook.weights_map[key]
            return stored.detach()
    raise BadModel(f"the weight {name} is not in memory, and no hook of accelerate loads it; load the model again")


def offloaded_weights(hf: nn.Module) -> list[Any]:
    """The mappings from names to weights that accelerate's hooks read offloaded weights from."""
    hooks = [hook for module in hf.modules() for hook in _hooks(module)]
    return [hook.weights_map for hook in hooks if getattr(hook, "weights_map", None) is not None]


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    hook: Any = getattr(module, "_hf_hook", None)
    return tuple(getattr(hook, "hooks", (hook,)))


def _offloading_hooks(hf: nn.Module, name: str) -> Iterator[tuple[Any, str]]:
    """The hooks that offload a weight, from its own module up, each with the weight's name there."""
    path, _, key = name.rpartition(".")
    while True:
        for hook in _hooks(hf.get_submodule(path)):
            if getattr(hook, "offload", False) and hook.weights_map is not None:
                yield hook, key
        if not path:
            return
        path, _, child = path.rpartition(".")
        key = f"{child}.{key}"


def module_weight(module: nn.Module) -> Tensor:
    """The weight of a module as a plain tensor; an offloaded one is read, a quantised one is an error."""
    weight = load_weight(module, "weight")
    if is_quantized(weight):
        raise BadModel(
            f"expected plain values in the weight of {type(module).__name__}, got one that {describe_storage(weight)}; "
            f"load the model unquantised"
        )
    return weight


@contextmanager
def small_stand_ins(hf: nn.Module) -> Iterator[None]:
    """Replace offloaded weights by random ones that take no memory, and switch accelerate's hooks off.

    What a model computes with what is then seen without reading its weights, which may not fit into memory. A stand-in
    of n rows and m columns is a strided view of about 2 n + m numbers.
    """
    device = execution_device(hf)
    stand_ins: dict[str, nn.Parameter] = {}
    tied: dict[str, str] = getattr(hf, "all_tied_weights_keys", None) or {}

    def stand_in(name: str, weight: nn.Parameter) -> nn.Parameter:
        if not weight.is_meta and weight.device == device:
            return weight
        return stand_ins.setdefault(tied.get(name, name), _stand_in(weight, device))

    with _replaced_weights(list(hf.named_modules()), stand_in, device):
        yield


@contextmanager
def loaded_weights(hf: nn.Module, *paths: str, without: Collection[str] = ()) -> Iterator[None]:
    """Hold the offloaded weights of some modules in memory for several calls, all but those of other modules."""
    device = execution_device(hf)

    def is_in(name: str, paths: Collection[str]) -> bool:
        return any(not path or name == path or name.startswith(f"{path}.") for path in paths)

    def load(name: str, weight: nn.Parameter) -> nn.Parameter:
        if not weight.is_meta:
            return weight
        return nn.Parameter(load_weight(hf, name).to(device, weight.dtype), requires_grad=False)

    modules = [(name, module) for name, module in hf.named_modules() if is_in(name, paths) and not is_in(name, without)]
    with _replaced_weights(modules, load, device):
        yield


@contextmanager
def _replaced_weights(
    modules: Sequence[tuple[str, nn.Module]], replace: Callable[[str, nn.Parameter], nn.Parameter], device: torch.device
) -> Iterator[None]:
    """Replace the parameters of modules by name, and switch their hooks of accelerate off."""
    saved = [(module, dict(module._parameters), dict(module._buffers)) for _, module in modules]
    forwards = [(module, vars(module)["forward"]) for _, module in modules if hasattr(module, "_hf_hook")]
    try:
        for path, module in modules:
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = replace(f"{path}.{name}".lstrip("."), weight)
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        for module, _ in forwards:
            vars(module)["forward"] = vars(module)["_old_forward"]
        yield
    finally:
        for module, forward in forwards:
            vars(module)["forward"] = forward
        for module, parameters, buffers in saved:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def _stand_in(weight: Tensor, device: torch.device) -> nn.Parameter:
    strides = [weight.dim() - axis for axis in range(weight.dim())]  # 2 i + j of a matrix: all its rows differ
    length = 1 + sum(stride * (size - 1) for stride, size in zip(strides, weight.shape, strict=True))
    numbers = torch.randn(max(length, 1), generator=torch.Generator().manual_seed(length))
    numbers = numbers / weight.shape[-1] ** 0.5 if weight.dim() > 1 else 1 + numbers / 4
    return nn.Parameter(numbers.to(device, weight.dtype).as_strided(weight.shape, strides), requires_grad=False)


def weight_names(hf: nn.Module) -> list[str]:
    """The names of all parameters; of tied ones the first. Offloaded weights are tied by name, not by identity."""
    names = [name for name, _ in hf.named_parameters()]
    tied: dict[str, str] = getattr(hf, "all_tied_weights_keys", None) or {}
    order = {name: index for index, name in enumerate(names)}
    later = {max(pair, key=order.__getitem__) for pair in tied.items() if set(pair) <= set(order)}
    return [name for name in names if name not in later]


def stored_tensors(hf: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter as it is stored, by name: of a quantised one its codes and its scales.

    Offloaded weights are read one by one. bitsandbytes reorders 4-bit codes for the CPU at their first use; they come
    in the order of the weight, whichever way they are held.
    """
    quantized = False
    for name in weight_names(hf):
        weight = load_weight(hf, name)
        if hasattr(weight, "full_tensor"):
            weight = weight.full_tensor()
        quantized |= is_quantized(weight)
        for suffix, tensor in _inner_tensors(weight, hf.get_submodule(name.rpartition(".")[0])):
            yield f"{name}{suffix}", tensor.detach()
    if quantized or getattr(hf, "is_quantized", False):
        # GPTQ, AWQ and compressed-tensors hold their codes in buffers.
        for path, module in hf.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield f"{path}.{name}", buffer


def _inner_tensors(weight: Tensor, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    state = getattr(weight, "quant_state", None)
    if state is not None:
        codes, scales = _four_bit(weight, state)
        yield "", codes
        yield "/scales", scales
    elif is_traceable_wrapper_subclass(weight):
        for name in weight.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            for suffix, tensor in _inner_tensors(getattr(weight, name), module):
                yield f"/{name}{suffix}", tensor
    else:
        yield "", weight
        row_scales: Tensor | None = getattr(weight, "SCB", None)
        if row_scales is None:  # after the first use
            row_scales = getattr(getattr(module, "state", None), "SCB", None)
        if row_scales is not None:
            yield "/scales", row_scales


_CPU_ROWS = 32
"""Rows that bitsandbytes interleaves in its order of 4-bit codes for the CPU."""


def avoid_failing_kernels(hf: nn.Module) -> None:
    """Make 4-bit layers run whose sizes bitsandbytes' fast kernel for CPUs does not take: by its general one."""
    for module in hf.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None and getattr(module, "support_avx512bf16_for_cpu", False):
            rows, columns = state.shape
            if rows % _CPU_ROWS or columns % state.blocksize:
                vars(module)["support_avx512bf16_for_cpu"] = False


def _four_bit(weight: Tensor, state: Any) -> tuple[Tensor, Tensor]:
    """The codes of a bitsandbytes 4-bit weight, two in a byte, and the scale of each block of them."""
    data, scales = weight.detach().view(torch.uint8).reshape(-1), state.absmax
    if not getattr(state, "packing_format_for_cpu", False):
        if state.nested:
            from bitsandbytes.functional import dequantize_blockwise

            scales = dequantize_blockwise(scales, state.state2) + state.offset
        return data, scales.reshape(-1).to(torch.bfloat16)
    rows, columns = state.shape
    pairs = data.view(-1, _CPU_ROWS)
    codes = torch.cat([pairs & 0xF, pairs >> 4], 1).view(rows // _CPU_ROWS, columns // 2, _CPU_ROWS, 2)
    codes = codes.transpose(1, 2).reshape(-1, 2)
    return codes[:, 0] << 4 | codes[:, 1], scales.mT.reshape(-1)


def require_gradients(hf: nn.Module) -> None:
    """Raise `BadModel` unless gradients flow through every kind of layer of a model.

    A kernel without gradient gives no error inside a block: the residual stream goes around it, and the gradient would
    be that of the stream alone. So one layer of each quantised kind is tried. What it computes is linear in x, hence
    the gradient of v · f(x) along u must be v · (f(u) − f(0)).
    """
    if is_offloaded(hf):
        raise BadModel(
            "gradients need all weights in memory at once, and those of this model are offloaded; load it without "
            "offloading, or use an estimator in closed form"
        )
    layers: dict[tuple[type, type], nn.Module] = {}
    for module in hf.modules():
        for weight in module.parameters(recurse=False):
            if is_quantized(weight) and hasattr(module, "in_features"):
                layers.setdefault((type(module), type(weight)), module)
    for layer in layers.values():
        if not _has_gradient(layer):
            raise BadModel(
                f"the quantised layers of this model ({type(layer).__name__}) have no gradients on "
                f"{execution_device(hf).type}; load the model unquantised, or use an estimator in closed form"
            )


def _has_gradient(layer: nn.Module) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight = next(layer.parameters(recurse=False))
    x, u = torch.randn(2, 1, 8, layer.in_features, generator=generator).to(weight.device)  # type: ignore[call-overload]
    with torch.no_grad():
        change = layer(u) - layer(torch.zeros_like(u))
    v = torch.randn(change.shape, generator=generator).to(change)
    x.requires_grad_()
    with torch.enable_grad():
        output = layer(x)
    if not output.requires_grad:
        return False
    (gradient,) = torch.autograd.grad(output, x, v, allow_unused=True)
    if gradient is None:
        return False
    expected, size = (v * change).sum(-1), (v.norm(dim=-1) * change.norm(dim=-1)).mean()
    return bool(((gradient * u).sum(-1) - expected).abs().mean() <= 0.05 * size)


def restore_order(hf: nn.Module) -> None:
    """Undo bitsandbytes' order of 4-bit codes for the CPU, before a state dict is made.

    Its own inverse leaves the scales transposed: the state dict would be of other weights, and so would be the model
    itself from then on.
    """
    for module in hf.modules():
        weight: Any = getattr(module, "weight", None)
        state: Any = getattr(weight, "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False) and not state.original_nested:
            codes, scales = _four_bit(weight, state)
            weight.data = codes.reshape(state.original_qshape).view(
                getattr(state, "original_storage_type", torch.uint8)
            )
            state.absmax, state.dtype, state.packing_format_for_cpu = scales.float(), state.original_dtype, False
