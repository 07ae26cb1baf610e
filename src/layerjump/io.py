"""Write files and directories atomically, lock them, and verify them by checksum.

A file is written in a temporary folder next to it, synced, and renamed over the old one: whenever a process dies, the
old file or the new one is there, complete. Folders are replaced in the same way. A tensor file carries a checksum of
its content, so that a changed byte is an error and not a wrong number. An output folder has one writer at a time.
`cache_home` is the folder of the caches.
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
from platformdirs import user_cache_path
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
    errno.ENOTDIR: "its parent is a file, not a folder; choose another path",
    errno.EEXIST: "its parent is a file, not a folder; choose another path",
    errno.EISDIR: "a folder has that name; remove it or choose another path",
}
# torch.save reports neither the system's error number nor, in its type, that writing failed.
_UNKNOWN_ERROR = -1
_REASONS[_UNKNOWN_ERROR] = "it was cut short, as by a full disk; free some space or choose another folder"
_TORCH_CANNOT_WRITE = ("inline_container.cc", "iostream error")
_LEFTOVER_SECONDS = 3600
# The only metadata key of our tensor files: safetensors writes several in random order, and the same content must
# give the same bytes.
_KEY = "layerjump"
_OLD = "old"  # name of a folder while the new one takes its name


def replace_file(path: Path, write: Callable[[Path], object], *, last: Callable[[], None] | None = None) -> None:
    """Let `write` write a new file, then replace `path` by it in one step.

    `last` is called when the new file is safely on disk, just before it replaces the old one.
    """
    with writing(path):
        # Temporary folders that killed writers of `path` left are removed.
        for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
            with contextlib.suppress(OSError):  # its owner may be about to remove it
                touched = max(item.stat().st_mtime for item in (leftover, *leftover.iterdir()))
                if time.time() - touched > _LEFTOVER_SECONDS:
                    shutil.rmtree(leftover, ignore_errors=True)
        # Inside a folder, so that files which a killed library leaves are in there too.
        with _temporary_folder(path) as folder:
            temporary = folder / path.name
            temporary.touch()
            mode = temporary.stat().st_mode & 0o777  # as the user's umask allows
            write(temporary)
            temporary.chmod(mode)  # safetensors writes files that only their owner may read
            sync(temporary)
            if last:
                last()
            os.replace(temporary, path)
        sync(path.parent)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise whatever stops a file from being written as a `BadArtifact` of one line that names the file."""
    try:
        yield
    except Exception as error:
        number = _system_error(error)
        if number is None:
            raise
        reason = _REASONS.get(number, one_line(error))
        raise BadArtifact(f"{path} cannot be written: {reason}") from error


def _system_error(error: BaseException) -> int | None:
    """The system's error number of a failed write, in whatever form a library raised it; None: another error."""
    if isinstance(error, OSError):
        return error.errno or 0
    if isinstance(error, LayerjumpError):
        return None  # its message says what is wrong
    # safetensors and tokenizers put the number in their messages; tokenizers raises a bare Exception.
    if match := re.search(r"os error (\d+)", str(error)):
        return int(match[1])
    if isinstance(error, SafetensorError):
        return 0
    return _UNKNOWN_ERROR if any(text in str(error) for text in _TORCH_CANNOT_WRITE) else None


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a folder
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """A temporary folder next to `path`, on the same file system."""
    with tempfile.TemporaryDirectory(
        prefix=f".{path.name}.", suffix=".tmp", dir=path.parent, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def write_tensors(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str], *, last: Callable[[], None] | None = None
) -> None:
    """Write a safetensors file; the same content gives the same bytes."""
    # Sorted by name, on the CPU, none sharing memory with another (safetensors refuses those).
    packed: dict[str, Tensor] = {}
    addresses: set[int] = set()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        address = tensor.untyped_storage().data_ptr()
        packed[name] = tensor.clone() if address in addresses else tensor
        addresses.add(address)
    seal = {"metadata": metadata, "sha256": _digest(packed, metadata)}
    header = {_KEY: json.dumps(seal, sort_keys=True)}
    replace_file(path, lambda temporary: save_file(packed, temporary, header), last=last)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file of `write_tensors`, memory-mapped: its tensors and metadata."""
    with _open_tensors(path) as file:
        header = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    metadata, sha256 = _read_seal(header, path)
    if sha256 != _digest(tensors, metadata):
        raise BadArtifact(f"{path} was changed after it was written; make it again")
    return tensors, metadata


def read_metadata(path: Path) -> dict[str, str]:
    """Read the metadata of a file of `write_tensors` without its tensors, so without verifying its checksum."""
    with _open_tensors(path) as file:
        header = file.metadata() or {}
    return _read_seal(header, path)[0]


def open_tensors(path: Path) -> Any:
    """Open a file of `write_tensors` to read tensors from it one by one, without verifying its checksum."""
    with _open_tensors(path):  # which tells what is wrong with it
        return safe_open(path, framework="pt")


@contextlib.contextmanager
def _open_tensors(path: Path) -> Iterator[Any]:
    _require_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except Exception as error:
        raise BadArtifact(
            f"{path} cannot be read as safetensors: it is truncated, damaged or of another format "
            f"({one_line(error)}); make it again"
        ) from error


def _read_seal(header: dict[str, str], path: Path) -> tuple[dict[str, str], object]:
    """The metadata and the checksum in the header of a file of `write_tensors`."""
    if _KEY not in header:
        raise BadArtifact(f"expected a file written by layerjump, got {path}")
    seal = parse_json(header[_KEY], path)
    metadata: Any = seal.get("metadata")
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise BadArtifact(f"{path} was changed after it was written; make it again")
    return metadata, seal.get("sha256")


def _digest(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """The sha256 of a tensor file's metadata, dtypes, shapes and values."""
    layout = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    digest = hashlib.sha256(json.dumps([metadata, layout], sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write an object as indented JSON, its keys in order."""
    write_text(path, dump_json(data, path, indent=2) + "\n")


def dump_json(data: dict[str, Any], path: Path, *, indent: int | None = None, sort_keys: bool = False) -> str:
    """The JSON text to write to `path`; ASCII, because names may have characters that UTF-8 cannot encode."""
    try:
        return json.dumps(data, indent=indent, sort_keys=sort_keys, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadArtifact(
            f"{path} cannot be written: expected finite numbers, strings, lists and objects, as JSON holds "
            f"({one_line(error)})"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8", newline="\n"))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    _require_file(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadArtifact(f"{path} cannot be read: {one_line(error)}") from error
    return parse_json(content, path)


def parse_json(text: str | bytes, path: Path) -> dict[str, Any]:
    """Parse the JSON text of the file `path`, which must be an object."""
    try:
        text = text.decode() if isinstance(text, bytes) else text
        data = json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise BadArtifact(f"{path} is nested too deeply; make it again") from error
    except ValueError as error:
        raise BadArtifact(f"{path} is not JSON: {one_line(error)}; make it again") from error
    if not isinstance(data, dict):
        kind = type(data).__name__
        raise BadArtifact(f"expected a JSON object in {path}, got {kind}; make it again")
    return data


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def file_sha256(path: Path) -> str:
    """The sha256 of a file's bytes, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_file(path: Path) -> None:
    if path.is_dir():
        raise BadArtifact(f"{path} is a folder; expected a file")
    if not path.is_file():
        raise BadArtifact(f"{path} does not exist; check the name")


@contextlib.contextmanager
def only_writer(folder: Path, *, replaced: bool = False, wait: bool = False) -> Iterator[None]:
    """Hold the lock of an output folder. If another process holds it, `wait` for it, or raise `BadArtifact`.

    The lock file of a folder that is `replaced` as a whole is next to it, that of another folder inside it. The system
    releases the lock of a killed process.
    """
    folder = folder.expanduser()
    parent = folder.parent if replaced else folder
    path = parent / (f".{folder.name}.lock" if replaced else ".lock")
    with writing(folder):
        is_new = not parent.exists()
        parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        try:
            lock.acquire(timeout=-1 if wait else 0)
        except Timeout:
            raise BadArtifact(
                f"another run is writing {folder}; wait until it ends, or choose another folder"
            ) from None
    try:
        # A replacement may have been killed between two renames: restore the folder, and remove unfinished ones.
        for leftover in folder.parent.glob(f".{glob.escape(folder.name)}.*.tmp") if replaced else ():
            if (leftover / _OLD).exists() and not folder.exists():
                os.replace(leftover / _OLD, folder)
            shutil.rmtree(leftover, ignore_errors=True)
        yield
    finally:
        path.unlink(missing_ok=True)  # before the release: a process that waits for it sees that it is gone
        lock.release()
        if is_new:
            with contextlib.suppress(OSError):  # not empty: something was written
                parent.rmdir()


def check_free(folder: Path, *, force: bool) -> None:
    """Raise `BadArtifact` if a folder is not empty and would be overwritten without `force`."""
    folder = folder.expanduser()
    if not force and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadArtifact(
            f"{folder} exists and would be overwritten; choose another folder, or pass {argument('force', True)}"
        )


def replace_folder(folder: Path, write: Callable[[Path], object], *, force: bool) -> None:
    """Let `write` fill a new folder, then rename it in one step; a killed process leaves the old one, or none."""
    check_free(folder, force=force)
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _temporary_folder(folder) as temporary:
            new, old = temporary / "new", temporary / _OLD
            new.mkdir()
            write(new)
            for path in new.rglob("*"):
                sync(path)
            if folder.exists():
                os.replace(folder, old)
            os.replace(new, folder)
            shutil.rmtree(old, ignore_errors=True)
        sync(folder.parent)


def cache_home() -> Path:
    """The folder of everything that layerjump caches: `LAYERJUMP_HOME`, or the user's cache folder."""
    home = os.environ.get("LAYERJUMP_HOME")
    return Path(home).expanduser() if home else user_cache_path("layerjump")
