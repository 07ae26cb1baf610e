"""A lens of another tool: its maps checked against a model, and made into jumps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerjump.errors import BadForeignLens, WrongModel
from layerjump.jumps.jumps import JumpInfo, Jumps, Provenance
from layerjump.jumps.maps import Affine, to_affine
from layerjump.models.fingerprint import identify_model
from layerjump.models.model import Model
from layerjump.models.sites import Pair

UNKNOWN = "unknown"
_MARGIN = 1 << 24  # bytes that a file may have in addition to its numbers
_LONGEST_NOTE = 1000


@dataclass(frozen=True)
class ForeignLens:
    """Maps between our levels, and what their files record about themselves."""

    maps: Mapping[Pair, Affine]
    estimator: str
    text: str = UNKNOWN
    skip_first: int = 0
    notes: dict[str, Any] = field(default_factory=dict)


def to_jumps(lens: ForeignLens, model: Model, source: Path) -> Jumps:
    """Return the lens as jumps of a model; what its files do not record is unknown."""
    infos = {pair: JumpInfo(*pair, lens.estimator) for pair in lens.maps}
    provenance = Provenance(
        **vars(identify_model(model)),
        text=lens.text,
        text_sha256=UNKNOWN,
        tokens=0,
        positions=UNKNOWN,
        skip_first=lens.skip_first,
        special=True,  # none is known to have been left out
        split=UNKNOWN,
        seed=0,
        n_fit=0,
        estimator=lens.estimator,
        settings={"imported_from": source.name, "said": lens.notes},
    )
    return Jumps.from_maps(lens.maps, infos, provenance)


def plain_map(jumps: Jumps, pair: Pair) -> Affine:
    """Return a jump multiplied out in float64: no foreign format has factors, or features of states."""
    name = "the jump {} → {}".format(*pair)
    features = jumps.info[pair].features
    if features != "raw":
        raise BadForeignLens(
            f"{name} reads {features!r} features, which no other tool's file can hold; export jumps of raw states"
        )
    affine = to_affine(jumps[pair]).to(torch.float64)
    if not all(bool(part.isfinite().all()) for part in jumps[pair].parameters()):
        raise BadForeignLens(f"{name} holds NaN or infinite values; fit it again")
    return Affine.of(affine.weight.cpu(), bias=None if affine.bias is None else affine.bias.cpu())


def max_bytes(model: Model, n_maps: int) -> int:
    """Return the largest size of a file with this many maps of a model."""
    return n_maps * (model.d_model**2 + model.d_model) * 8 + _MARGIN


def check_tensor(tensor: Any, shape: tuple[int, ...], name: str, path: Path) -> Tensor:
    """Return a tensor of a file in float64; raise if it cannot be part of a map."""
    dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_nested
    if not dense or tensor.device.type != "cpu":  # `meta` tensors have a shape and no numbers
        raise BadForeignLens(f"{path}: expected a dense tensor for {name}, got a {type(tensor).__name__}")
    if tuple(tensor.shape) != shape:
        raise WrongModel(
            f"{path}: expected shape {shape} for {name} of this model, got {tuple(tensor.shape)}; use the lens that "
            f"was fitted on it"
        )
    if not tensor.is_floating_point():
        raise BadForeignLens(f"{path}: expected floating-point numbers for {name}, got {tensor.dtype}")
    # Jumps are float32: a value that is finite in double precision only would not be usable.
    if not bool(torch.isfinite(tensor.float()).all()):
        raise BadForeignLens(f"{path}: {name} holds NaN, infinite or overlarge values; fit that lens again")
    return tensor.detach().double()


def check_size(name: str, value: Any, expected: int, path: Path) -> None:
    """Compare a size that a file states with the model's."""
    if type(value) is not int:
        raise BadForeignLens(f"{path}: expected an integer for {name}, got {str(value)[:50]!r}")
    if value != expected:
        raise WrongModel(
            f"{path} has {name} {value}, but the model has {expected}; load the model that the lens was fitted on"
        )


def plain_values(record: Any) -> dict[str, Any]:
    """Return the plain values of what a file records about itself, for the provenance."""

    def is_plain(value: Any) -> bool:
        if isinstance(value, float):
            return math.isfinite(value)
        if isinstance(value, str):
            return len(value) <= _LONGEST_NOTE
        return value is None or isinstance(value, bool | int)

    if not isinstance(record, dict):
        return {}
    return {key: record[key] for key in record if isinstance(key, str) and is_plain(record[key])}
