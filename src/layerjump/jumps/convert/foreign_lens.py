"""A lens read from another tool's files, checked against a model and converted to jumps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerjump import __version__
from layerjump.errors import BadForeignLens, WrongModel
from layerjump.jumps.jumps import JumpInfo, Jumps, Provenance
from layerjump.jumps.maps import Affine, to_affine
from layerjump.jumps.pairs import Pair
from layerjump.models.fingerprint import describe_model
from layerjump.models.model import Model

UNKNOWN = "unknown"
_MARGIN = 1 << 24  # bytes a file may have besides its numbers
_LONGEST_NOTE = 1000


@dataclass(frozen=True)
class ForeignLens:
    """Maps between our levels, and what their files say about themselves."""

    maps: Mapping[Pair, Affine]
    estimator: str
    text: str = UNKNOWN
    skip_first: int = 0
    said: dict[str, Any] = field(default_factory=dict)


def to_jumps(lens: ForeignLens, model: Model, source: Path) -> Jumps:
    """The lens as jumps of a model; what its files do not say is unknown, and nothing is made up."""
    infos = {pair: JumpInfo(*pair, lens.estimator) for pair in lens.maps}
    known = Provenance(
        **describe_model(model),
        text=lens.text,
        text_sha256=UNKNOWN,
        tokens=0,
        positions=UNKNOWN,
        skip_first=lens.skip_first,
        special=True,  # none is known to have been left out
        split=UNKNOWN,
        n_fit=0,
        n_select=0,
        n_test=0,
        seed=0,
        estimator=lens.estimator,
        settings={"imported_from": source.name, "said": lens.said},
        layerjump=__version__,
    )
    return Jumps.of(lens.maps, infos, known)


def most_bytes(model: Model, n_maps: int) -> int:
    """How large a file with so many maps of a model can be: anything larger is not read at all."""
    return n_maps * (model.d_model**2 + model.d_model) * 8 + _MARGIN


def check_size(path: Path, most: int) -> None:
    """Refuse a file that is absent, or larger than what it should hold can be."""
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "is not there"
        raise BadForeignLens(f"{path} {kind}, but a file was wanted; check the name")
    if (size := path.stat().st_size) > most:
        raise too_large(path, size, most)


def too_large(path: Path, size: int, most: int) -> BadForeignLens:
    return BadForeignLens(
        f"{path} holds {size:,} bytes, but maps of this model take at most {most:,}; give the lens that was fitted on "
        f"this model, or the model that it was fitted on"
    )


def checked(tensor: Any, shape: tuple[int, ...], name: str, path: Path) -> Tensor:
    """A tensor found in a file, in double precision; an error if it is not what a map is made of."""
    plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_nested
    if not plain or tensor.device.type != "cpu":  # `meta` tensors have a shape and no numbers
        raise BadForeignLens(
            f"{path}: {name} is a {type(tensor).__name__}, but a dense tensor was wanted; give another file"
        )
    if tuple(tensor.shape) != shape:
        raise WrongModel(
            f"{path}: {name} has shape {tuple(tensor.shape)}, but {shape} was wanted for this model; give the lens "
            f"that was fitted on it"
        )
    if not tensor.is_floating_point():
        raise BadForeignLens(
            f"{path}: {name} holds {tensor.dtype}, but floating-point numbers were wanted; give another file"
        )
    # Jumps are float32: what is finite in double precision alone would not be in use.
    if not bool(torch.isfinite(tensor.float()).all()):
        raise BadForeignLens(
            f"{path}: {name} holds NaN, infinite or overlarge values; fit that lens again"
        )
    return tensor.detach().double()


def check_said(name: str, said: Any, wanted: int, path: Path) -> None:
    """Compare a size that a file states with the model's own."""
    if type(said) is not int:
        raise BadForeignLens(
            f"{path}: {name} is {str(said)[:50]!r}, but an integer was wanted; give another file"
        )
    if said != wanted:
        raise WrongModel(
            f"{path} says {name} {said}, but the model given has {wanted}; load the model that the lens was fitted on"
        )


def notes(found: Any) -> dict[str, Any]:
    """Of what a file says about itself, the plain values: these go into the provenance."""
    if not isinstance(found, dict):
        return {}
    return {key: found[key] for key in found if isinstance(key, str) and _is_note(found[key])}


def _is_note(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return len(value) <= _LONGEST_NOTE
    return value is None or isinstance(value, bool | int)


def plain_map(jumps: Jumps, pair: Pair) -> Affine:
    """A jump multiplied out in double precision: no foreign format has factors, or features of states."""
    info = jumps.info[pair]
    if info.features != "raw":
        raise BadForeignLens(
            f"the jump {info.source} → {info.target} reads {info.features!r} features, which no other tool's file can "
            f"say; export jumps that read raw states"
        )
    affine = to_affine(jumps[pair]).to(torch.float64)
    if not all(bool(part.isfinite().all()) for part in jumps[pair].parameters()):
        raise BadForeignLens(
            f"the jump {info.source} → {info.target} holds NaN or infinite values; fit it again"
        )
    return Affine.of(affine.weight.cpu(), bias=None if affine.bias is None else affine.bias.cpu())
