"""Quantisation at load, through transformers' own configurations of bitsandbytes and torchao."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from layerjump.errors import BadModel, argument


@dataclass(frozen=True)
class _Format:
    package: str
    make_config: Callable[[torch.dtype | None], Any]
    """Makes transformers' configuration, given the dtype to compute in; None: the package's default."""


def _bitsandbytes_int8(dtype: torch.dtype | None) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True)


def _bitsandbytes_4bit(kind: str) -> Callable[[torch.dtype | None], Any]:
    def make_config(dtype: torch.dtype | None) -> Any:
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=dtype)

    return make_config


def _torchao_int8(dtype: torch.dtype | None) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


_FORMATS = {
    "int8": _Format("bitsandbytes", _bitsandbytes_int8),
    "nf4": _Format("bitsandbytes", _bitsandbytes_4bit("nf4")),
    "fp4": _Format("bitsandbytes", _bitsandbytes_4bit("fp4")),
    "torchao-int8": _Format("torchao", _torchao_int8),
}
QUANTIZATIONS = ("none", *_FORMATS)


def quantization_config(quantization: str | None, dtype: torch.dtype | None) -> Any:
    """Return transformers' configuration of a format of `QUANTIZATIONS`; None for none."""
    if quantization in (None, "none"):
        return None
    if quantization not in _FORMATS:
        raise BadModel(f"expected {argument('quantization')} of {', '.join(QUANTIZATIONS)}, got {quantization!r}")
    chosen = _FORMATS[quantization]
    if find_spec(chosen.package) is None:
        raise BadModel(
            f"{argument('quantization', quantization)} needs {chosen.package}, which is not installed; run "
            f"`pip install {chosen.package}`"
        )
    return chosen.make_config(dtype)
