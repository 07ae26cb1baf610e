"""Lenses in other tools' files: read without running any code in them, checked against a model, made into jumps.

A pickle is a program: it names functions and calls them. The unpickler here knows the three names that a tensor needs,
answers each with a function of its own, and refuses the file at any other. A file larger than the maps of a model can
be is not read at all.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
from torch import Tensor

from layerjump.errors import BadForeignLens, UnsafePickle, WrongModel, one_line
from layerjump.io import replace_file
from layerjump.jumps.jumps import JumpInfo, Jumps, Provenance
from layerjump.jumps.maps import Affine, to_affine
from layerjump.models.fingerprint import identify_model
from layerjump.models.model import Model
from layerjump.models.structure import Pair

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


# -- checks


def max_bytes(model: Model, n_maps: int) -> int:
    """Return the largest size of a file with this many maps of a model."""
    return n_maps * (model.d_model**2 + model.d_model) * 8 + _MARGIN


def check_file(path: Path, limit: int) -> None:
    """Raise `BadForeignLens` for a file that is absent, or larger than `limit` bytes."""
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise BadForeignLens(f"expected a file, but {path} {problem}")
    _check_bytes(path, path.stat().st_size, limit)


def _check_bytes(path: Path, size: int, limit: int) -> None:
    if size > limit:
        raise BadForeignLens(
            f"{path} holds {size:,} bytes, but maps of this model take at most {limit:,}; use the lens that was fitted "
            f"on this model, or the model that it was fitted on"
        )


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


# -- pickles


def read_pickle(path: Path, limit: int) -> Any:
    """Read the tensor, or list of tensors, in a pickle of at most `limit` bytes."""
    check_file(path, limit)
    try:
        # From memory, which suffices for the file; it may not suffice for what the file claims to hold.
        data = path.read_bytes()
        for step, number, _ in pickletools.genops(data):
            # Python allocates memo slots for all numbers below the one used.
            if step.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(number or 0) > len(data):
                raise ValueError(f"it has a memo number {number}, and is {len(data)} bytes long")
        return _TensorUnpickler(io.BytesIO(data), path, limit).load()
    except BadForeignLens:
        raise
    except Exception as error:
        raise BadForeignLens(
            f"{path} cannot be read: it is truncated, damaged or not a pickle of tensors ({one_line(error)}); get it "
            f"again"
        ) from error


def write_pickle(path: Path, content: Tensor | list[Tensor]) -> None:
    """Pickle tensors as the authors of the format do."""
    replace_file(path, lambda temporary: temporary.write_bytes(pickle.dumps(content, protocol=4)))


class _TensorUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, path: Path, limit: int) -> None:
        super().__init__(file)
        self._path, self._limit = path, limit

    def find_class(self, module: str, name: str) -> Any:
        # A new function for every name: a pickle can set attributes of whatever it is handed.
        requested = f"{module}.{name}"
        if requested == "torch._utils._rebuild_tensor_v2":
            return lambda storage, offset, size, stride, *_: self._tensor(storage, offset, size, stride)
        if requested == "torch.storage._load_from_bytes":
            return lambda data: self._storage(data)
        if requested == "collections.OrderedDict":  # a tensor's hooks, of which it has none
            return lambda: OrderedDict[str, Any]()
        raise UnsafePickle(
            f"{self._path} asks for {requested[:100]}, expected tensors only; nothing of it was run: get the matrices "
            f"from a source you trust"
        )

    def persistent_load(self, pid: Any) -> NoReturn:
        raise BadForeignLens(f"expected pickled tensors, but {self._path} is a file of torch.save")

    def _storage(self, data: bytes) -> Any:
        # torch's own function of this name would unpickle anything, and of any size.
        file = io.BytesIO(data)
        if zipfile.is_zipfile(file):
            _check_bytes(self._path, _unpacked_bytes(file), self._limit)
        file.seek(0)
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise UnsafePickle(
                f"{self._path} has more than numbers inside a tensor; nothing of it was run: get the matrices from a "
                f"source you trust"
            ) from error

    def _tensor(self, storage: Any, offset: int, size: Sequence[int], stride: Sequence[int]) -> Tensor:
        numbers = torch.empty(0, dtype=storage.dtype).set_(storage)
        return numbers.as_strided(tuple(size), tuple(stride), offset)  # raises if they are too few


# -- files of torch.save


def read_torch(path: Path, limit: int) -> Any:
    """Read tensors, numbers, text, lists and dictionaries from a file of torch.save of at most `limit` bytes."""
    check_file(path, limit)
    try:
        size = _unpacked_bytes(path)
    except Exception as error:  # a damaged directory fails in ways that zipfile does not name
        raise BadForeignLens(
            f"{path} is not a file of torch.save: truncated, of another kind, or older than torch 1.6 "
            f"({one_line(error)}); save it again with a current torch"
        ) from error
    _check_bytes(path, size, limit)  # a small file can unpack to a large one
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # Not torch's own message, which goes on to advise loading the file without this protection.
        requested = re.search(r"GLOBAL (\S+)", str(error))
        if requested is None:
            raise BadForeignLens(f"{path} cannot be read: it is damaged; get it again") from error
        raise UnsafePickle(
            f"{path} asks for {requested[1]}, expected tensors, numbers and text only; nothing of it was run: get the "
            f"lens from a source you trust"
        ) from error
    except Exception as error:
        raise BadForeignLens(
            f"{path} cannot be read: it is truncated or damaged ({one_line(error)}); get it again"
        ) from error


def write_torch(path: Path, content: Any) -> None:
    """Write what `torch.load` reads back."""
    replace_file(path, lambda temporary: torch.save(content, temporary))


def _unpacked_bytes(file: Path | IO[bytes]) -> int:
    with zipfile.ZipFile(file) as archive:
        return sum(item.file_size for item in archive.infolist())
