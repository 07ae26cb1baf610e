"""Read pickles and torch files without running any code in them.

Pickles that hold tensors, and nothing else.

A pickle is a program: it names functions and calls them. The reader here knows the three names that a tensor needs,
answers each with a function of its own, and refuses the file at any other.

Files of `torch.save`, read so that nothing in them is run, and written whole or not at all.
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
from layerjump.jumps.convert.foreign_lens import check_size, too_large


def read_pickle(path: Path, most: int) -> Any:
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


def write_pickle(path: Path, content: Tensor | list[Tensor]) -> None:
    """Pickle tensors as the format's own authors do."""

    def dump(temporary: Path) -> None:
        with temporary.open("wb") as file:
            pickle.dump(content, file, protocol=4)

    replace_file(path, dump)


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
        if zipfile.is_zipfile(file) and (size := unpacked(file)) > self._most:
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


def read_torch(path: Path, most: int) -> Any:
    """What the file holds: tensors, numbers, text, lists and dictionaries, of at most so many bytes."""
    check_size(path, most)
    try:
        size = unpacked(path)
    except Exception as error:  # a damaged list of members fails in ways that zipfile does not name
        raise BadForeignLens(
            f"{path} is no file of torch.save: cut short, of another kind, or older than torch 1.6 "
            f"({one_line(error)}); save it again with a current torch"
        ) from error
    if size > most:  # a small file can unpack to a large one
        raise too_large(path, size, most)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _refused(path, error) from error
    except Exception as error:
        raise BadForeignLens(
            f"{path} cannot be read, so it is cut short or damaged ({one_line(error)}); get it again"
        ) from error


def unpacked(file: Path | IO[bytes]) -> int:
    """How many bytes a file of torch.save unpacks to; an error if it is no such file."""
    with zipfile.ZipFile(file) as packed:
        return sum(item.file_size for item in packed.infolist())


def _refused(path: Path, error: Exception) -> BadForeignLens:
    # torch's own message goes on to advise loading it without this protection.
    asked = re.search(r"GLOBAL (\S+)", str(error))
    if asked is None:
        return BadForeignLens(f"{path} cannot be read, so it is damaged; get it again")
    return UnsafePickle(
        f"{path} asks for {asked[1]}, but tensors, numbers and text were wanted; nothing of it was run: get the lens "
        f"from somebody you trust"
    )


def write_torch(path: Path, content: Any) -> None:
    """Write what `torch.load` reads back."""
    replace_file(path, lambda temporary: torch.save(content, temporary))
