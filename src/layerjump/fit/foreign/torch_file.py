"""Files of `torch.save`, read so that nothing in them is run, and written whole or not at all."""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from layerjump.errors import BadForeignLens, UnsafePickle, one_line
from layerjump.fit import files
from layerjump.fit.foreign.lens import check_size, too_large


def read(path: Path, most: int) -> Any:
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


def write(path: Path, content: Any) -> None:
    """Write what `torch.load` reads back."""
    files.replace_file(path, lambda temporary: torch.save(content, temporary))
