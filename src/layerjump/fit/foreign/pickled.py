"""Pickles that hold tensors, and nothing else.

A pickle is a program: it names functions and calls them. The reader here knows the three names that a tensor needs,
answers each with a function of its own, and refuses the file at any other.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from layerjump.errors import BadForeignLens, UnsafePickle, one_line
from layerjump.fit import files
from layerjump.fit.foreign import torch_file
from layerjump.fit.foreign.lens import check_size, too_large


def read(path: Path, most: int) -> Any:
    """The tensor, or list of tensors, that somebody pickled into a file of at most so many bytes."""
    check_size(path, most)
    try:
        # From memory, of which there is enough for all of it: for what a file only claims to hold there may not be.
        data = path.read_bytes()
        _check_memo(data)
        return _TensorsOnly(io.BytesIO(data), path, most).load()
    except BadForeignLens:
        raise
    except Exception as error:
        raise BadForeignLens(
            f"{path} cannot be read, so it is cut short, damaged or no pickle of tensors ({one_line(error)}); "
            f"get it again"
        ) from error


def write(path: Path, content: Tensor | list[Tensor]) -> None:
    """Pickle tensors as the format's own authors do."""

    def dump(temporary: Path) -> None:
        with temporary.open("wb") as file:
            pickle.dump(content, file, protocol=4)

    files.replace_file(path, dump)


def _check_memo(data: bytes) -> None:
    """What a pickle keeps for later has a number, and Python makes room for all numbers below it."""
    for step, number, _ in pickletools.genops(data):
        if step.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(number or 0) > len(data):
            raise ValueError(f"it keeps a thing number {number}, and is {len(data)} bytes long")


class _TensorsOnly(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, path: Path, most: int) -> None:
        super().__init__(file)
        self._path, self._most = path, most

    def find_class(self, module: str, name: str) -> Any:
        # Functions made anew for every name: a pickle can set attributes of whatever it is given.
        asked = f"{module}.{name}"
        if asked == "torch._utils._rebuild_tensor_v2":
            return lambda storage, offset, size, stride, *_: self._tensor(
                storage, offset, size, stride
            )
        if asked == "torch.storage._load_from_bytes":
            return lambda data: self._storage(data)
        if asked == "collections.OrderedDict":  # a tensor's hooks, of which it has none
            return lambda: OrderedDict[str, Any]()
        raise UnsafePickle(
            f"{self._path} asks for {asked[:100]}, but tensors were wanted; nothing of it was run: get the matrices "
            f"from somebody you trust"
        )

    def persistent_load(self, pid: Any) -> NoReturn:
        raise BadForeignLens(
            f"{self._path} was written by torch.save, but pickled tensors were wanted; pickle them"
        )

    def _storage(self, data: bytes) -> Any:
        # torch's own function of this name would unpickle anything, and of any size.
        file = io.BytesIO(data)
        if zipfile.is_zipfile(file) and (size := torch_file.unpacked(file)) > self._most:
            raise too_large(self._path, size, self._most)
        file.seek(0)
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise UnsafePickle(
                f"{self._path} has something else than numbers inside a tensor; nothing of it was run: get the "
                f"matrices from somebody you trust"
            ) from error

    def _tensor(
        self, storage: Any, offset: int, size: Sequence[int], stride: Sequence[int]
    ) -> Tensor:
        numbers = torch.empty(0, dtype=storage.dtype).set_(storage)
        return numbers.as_strided(
            tuple(size), tuple(stride), offset
        )  # an error if they are too few
