"""Write files and directories atomically, lock them, and verify them by checksum.

Files that are never half-written, and that are noticed when somebody else broke them.

A file is written in a temporary folder beside it, synced, and renamed over the old one: whenever a
process dies, the old file or the new one is there, whole. A tensor file carries a checksum of all
it holds, so that a changed byte is an error and not a wrong number.

An output folder has one writer at a time, and what a killed one left half done is put right by the next.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from layerjump.errors import BadArtifact, LayerjumpError, argument, one_line

_REASONS = {
    errno.ENOSPC: "the disk is full; free some space or choose another folder",
    errno.EDQUOT: "your disk quota is used up; free some space or choose another folder",
    errno.EFBIG: "it is larger than this system lets a file be (`ulimit -f`); raise the limit",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: "permission is denied; choose another folder or change its permissions",
    errno.EPERM: "permission is denied; choose another folder or change its permissions",
    errno.ENOENT: "its folder does not exist; make it first",
    errno.ENOTDIR: "what should be its folder is a file; choose another place",
    errno.EEXIST: "what should be its folder is a file; choose another place",
    errno.EISDIR: "a folder of that name is in the way; remove it or choose another place",
}
# torch.save does not say why it could not write, nor that it could not.
_UNTOLD = -1
_REASONS[_UNTOLD] = "it was cut short, as by a full disk; free some space or choose another folder"
_TORCH_CANNOT_WRITE = ("inline_container.cc", "iostream error")
_LEFTOVER_SECONDS = 3600
# The one metadata key of our tensor files. One, because safetensors writes several in random order,
# and the same content must give the same bytes.
_KEY = "layerjump"


def replace_file(
    path: Path, write: Callable[[Path], object], *, last: Callable[[], None] | None = None
) -> None:
    """Let `write` make a new file, then put it in the place of `path` in one step.

    `last` is called when the new file is safely on disk, just before it takes the old one's place.
    """
    with writing(path):
        _sweep(path)
        # A folder of our own, so that what a library leaves behind when it is killed is in there too.
        with tempfile.TemporaryDirectory(
            prefix=f".{path.name}.", suffix=".tmp", dir=path.parent, ignore_cleanup_errors=True
        ) as place:
            temporary = Path(place) / path.name
            temporary.touch()
            mode = temporary.stat().st_mode & 0o777  # what the user's umask allows
            write(temporary)
            temporary.chmod(mode)  # safetensors makes its files private
            sync(temporary)
            if last:
                last()
            os.replace(temporary, path)
        sync(path.parent)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn whatever stops a file from being written into one line that names it."""
    try:
        yield
    except Exception as error:
        number = _system_error(error)
        if number is None:
            raise
        reason = _REASONS.get(number, one_line(error))
        raise BadArtifact(f"{path} cannot be written: {reason}") from error


def _system_error(error: BaseException) -> int | None:
    """The system's error number in what a library raised when it could not write; None: it was something else."""
    if isinstance(error, OSError):
        return error.errno or 0
    if isinstance(error, LayerjumpError):
        return None  # it says what is wrong already
    # safetensors and tokenizers hide the number in their messages; those of tokenizers have no kind of their own.
    if found := re.search(r"os error (\d+)", str(error)):
        return int(found[1])
    if isinstance(error, SafetensorError):
        return 0
    return _UNTOLD if any(words in str(error) for words in _TORCH_CANNOT_WRITE) else None


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a folder
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep(path: Path) -> None:
    """Remove what killed processes left of `path`: temporary folders that nobody writes to any more."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError):  # its owner may be about to remove it
            touched = max(item.stat().st_mtime for item in (leftover, *leftover.iterdir()))
            if time.time() - touched > _LEFTOVER_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)


def write_tensors(
    path: Path,
    tensors: dict[str, Tensor],
    metadata: dict[str, str],
    *,
    last: Callable[[], None] | None = None,
) -> None:
    """Write a safetensors file; the same content gives the same bytes."""
    packed = _packed(tensors)
    seal = {"metadata": metadata, "sha256": _digest(packed, metadata)}
    header = {_KEY: json.dumps(seal, sort_keys=True)}
    replace_file(path, lambda temporary: save_file(packed, temporary, header), last=last)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file of `write_tensors`, memory-mapped: its tensors and metadata."""
    _require_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    except Exception as error:
        raise BadArtifact(
            f"{path} cannot be read as safetensors, so it is cut short, damaged or of another kind "
            f"({one_line(error)}); make it again"
        ) from error
    if _KEY not in header:
        raise BadArtifact(f"{path} was not written by layerjump; give a file that was")
    seal = parse_json(header[_KEY], path)
    metadata: Any = seal.get("metadata")
    if not _is_metadata(metadata) or seal.get("sha256") != _digest(tensors, metadata):
        raise BadArtifact(f"{path} was changed after it was written; make it again")
    return tensors, metadata


def _packed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sorted by name, on the CPU, none sharing memory with another (safetensors refuses those)."""
    packed: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        address = tensor.untyped_storage().data_ptr()
        packed[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return packed


def _digest(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """The sha256 of everything a tensor file says."""
    said = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    digest = hashlib.sha256(json.dumps([metadata, said], sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _is_metadata(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write an object as readable JSON, keys in the order given."""
    write_text(path, dump_json(data, path, indent=2) + "\n")


def dump_json(
    data: dict[str, Any], path: Path, *, indent: int | None = None, sort_keys: bool = False
) -> str:
    """The JSON text to be written into `path`; ASCII, because names may hold what UTF-8 cannot."""
    try:
        return json.dumps(data, indent=indent, sort_keys=sort_keys, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadArtifact(
            f"{path} cannot be written, because JSON does not hold all that it should say "
            f"({one_line(error)}); give finite numbers, strings, lists and objects"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8", newline="\n")

    replace_file(path, write)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    _require_file(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadArtifact(f"{path} cannot be read: {one_line(error)}") from error
    return parse_json(content, path)


def parse_json(text: str | bytes, path: Path) -> dict[str, Any]:
    """Read JSON text that was found in the file `path`; it must be an object."""
    try:
        text = text.decode() if isinstance(text, bytes) else text
        data = json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise BadArtifact(f"{path} is nested too deeply to be ours; make it again") from error
    except ValueError as error:
        raise BadArtifact(f"{path} is not JSON: {one_line(error)}; make it again") from error
    if not isinstance(data, dict):
        kind = type(data).__name__
        raise BadArtifact(f"{path} holds a JSON {kind}, but an object was wanted; make it again")
    return data


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def file_sha256(path: Path) -> str:
    """The sha256 of a file's bytes, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_file(path: Path) -> None:
    if path.is_dir():
        raise BadArtifact(f"{path} is a folder, but a file was wanted; give the file")
    if not path.is_file():
        raise BadArtifact(f"there is no file {path}; check the name")


OLD = "old"
"""What a folder is called while the new one takes its name."""


@contextlib.contextmanager
def only_writer(folder: Path, *, replaced: bool = False) -> Iterator[None]:
    """Hold a folder for one run, or say that another has it. The system lets go of what a killed run held.

    `replaced` folders get their name when they are whole, so that their lock lies beside them; into others files are
    written one by one, perhaps where nothing beside them may be.
    """
    folder = folder.expanduser()
    place = folder.parent if replaced else folder
    path = place / (f".{folder.name}.lock" if replaced else ".lock")
    with writing(folder):
        new = not place.exists()
        place.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise BadArtifact(
                f"another run is writing {folder}; wait until it ends, or give another folder"
            ) from None
    try:
        if replaced:
            _put_right(folder)
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is ours: whoever waits for it sees that it is gone
        lock.release()
        if new:
            with contextlib.suppress(OSError):  # something was written
                place.rmdir()


def _put_right(folder: Path) -> None:
    """Give a folder its name back if a kill came between two names; remove what was never finished."""
    for leftover in folder.parent.glob(f".{glob.escape(folder.name)}.*.tmp"):
        if (leftover / OLD).exists() and not folder.exists():
            os.replace(leftover / OLD, folder)
        shutil.rmtree(leftover, ignore_errors=True)


def check_free(folder: Path, *, force: bool) -> None:
    """Refuse to write over something, before the work is done rather than after."""
    folder = folder.expanduser()
    if not force and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadArtifact(
            f"{folder} exists and would be overwritten; give another folder, or {argument('force', True)}"
        )


def replace_folder(folder: Path, write: Callable[[Path], None], *, force: bool) -> None:
    """Let `write` fill a new folder, then give it its name in one step; an interruption leaves the old one, or none."""
    check_free(folder, force=force)
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent, ignore_cleanup_errors=True
        ) as place:
            new, old = Path(place) / "new", Path(place) / OLD
            new.mkdir()
            write(new)
            for path in new.rglob("*"):
                sync(path)
            if folder.exists():
                os.replace(folder, old)
            os.replace(new, folder)
            shutil.rmtree(old, ignore_errors=True)
        sync(folder.parent)
