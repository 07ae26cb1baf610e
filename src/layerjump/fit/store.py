"""A jumps folder: `jumps.safetensors` and `jumps.json`.

The tensor file is complete by itself: its metadata hold the whole description, and a checksum. The
JSON file is a copy of the description for people and other programs, with the sha256 of the tensor
file. Saving goes: write the new tensor file beside the old; remove the old JSON; rename; write the
JSON. So whenever a process dies, what is left is the old tensor file or the new one, with its own
JSON or none, and never with another's. Hence a missing JSON is no error when loading, and a JSON that
says something else than the tensor file is one: somebody edited it, or mixed two folders. (Two
processes must not save different jumps to one folder at the same time.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerjump.errors import BadArtifact, BadJumps, WrongModel
from layerjump.fit import description as described
from layerjump.fit import files
from layerjump.fit.affine import Affine
from layerjump.fit.description import Description, Entry
from layerjump.fit.fingerprint import fingerprint
from layerjump.fit.jumps import Jumps
from layerjump.fit.modules import to_affine
from layerjump.fit.records import Pair
from layerjump.inputs.models import Model, require_model

TENSORS, TEXT = "jumps.safetensors", "jumps.json"


def save(jumps: Jumps, folder: str | Path) -> None:
    """Write a jumps folder, in place of the jumps that were there; the same jumps give the same bytes."""
    folder = Path(folder).expanduser()
    tensor_file, json_file = folder / TENSORS, folder / TEXT
    maps = {pair: to_affine(jumps[pair]) for pair in jumps}
    tensors = {name: tensor for pair in maps for name, tensor in _named(pair, maps[pair]).items()}
    _check_finite(tensors, "these jumps cannot be saved", "fit them again")
    entries = {pair: described.entry_of(maps[pair], jumps.info[pair]) for pair in jumps}
    data = described.write(Description(jumps.provenance, entries), json_file)
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    text = files.dump_json(data, tensor_file, indent=None)
    files.write_tensors(
        tensor_file, tensors, {"description": text}, last=lambda: _remove(json_file)
    )
    files.write_json(json_file, data | {"sha256": files.file_sha256(tensor_file)})


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
    data = files.read_json(json_file) if json_file.exists() else None
    if data is not None:
        described.check_version(data, json_file)  # first, because all else may be different there
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
    files.sync(path.parent)  # gone for good before the tensor file it describes is


def _named(pair: Pair, affine: Affine) -> dict[str, Tensor]:
    """A map's tensors by their names in the file, in the file's precision."""
    tensors = described.parts(affine)
    return {_name(pair, part): tensor.float() for part, tensor in tensors.items()}


def _name(pair: Pair, part: str) -> str:
    return f"{pair[0]}>{pair[1]}.{part}"


def _read(path: Path) -> tuple[dict[str, Tensor], Description]:
    tensors, metadata = files.read_tensors(path)
    if "description" not in metadata:
        raise BadArtifact(f"{path} is layerjump's, but holds no jumps; give a jumps folder")
    return tensors, described.read(files.parse_json(metadata["description"], path), path)


def _check_copy(data: dict[str, Any], description: Description, folder: Path) -> None:
    """Compare what the JSON file says with what the tensor file is and says."""
    said = described.read(data, folder / TEXT)
    remedy = f"save the jumps again, or remove {TEXT}: {TENSORS} is complete without it"
    if data.get("sha256") != files.file_sha256(folder / TENSORS):
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
    if (known.n_blocks, known.width) != (model.n_blocks, model.width):
        raise WrongModel(
            f"these jumps were fitted on {known.model} ({known.n_blocks} blocks, d {known.width}), but the "
            f"model given is {model.name} ({model.n_blocks} blocks, d {model.width}); load the model they "
            f"were fitted on, or fit them again"
        )
    found = fingerprint(model.hf)
    if found == known.fingerprint:
        return
    if not allow_other_weights:
        raise WrongModel(
            f"these jumps were fitted on {known.model} (weights {known.fingerprint[:8]}), but the model given "
            f"is {model.name} (weights {found[:8]}); load the model they were fitted on, fit them again, or "
            f"allow it with --allow-other-weights (allow_other_weights=True)"
        )
    jumps.used_on = model.name
