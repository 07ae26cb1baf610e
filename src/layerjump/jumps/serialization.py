"""Save and load a jumps folder.

What a jumps folder says about itself: to JSON, and back with every value checked.

A jumps folder: `jumps.safetensors` and `jumps.json`.

The tensor file is complete by itself: its metadata hold the whole description, and a checksum. The
JSON file is a copy of the description for people and other programs, with the sha256 of the tensor
file. Saving goes: write the new tensor file beside the old; remove the old JSON; rename; write the
JSON. So whenever a process dies, what is left is the old tensor file or the new one, with its own
JSON or none, and never with another's. Hence a missing JSON is no error when loading, and a JSON that
says something else than the tensor file is one: somebody edited it, or mixed two folders. (Two
processes must not save different jumps to one folder at the same time.)
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from layerjump import io
from layerjump.errors import (
    BadArtifact,
    BadJumps,
    LayerjumpError,
    NewerFormat,
    WrongModel,
    argument,
)
from layerjump.io import dump_json, parse_json
from layerjump.jumps.jumps import JumpInfo, Jumps, Lands, Pair, Provenance
from layerjump.jumps.maps import Affine, to_affine
from layerjump.models.fingerprint import fingerprint
from layerjump.models.model import Model, require_model
from layerjump.models.structure import Site

FORMAT_VERSION = 1
_FORMS: tuple[list[str], ...] = (
    [],
    ["weight"],
    ["down", "up"],
)  # of a map: identity, full, two thin factors
_LONGEST_SITE = 32

Record = TypeVar("Record", JumpInfo, Provenance)


@dataclass(frozen=True)
class Entry:
    """One jump as the description lists it."""

    info: JumpInfo
    shape: tuple[int, int]  # (dy, dx)
    tensors: dict[
        str, tuple[int, ...]
    ]  # weight, or up and down, or none; perhaps bias: their shapes


@dataclass(frozen=True)
class Description:
    """Everything but the tensors."""

    provenance: Provenance
    entries: dict[Pair, Entry]


def entry_of(affine: Affine, info: JumpInfo) -> Entry:
    """What the description says about one jump."""
    tensors = parts(affine)
    return Entry(info, affine.shape, {name: tuple(tensors[name].shape) for name in sorted(tensors)})


def parts(affine: Affine) -> dict[str, Any]:
    """A map's tensors by name."""
    names = ("weight",) if len(affine.factors) == 1 else ("up", "down")
    named: dict[str, Any] = dict(zip(names, affine.factors, strict=False))
    return named if affine.bias is None else named | {"bias": affine.bias}


def write(description: Description, path: Path) -> dict[str, Any]:
    """The description as JSON holds it."""
    provenance = dict(vars(description.provenance))
    # Sorted: the order in which settings were given makes no difference.
    settings = dump_json(provenance["settings"], path, sort_keys=True)
    provenance["settings"] = parse_json(settings, path)
    return {
        "format_version": FORMAT_VERSION,
        "provenance": provenance,
        "jumps": [_write_entry(entry) for entry in description.entries.values()],
    }


def _write_entry(entry: Entry) -> dict[str, Any]:
    return {
        **vars(entry.info),
        "source": str(entry.info.source),
        "target": str(entry.info.target),
        "lands": entry.info.lands,
        "shape": entry.shape,
        "tensors": entry.tensors,
    }


def read(data: dict[str, Any], path: Path) -> Description:
    """The description in the JSON object found in `path`; unknown keys are left alone."""
    check_version(data, path)
    provenance = _record(Provenance, _member(data, "provenance", dict[str, Any], path), path)
    entries: dict[Pair, Entry] = {}
    for item in _member(data, "jumps", list, path):
        entry = _read_entry(item, path)
        pair = entry.info.source, entry.info.target
        if pair in entries:
            raise BadArtifact(f"{path} lists the jump {pair[0]} → {pair[1]} twice; make it again")
        entries[pair] = entry
    return Description(provenance, entries)


def check_version(data: dict[str, Any], path: Path) -> None:
    """Refuse a format that this library does not know."""
    version = _member(data, "format_version", int, path)
    if version > FORMAT_VERSION:
        raise NewerFormat(
            f"{path} has format version {str(version)[:50]}, but this layerjump knows versions up to "
            f"{FORMAT_VERSION}; install a newer layerjump"
        )
    if version < 1:
        raise BadArtifact(f"{path} has format version {version}, but there is none; make it again")


def _read_entry(item: Any, path: Path) -> Entry:
    if not isinstance(item, dict):
        raise _wrong("one of the jumps", item, dict, path)
    info = _record(JumpInfo, item, path)
    if _member(item, "lands", Lands, path) != info.lands:
        raise _wrong("lands", item["lands"], f"{info.lands!r} for the target {info.target}", path)
    shape = _member(item, "shape", tuple[int, int], path)
    tensors = _member(item, "tensors", dict[str, Any], path)
    if sorted(tensors.keys() - {"bias"}) not in _FORMS:
        raise _wrong("tensors", tensors, "weight, or up and down, or none; perhaps bias", path)
    shapes = {name: tuple(tensors[name]) for name in sorted(tensors) if _is_shape(tensors[name])}
    if len(shapes) < len(tensors):
        raise _wrong("tensors", tensors, "a shape for each", path)
    return Entry(info, shape, shapes)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size > 0 for size in value)


def _record(kind: type[Record], data: dict[str, Any], path: Path) -> Record:
    """A dataclass, from an object that has all its fields."""
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: _member(data, name, hints[name], path) for name in names})


def check_members(kind: type[Record], data: Any, names: list[str], path: Path) -> None:
    """Raise `BadArtifact` unless an object has these fields of a dataclass, each of its type."""
    if not isinstance(data, dict):
        raise _wrong("what is said about the run", data, dict, path)
    hints = get_type_hints(kind)
    for name in names:
        _member(data, name, hints[name], path)


def _member(data: dict[str, Any], name: str, hint: Any, path: Path) -> Any:
    if name not in data:
        raise BadArtifact(f"{path} lacks {name!r}; make it again")
    if not _fits(data[name], hint):
        raise _wrong(name, data[name], hint, path)
    return _converted(data[name], hint)


def _wrong(name: str, value: Any, wanted: Any, path: Path) -> BadArtifact:
    said = wanted.__name__ if isinstance(wanted, type) else str(wanted).replace("typing.", "")
    given = reprlib.repr(value)
    return BadArtifact(f"{path}: {name} is {given}, but {said} was wanted; make it again")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value read from JSON is of the type a field has."""
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(hint, UnionType):
        return any(_fits(value, option) for option in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        sized = isinstance(value, list) and len(value) == len(arguments)
        return sized and all(map(_fits, value, arguments))
    if hint is Site:
        return isinstance(value, str) and _is_site(value)
    if hint is float:
        return type(value) in (int, float) and abs(value) < math.inf
    return type(value) is (origin or hint)  # exactly, because True is an int to isinstance


def _is_site(name: str) -> bool:
    try:
        return len(name) <= _LONGEST_SITE and str(Site.parse(name)) == name
    except LayerjumpError:
        return False


def _converted(value: Any, hint: Any) -> Any:
    if hint is Site:
        return Site.parse(value)
    return tuple(value) if isinstance(value, list) and hint is not list else value


TENSORS, TEXT = "jumps.safetensors", "jumps.json"


def save(jumps: Jumps, folder: str | Path) -> None:
    """Write a jumps folder, in place of the jumps that were there; the same jumps give the same bytes."""
    folder = Path(folder).expanduser()
    tensor_file, json_file = folder / TENSORS, folder / TEXT
    maps = {pair: to_affine(jumps[pair]) for pair in jumps}
    tensors = {name: tensor for pair in maps for name, tensor in _named(pair, maps[pair]).items()}
    _check_finite(tensors, "these jumps cannot be saved", "fit them again")
    entries = {pair: entry_of(maps[pair], jumps.info[pair]) for pair in jumps}
    data = write(Description(jumps.provenance, entries), json_file)
    with io.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    text = io.dump_json(data, tensor_file, indent=None)
    io.write_tensors(tensor_file, tensors, {"description": text}, last=lambda: _remove(json_file))
    io.write_json(json_file, data | {"sha256": io.file_sha256(tensor_file)})


def load(
    folder: str | Path, *, model: Model | None = None, allow_other_weights: bool = False
) -> Jumps:
    """Read a jumps folder; with a model, check that the jumps were fitted on its weights."""
    folder = Path(folder).expanduser()
    _require(folder)
    while True:
        before = _stamp(folder)
        try:
            jumps = _load(folder)
            break
        except BadArtifact:
            if (
                _stamp(folder) == before
            ):  # else somebody saved meanwhile, and two savings were mixed here
                raise
    jumps.folder = folder
    if model is not None:
        check_model(jumps, model, allow_other_weights)
    return jumps


def _load(folder: Path) -> Jumps:
    tensor_file, json_file = folder / TENSORS, folder / TEXT
    data = io.read_json(json_file) if json_file.exists() else None
    if data is not None:
        check_version(data, json_file)  # first, because all else may be different there
    tensors, description = _read(tensor_file)
    if data is not None:
        _check_copy(data, description, folder)
    return _assemble(tensors, description, tensor_file)


def _stamp(folder: Path) -> list[tuple[int, int] | None]:
    """Which files stand here: a new file has another number, or another time."""
    found: list[tuple[int, int] | None] = []
    for name in (TENSORS, TEXT):
        try:
            stat = (folder / name).stat()
            found.append((stat.st_ino, stat.st_mtime_ns))
        except OSError:
            found.append(None)
    return found


def _require(folder: Path) -> None:
    if not folder.is_dir():
        kind = "a file" if folder.exists() else "not there"
        raise BadArtifact(f"{folder} is {kind}, but a jumps folder was wanted; give the folder")
    if not (folder / TENSORS).exists():
        raise BadArtifact(f"{folder} has no {TENSORS}, so it is no jumps folder; give another")


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    io.sync(path.parent)  # gone for good before the tensor file it describes is


def _named(pair: Pair, affine: Affine) -> dict[str, Tensor]:
    """A map's tensors by their names in the file, in the file's precision."""
    tensors = parts(affine)
    return {_name(pair, part): tensor.float() for part, tensor in tensors.items()}


def _name(pair: Pair, part: str) -> str:
    return f"{pair[0]}>{pair[1]}.{part}"


def _read(path: Path) -> tuple[dict[str, Tensor], Description]:
    tensors, metadata = io.read_tensors(path)
    if "description" not in metadata:
        raise BadArtifact(f"{path} is layerjump's, but holds no jumps; give a jumps folder")
    return tensors, read(io.parse_json(metadata["description"], path), path)


def _check_copy(data: dict[str, Any], description: Description, folder: Path) -> None:
    """Compare what the JSON file says with what the tensor file is and says."""
    said = read(data, folder / TEXT)
    remedy = f"save the jumps again, or remove {TEXT}: {TENSORS} is complete without it"
    if data.get("sha256") != io.file_sha256(folder / TENSORS):
        raise BadArtifact(f"{TEXT} and {TENSORS} in {folder} do not belong together; {remedy}")
    if said != description:
        raise BadArtifact(f"{folder / TEXT} was edited after it was written; {remedy}")


def _assemble(tensors: dict[str, Tensor], description: Description, path: Path) -> Jumps:
    entries = description.entries
    _check_tensors(tensors, entries, path)
    _check_finite(tensors, f"{path} cannot be used", "fit the jumps again")
    maps = {pair: _map(pair, entry, tensors) for pair, entry in entries.items()}
    infos = {pair: entry.info for pair, entry in entries.items()}
    try:
        return Jumps.of(maps, infos, description.provenance)
    except BadJumps as error:
        raise BadArtifact(f"{path} does not hold together: {error}; make it again") from error


def _map(pair: Pair, entry: Entry, tensors: dict[str, Tensor]) -> Affine:
    # Copied out of the mapped file, so that jumps in use do not change, or crash, with it.
    own = {part: tensors[_name(pair, part)].clone() for part in entry.tensors}
    factors = tuple(own[part] for part in ("weight", "up", "down") if part in own)
    return Affine(entry.shape, factors, own.get("bias"), entry.info.strength)


def _check_tensors(tensors: dict[str, Tensor], entries: dict[Pair, Entry], path: Path) -> None:
    """The file holds exactly the tensors that are listed, in the shapes that are listed."""
    listed = {
        _name(pair, part): shape
        for pair, entry in entries.items()
        for part, shape in entry.tensors.items()
    }
    for name in sorted(listed.keys() ^ tensors.keys()):
        wrong = "lists but lacks" if name in listed else "holds but does not list"
        raise BadArtifact(f"{path} {wrong} the tensor {name!r}; make it again")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != listed[name] or tensor.dtype != torch.float32:
            raise BadArtifact(
                f"{path}: {name} is {tensor.dtype} of shape {str(tuple(tensor.shape))[:50]}, but torch.float32 of "
                f"shape {str(listed[name])[:50]} was wanted; make it again"
            )


def _check_finite(tensors: dict[str, Tensor], problem: str, remedy: str) -> None:
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise BadArtifact(f"{problem}: {name} holds NaN or infinite values; {remedy}")


def check_model(jumps: Jumps, model: Model, allow_other_weights: bool) -> None:
    """Raise `WrongModel` if jumps were fitted on another model, or on other weights unless that is allowed."""
    require_model(model)
    known = jumps.provenance
    if (known.n_blocks, known.width) != (model.n_blocks, model.d_model):
        raise WrongModel(
            f"these jumps were fitted on {known.model} ({known.n_blocks} blocks, d {known.width}), but the "
            f"model given is {model.name} ({model.n_blocks} blocks, d {model.d_model}); load the model they "
            f"were fitted on, or fit them again"
        )
    found = fingerprint(model.hf)
    if found == known.fingerprint:
        return
    if not allow_other_weights:
        raise WrongModel(
            f"these jumps were fitted on {known.model} (weights {known.fingerprint[:8]}), but the model given "
            f"is {model.name} (weights {found[:8]}); load the model they were fitted on, fit them again, or "
            f"allow it with {argument('allow_other_weights', True)}"
        )
    jumps.used_on = model.name
