"""What a jumps folder says about itself: to JSON, and back with every value checked."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from layerjump.errors import BadArtifact, LayerjumpError, NewerFormat
from layerjump.fit.affine import Affine
from layerjump.fit.files import dump_json, parse_json
from layerjump.fit.records import JumpInfo, Lands, Pair, Provenance
from layerjump.inputs.sites import Site

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
