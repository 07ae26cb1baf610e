"""Quantise maps to half precision or int8."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from layerjump.jumps.maps import Affine

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
STORAGES = ("float32", *HALVES, "int8")


class QuantizedMap(NamedTuple):
    """A map as it comes back from storage, and the bytes it took there."""

    affine: Affine
    n_bytes: int


def quantize_map(affine: Affine, storage: str) -> QuantizedMap:
    """Write a map in a storage's numbers and read it back in float64: what is lost is lost."""
    if storage in HALVES:
        return QuantizedMap(affine.to(HALVES[storage]).to(torch.float64), 2 * affine.n_parameters)
    if storage == "float32":
        return QuantizedMap(affine.to(torch.float32).to(torch.float64), 4 * affine.n_parameters)
    if storage != "int8":
        raise ValueError(f"storage given is {storage!r}; give one of {', '.join(STORAGES)}")
    written = [quantised(factor) for factor in affine.factors]
    read = tuple(dequantised(codes, scales) for codes, scales in written)
    n_bytes = sum(codes.nbytes + scales.nbytes for codes, scales in written)
    # The bias is as small as the scales, and stays in float32.
    bias = None if affine.bias is None else affine.bias.float()
    n_bytes += 0 if bias is None else bias.nbytes
    return QuantizedMap(
        replace(affine, factors=read, bias=None if bias is None else bias.double()), n_bytes
    )


def quantised(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes and each row's float32 scale: its largest entry becomes ±127."""
    scales = (matrix.abs().amax(1) / 127).float()
    safe = torch.where(scales > 0, scales, 1).to(matrix.dtype)
    codes = (matrix / safe[:, None]).round().clamp(-127, 127)
    return codes.to(torch.int8), scales


def dequantised(codes: Tensor, scales: Tensor) -> Tensor:
    """The matrix that codes and scales stand for, in float64."""
    return codes.double() * scales.double()[:, None]
