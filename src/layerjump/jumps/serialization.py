"""Save and load a jumps folder: `jumps.safetensors` and `jumps.json`, on disk or on the Hugging Face hub.

The tensor file is complete by itself: its metadata hold the whole description, and a checksum. The JSON file is a copy
of the description for people and other programs, with the sha256 of the tensor file. Saving goes: write the new tensor
file next to the old one; remove the old JSON; rename; write the JSON. So whenever a process dies, the old tensor file
or the new one remains, with its own JSON or none, and never with another's. Hence a missing JSON is not an error when
loading, and a JSON that contradicts the tensor file is one: somebody edited it, or mixed two folders. (Two processes
must not save different jumps to one folder at the same time.)
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field, InstanceOf, PlainValidator, Strict, ValidationError
from torch import Tensor, nn

from layerjump import io
from layerjump.errors import BadArtifact, BadJumps, LayerjumpError, NewerFormat, WrongModel, argument, one_line
from layerjump.jumps.jumps import JumpDtype, JumpInfo, Jumps, Lands, Provenance
from layerjump.jumps.maps import Affine, FeatureKind, dequantize_int8, quantize_int8, to_affine
from layerjump.models.fingerprint import fingerprint
from layerjump.models.model import Model, require_model
from layerjump.models.sites import EMBEDDING, MAX_TERMS, JointSource, Pair, Site, parse_source

FORMAT_VERSION = 3
"""Version 2 has joint sources and the site `embedding`, version 3 codes of 8 bits; others are written as version 1."""
Storage = Literal["float32", "int8"]
STORAGES: tuple[Storage, ...] = get_args(Storage)
_SCALE = ".scale"  # of the float32 factors of the rows of a tensor of int8 codes
FILES = TENSORS, TEXT = "jumps.safetensors", "jumps.json"
_FORMS: tuple[list[str], ...] = ([], ["weight"], ["down", "up"])  # tensors of a map: identity, full, two thin factors
_LONGEST_TERM = 32


def save(jumps: Jumps, folder: str | Path, *, storage: Storage = "float32") -> None:
    """Write a jumps folder, replacing the jumps in it; the same jumps give the same bytes.

    `int8` stores each row of a matrix as codes from −127 to 127 and one factor, in a quarter of the bytes.
    """
    check_storage(storage)
    folder = Path(folder).expanduser()
    tensor_file, json_file = folder / TENSORS, folder / TEXT
    maps = {pair: to_affine(jumps[pair]) for pair in jumps}
    parts: dict[Pair, dict[str, Tensor]] = {}
    for pair, affine in maps.items():
        names = ("weight",) if len(affine.factors) == 1 else ("up", "down")
        named = dict(zip(names, affine.factors, strict=False))
        parts[pair] = named if affine.bias is None else named | {"bias": affine.bias}
    tensors = {_tensor_name(pair, part): tensor.float() for pair in maps for part, tensor in parts[pair].items()}
    _check_finite(tensors, "these jumps cannot be saved", "fit them again")
    if storage == "int8":
        for name in [name for name, tensor in tensors.items() if tensor.dim() == 2]:
            tensors[name], tensors[name + _SCALE] = quantize_int8(tensors[name])
    # Sorted: the order in which settings were passed makes no difference.
    settings = io.dump_json(jumps.provenance.settings, json_file, sort_keys=True)
    version = 2 if any(_is_new(source) or _is_new(target) for source, target in jumps) else 1
    description = {
        "format_version": 3 if storage == "int8" else version,
        **({"storage": storage} if storage == "int8" else {}),
        "provenance": vars(jumps.provenance) | {"settings": io.parse_json(settings, json_file)},
        "jumps": [
            {
                **vars(info),
                "source": str(info.source),
                "target": str(info.target),
                "lands": info.lands,
                "shape": maps[pair].shape,
                "tensors": {part: tuple(parts[pair][part].shape) for part in sorted(parts[pair])},
            }
            for pair, info in jumps.info.items()
        ],
    }

    def remove_json() -> None:
        json_file.unlink(missing_ok=True)
        io.sync(folder)  # it must be gone before the tensor file that it describes

    with io.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    text = io.dump_json(description, tensor_file)
    io.write_tensors(tensor_file, tensors, {"description": text}, last=remove_json)
    io.write_json(json_file, description | {"sha256": io.file_sha256(tensor_file)})


def check_storage(storage: str) -> None:
    """Raise `BadJumps` unless tensors can be stored in this way."""
    if storage not in STORAGES:
        raise BadJumps(f"expected {argument('storage')} of {' or '.join(STORAGES)}, got {storage!r}")


def load(
    folder: str | Path,
    *,
    model: Model | None = None,
    allow_other_weights: bool = False,
    lazy: bool = False,
    dtype: JumpDtype = "float32",
) -> Jumps:
    """Read a jumps folder; with a model, check that the jumps were fitted on its weights.

    With `lazy`, each jump is read when it is first used. `dtype` is that of the maps in memory.
    """
    if dtype not in get_args(JumpDtype):
        raise BadArtifact(f"expected {argument('dtype')} of {', '.join(get_args(JumpDtype))}, got {dtype!r}")
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise BadArtifact(f"expected a jumps folder, but {folder} {problem}")
    if not (folder / TENSORS).exists():
        raise BadArtifact(f"{folder} is not a jumps folder: it has no {TENSORS}")
    while True:
        before = _file_versions(folder)
        try:
            jumps = _load_lazily(folder) if lazy else _load(folder)
            break
        except BadArtifact:
            # If the files changed meanwhile, two saves were mixed here: read again.
            if _file_versions(folder) == before:
                raise
    jumps.to(getattr(torch, dtype))
    jumps.folder = folder
    if model is not None:
        check_model(jumps, model, allow_other_weights)
    return jumps


def check_model(jumps: Jumps, model: Model, allow_other_weights: bool) -> None:
    """Raise `WrongModel` if jumps were fitted on another model, or on other weights unless that is allowed."""
    require_model(model)
    fitted_on = jumps.provenance
    if (fitted_on.n_blocks, fitted_on.width) != (model.n_blocks, model.d_model):
        raise WrongModel(
            f"these jumps were fitted on {fitted_on.model} ({fitted_on.n_blocks} blocks, d {fitted_on.width}), but the "
            f"model is {model.name} ({model.n_blocks} blocks, d {model.d_model}); load the model they were fitted on, "
            f"or fit them again"
        )
    weights = fingerprint(model.hf)
    if weights == fitted_on.fingerprint:
        return
    if not allow_other_weights:
        raise WrongModel(
            f"these jumps were fitted on {fitted_on.model} (weights {fitted_on.fingerprint[:8]}), but the model is "
            f"{model.name} (weights {weights[:8]}); load the model they were fitted on, fit them again, or pass "
            f"{argument('allow_other_weights', True)}"
        )
    jumps.used_on = model.name


class StrictRecord(BaseModel):
    """An object in a file, with strict types; unknown keys are ignored, because later versions may add some."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


AnyRecord = TypeVar("AnyRecord", bound=StrictRecord)


def read_record(kind: type[AnyRecord], data: Mapping[str, Any], path: Path) -> AnyRecord:
    """Validate an object that was found in the file `path`; report the first problem in one line."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part)[:50] for part in first["loc"])
        if first["type"] == "missing":
            raise BadArtifact(f"{path} lacks {name!r}; write it again") from error
        message = first["msg"].removeprefix("Value error, ")
        value = reprlib.repr(first["input"])
        raise BadArtifact(f"{path}: {name} is {value}: {one_line(ValueError(message))}; write it again") from error


def _is_new(site: Site) -> bool:
    """Whether format version 1 lacks a site."""
    return isinstance(site, JointSource) or site == EMBEDDING


def _parse_site(name: Any) -> Site:
    site = _parse_source(name)
    if isinstance(site, JointSource):
        raise ValueError("it names no site")
    return site


def _parse_source(name: Any) -> Site:
    try:
        if isinstance(name, str) and len(name) <= _LONGEST_TERM * MAX_TERMS:
            source = parse_source(name)
            if str(source) == name:
                return source
    except LayerjumpError:
        pass
    raise ValueError("it names no site")


SourceRecord = Annotated[Site, PlainValidator(_parse_source)]
SiteRecord = Annotated[Site, PlainValidator(_parse_site)]
Pairing = Annotated[tuple[SourceRecord, SiteRecord], Strict(False)]
"""Source and target as JSON holds them: a list of two names."""
# JSON holds tuples as lists. Texts may hold what UTF-8 cannot encode, such as names of files.
_Text = InstanceOf[str]
_Scores = Annotated[tuple[float, float], Strict(False)]
_Size = Annotated[int, Field(gt=0)]


class RunInfoRecord(StrictRecord):
    """`RunInfo` in a file."""

    model: _Text
    revision: _Text | None
    fingerprint: _Text
    tokenizer: _Text | None
    family: _Text
    n_blocks: int
    width: int
    text: _Text
    text_sha256: _Text
    tokens: int
    positions: _Text
    skip_first: int
    special: bool
    split: _Text
    seed: int


class _ProvenanceRecord(RunInfoRecord):
    n_fit: int
    n_select: int
    n_test: int
    estimator: _Text
    settings: InstanceOf[dict]  # type: ignore[type-arg]
    layerjump: _Text


class _JumpRecord(StrictRecord):
    source: SourceRecord
    target: SiteRecord
    estimator: _Text
    features: FeatureKind
    rank: int | None
    strength: float | None
    r2: _Scores | None
    r2_identity: _Scores | None
    n_test: int
    lands: Lands
    shape: Annotated[tuple[int, int], Strict(False)]
    tensors: dict[_Text, list[_Size]]  # shapes of weight, or up and down, or none; and perhaps bias

    @property
    def info(self) -> JumpInfo:
        """The jump's description in memory."""
        fields = {name: value for name, value in self if name not in ("lands", "shape", "tensors")}
        return JumpInfo(**fields)


class _Version(StrictRecord):
    format_version: int


class _Description(_Version):
    """Everything in a jumps folder but the tensors."""

    provenance: _ProvenanceRecord
    jumps: list[_JumpRecord]
    storage: Storage = "float32"


def _check_version(data: Mapping[str, Any], path: Path) -> None:
    version = read_record(_Version, data, path).format_version
    if version > FORMAT_VERSION:
        raise NewerFormat(
            f"{path} has format version {str(version)[:50]}, but this layerjump reads versions up to {FORMAT_VERSION}; "
            f"install a newer layerjump"
        )
    if version < 1:
        raise BadArtifact(f"{path} has the unknown format version {version}; write it again")


def _read_description(data: Mapping[str, Any], path: Path) -> tuple[Provenance, dict[Pair, _JumpRecord], Storage]:
    """Return the provenance, the record of every jump, and how tensors are stored."""
    _check_version(data, path)
    description = read_record(_Description, data, path)
    records: dict[Pair, _JumpRecord] = {}
    for record in description.jumps:
        pair = record.source, record.target
        name = f"the jump {record.source} → {record.target}"
        if pair in records:
            raise BadArtifact(f"{path} lists {name} twice; write it again")
        if record.lands != record.info.lands:
            raise BadArtifact(
                f"{path}: lands is {record.lands!r} for {name}, expected {record.info.lands!r}; write it again"
            )
        if sorted(record.tensors.keys() - {"bias"}) not in _FORMS:
            raise BadArtifact(
                f"{path}: tensors is {reprlib.repr(record.tensors)} for {name}, expected weight, or up and down, or "
                f"none; and perhaps bias; write it again"
            )
        records[pair] = record
    return Provenance(**dict(description.provenance)), records, description.storage


def _load(folder: Path) -> Jumps:
    tensor_file, json_file = folder / TENSORS, folder / TEXT
    data = io.read_json(json_file) if json_file.exists() else None
    if data is not None:
        _check_version(data, json_file)  # first, because all else may differ in a newer format
    tensors, metadata = io.read_tensors(tensor_file)
    description = _stored_description(metadata, tensor_file)
    if data is not None:
        copy = _read_description(data, json_file)
        remedy = f"save the jumps again, or remove {TEXT}: {TENSORS} is complete without it"
        if data.get("sha256") != io.file_sha256(tensor_file):
            raise BadArtifact(f"{TEXT} and {TENSORS} in {folder} do not belong together; {remedy}")
        if copy != description:
            raise BadArtifact(f"{json_file} was edited after it was written; {remedy}")
    provenance, records, storage = description
    # The file must hold exactly the tensors that are listed, in the shapes that are listed.
    listed = _listed_tensors(records, storage)
    _check_names(listed, tensors, tensor_file)
    for name, tensor in tensors.items():
        dtype, expected = listed[name]
        if (tensor.dtype, tuple(tensor.shape)) != (dtype, expected):
            raise BadArtifact(
                f"{tensor_file}: expected {dtype} of shape {str(expected)[:50]} for {name}, got {tensor.dtype} of "
                f"shape {str(tuple(tensor.shape))[:50]}; write it again"
            )
    _check_finite(tensors, f"{tensor_file} cannot be used", "fit the jumps again")
    # Copied out of the mapped file, so that jumps in use do not change, or crash, with it.
    maps = {pair: _map_of(pair, record, listed, lambda name: tensors[name].clone()) for pair, record in records.items()}
    try:
        infos = {pair: record.info for pair, record in records.items()}
        return Jumps.from_maps(maps, infos, provenance)
    except BadJumps as error:
        raise BadArtifact(f"{tensor_file} is inconsistent: {error}; write it again") from error


def _load_lazily(folder: Path) -> Jumps:
    """Read the description alone; a jump's tensors are read, and checked, when it is first used."""
    path = folder / TENSORS
    provenance, records, storage = _stored_description(io.read_metadata(path), path)
    # The file stays open: what is read later is of the same version, whatever is saved here in the meantime.
    file = io.open_tensors(path)
    listed = _listed_tensors(records, storage)
    _check_names(listed, file.keys(), path)
    infos = {pair: record.info for pair, record in records.items()}

    def read_map(pair: Pair) -> nn.Module:
        affine = _map_of(pair, records[pair], listed, lambda name: file.get_tensor(name).clone())
        stored = {"a weight": affine.factors, "a bias": () if affine.bias is None else (affine.bias,)}
        _check_finite(
            {f"{part} of {pair[0]} → {pair[1]}": tensor for part, some in stored.items() for tensor in some},
            f"{path} cannot be used",
            "fit the jumps again",
        )
        try:
            return Jumps.from_maps({pair: affine}, {pair: infos[pair]}, provenance)[pair]
        except BadJumps as error:
            raise BadArtifact(f"{path} is inconsistent: {error}; write it again") from error

    return Jumps({}, infos, provenance, read_map=read_map)


def _stored_description(metadata: Mapping[str, str], path: Path) -> tuple[Provenance, dict[Pair, _JumpRecord], Storage]:
    if "description" not in metadata:
        raise BadArtifact(f"{path} holds no jumps, but other tensors; expected a jumps folder")
    return _read_description(io.parse_json(metadata["description"], path), path)


def _check_names(listed: Collection[str], stored: Collection[str], path: Path) -> None:
    for name in sorted(set(listed) ^ set(stored)):
        problem = "lists but lacks" if name in listed else "holds but does not list"
        raise BadArtifact(f"{path} {problem} the tensor {name!r}; write it again")


def _listed_tensors(
    records: Mapping[Pair, _JumpRecord], storage: Storage
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of every tensor of a file, by name."""
    listed: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for pair, record in records.items():
        for part, shape in record.tensors.items():
            name, coded = _tensor_name(pair, part), storage == "int8" and len(shape) == 2
            listed[name] = torch.int8 if coded else torch.float32, tuple(shape)
            if coded:
                listed[name + _SCALE] = torch.float32, tuple(shape[:1])
    return listed


def _map_of(pair: Pair, record: _JumpRecord, listed: Collection[str], read: Callable[[str], Tensor]) -> Affine:
    """A jump's map, in float32 where the file holds codes and scales."""
    parts = {}
    for part in record.tensors:
        name = _tensor_name(pair, part)
        tensor = read(name)
        parts[part] = dequantize_int8(tensor, read(name + _SCALE)).float() if name + _SCALE in listed else tensor
    factors = tuple(parts[part] for part in ("weight", "up", "down") if part in parts)
    return Affine(record.shape, factors, parts.get("bias"), record.strength)


def _file_versions(folder: Path) -> list[tuple[int, int] | None]:
    """Inode and time of both files: a new file has another of at least one."""
    versions: list[tuple[int, int] | None] = []
    for name in FILES:
        try:
            stat = (folder / name).stat()
            versions.append((stat.st_ino, stat.st_mtime_ns))
        except OSError:
            versions.append(None)
    return versions


def _tensor_name(pair: Pair, part: str) -> str:
    return f"{pair[0]}>{pair[1]}.{part}"


def _check_finite(tensors: Mapping[str, Tensor], problem: str, remedy: str) -> None:
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise BadArtifact(f"{problem}: {name} holds NaN or infinite values; {remedy}")


@contextmanager
def hub_errors(problem: str) -> Iterator[None]:
    """Report each failure of the hub's client, some of a dozen lines, in one line."""
    try:
        yield
    except Exception as error:
        raise BadArtifact(f"{problem} ({one_line(error)}); check the name, the network and your token") from error
