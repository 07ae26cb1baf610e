"""Read tensors from pickles and files of torch.save without running any code in them.

A pickle is a program: it names functions and calls them. The unpickler here knows the three names that a tensor needs,
answers each with a function of its own, and refuses the file at any other. A file larger than the maps of a model can
be is not read at all.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
from torch import Tensor

from layerjump.errors import BadForeignLens, UnsafePickle, one_line
from layerjump.io import replace_file


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
