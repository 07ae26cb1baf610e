"""Typed results of studies, and their form in results.json.

A study declares its rows, tables and headline as records. A field is one key of a JSON object, with the field's name
unless `Column` gives another. A `{}` in the key spreads a nested record or a mapping over several keys:

    class LevelRow(Record):
        level: int
        kl: float
        p1: Annotated[Interval, Column("p@1{}")]                    # "p@1", "p@1 low", "p@1 high"
        tokens: Annotated[dict[str, list[str]], Column("{}")]       # every other key of the object

`to_json` writes such objects; `from_json` reads them back and raises `BadArtifact` where a value does not have the
declared type. A number that is not finite is null in the file and NaN in memory.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Generic, TypeVar, Union, dataclass_transform, get_args, get_origin

from layerjump.errors import BadArtifact

if typing.TYPE_CHECKING:
    from layerjump.studies.charts import Panel
    from layerjump.studies.setup import Setup

T = TypeVar("T")
Tables = TypeVar("Tables")
Headline = TypeVar("Headline")


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.Field, field))
class Record:
    """A base class that makes its subclasses frozen dataclasses."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class Column(Record):
    """The key of a dataclass field in JSON."""

    key: str | None = None
    """None: the name of the field."""
    optional: bool = False
    """Whether the key is left out of the file where the value is None."""


class Interval(Record):
    """A mean with its 95 % confidence interval."""

    mean: Annotated[float, Column("")]
    low: Annotated[float, Column(" low")]
    high: Annotated[float, Column(" high")]


class Empty(Record):
    """No tables, or no headline."""


@dataclass
class Result(Generic[Tables, Headline]):
    """The numbers of one finished study. Every figure and CSV file of a report is made from its tables."""

    study: str
    tables: Tables
    headline: Headline
    """The few numbers that a summary quotes."""
    notes: list[str] = field(default_factory=list)
    """Sentences a reader must know: definitions of our own, shortfalls, warnings."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Facts shown above the figures, such as the number of examples. No code reads them."""
    seconds: float = 0.0
    files: dict[str, str] = field(default_factory=dict)
    """Text of further files for the output directory, by name; not part of results.json."""

    def to_json(self) -> dict[str, Any]:
        """Return the study's entry of results.json."""
        names = ("study", "tables", "headline", "notes", "settings", "seconds")
        return {name: to_json(getattr(self, name)) for name in names} | {"skipped": None}


class Skipped(Record):
    """A study that could not run."""

    study: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return the study's entry of results.json."""
        return Result(self.study, Empty(), Empty()).to_json() | {"skipped": self.reason}


class Finding(Record):
    """What a study found, for the top of a report."""

    title: str
    answer: str
    """The main number with its unit: a few words."""
    detail: str
    """The rest of the sentence."""


@dataclass(frozen=True)
class Study(Generic[Tables, Headline]):
    """One named experiment: how to run it, the types of its result, and how to show them."""

    name: str
    question: str
    """What it answers; the title of its section."""
    run: Callable[[Setup], Result[Tables, Headline]]
    """Its annotation also tells the types of tables and headline."""
    figures: Callable[[Result[Tables, Headline]], list[Panel]]
    finding: Callable[[Result[Tables, Headline]], Finding | None] = lambda result: None
    cannot_run: Callable[[Setup], str | None] = lambda setup: setup.model.no_predictions
    """Returns why a run cannot include the study, or None."""
    level_pairs: str = "to-last"
    """The pairs of levels whose jumps it needs: `to-last` or `all`."""
    all_position_pairs: str | None = None
    """The pairs whose maps at every position it needs, if any."""

    def from_json(self, saved: Mapping[str, Any]) -> Result[Tables, Headline] | Skipped:
        """Read the study's entry of results.json."""
        where = f"the study {self.name[:50]}"
        if saved.get("skipped") is not None:
            return Skipped(self.name, from_json(str, saved["skipped"], where))
        tables, headline = get_args(typing.get_type_hints(self.run)["return"])
        return Result(
            self.name,
            from_json(tables, saved.get("tables"), where),
            from_json(headline, saved.get("headline"), where),
            from_json(list[str], saved.get("notes"), where),
            from_json(dict[str, Any], saved.get("settings"), where),
            from_json(float, saved.get("seconds"), where),
        )


AnyStudy = Study[Any, Any]
Outcome = Result[Any, Any] | Skipped


class ModelInfo(Record):
    """The model of a run."""

    name: str
    revision: str | None
    fingerprint: str
    family: str
    task: str
    n_blocks: Annotated[int, Column("blocks")]
    d_model: Annotated[int, Column("width")]
    vocab_size: Annotated[int, Column("vocabulary")]


class TextInfo(Record):
    """A text of a run."""

    name: str
    sha256: str


class MainTextInfo(TextInfo):
    """The text that a run fits and tests on."""

    note: str


class StudyRunInfo(Record):
    """How the results of a run were made."""

    layerjump: str
    """The version of the package."""
    machine: str
    command: str
    """Empty for a run from Python."""
    model: ModelInfo
    text: MainTextInfo
    other_texts: list[TextInfo]
    settings: dict[str, Any]
    differs_from_paper: list[str] = field(default_factory=list)
    """Sentences on what a run with the paper's protocol does otherwise than its authors did."""
    level_pairs: str = "to-last"


@dataclass
class Results:
    """What results.json holds: how a run was made, and the outcome of every study."""

    run: StudyRunInfo
    studies: dict[str, Outcome] = field(default_factory=dict)


def to_json(value: Any) -> Any:
    """Return a value in JSON types: dataclasses become objects, numpy and torch scalars become Python numbers."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        kind: Any = type(value)
        saved: dict[str, Any] = {}
        for spec in _specs(kind):
            item = to_json(getattr(value, spec.name))
            if item is not None or not spec.optional:
                spread = item if spec.spreads else {"": item}
                saved |= {spec.key.replace("{}", key): inner for key, inner in spread.items()}
        return saved
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_json(item) for item in value]
    if hasattr(value, "tolist"):
        return to_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def from_json(kind: type[T], value: Any, where: str = "results.json") -> T:
    """Read a value of a declared type: a dataclass, a builtin, or a list, dict or union of these."""
    return _parse(kind, value, where)


def _parse(kind: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if hasattr(kind, "from_json"):
        return kind.from_json(value)
    if dataclasses.is_dataclass(kind):
        if isinstance(value, dict):
            return _parse_object(kind, value, "{}", where)
    elif origin in (Union, UnionType):
        if value is None and NoneType in inner:
            return None
        choices = [choice for choice in inner if choice is not NoneType]
        same = [choice for choice in choices if type(value) is choice]
        return _parse((same or choices)[0], value, where)
    elif origin is list:
        if isinstance(value, list):
            return [_parse(inner[0], item, f"{where}, item {i}") for i, item in enumerate(value, 1)]
    elif origin is dict:
        if isinstance(value, dict):
            return {key: _parse(inner[1], item, f"{where}, {key}") for key, item in value.items()}
    elif kind is float:
        if value is None:
            return math.nan
        if type(value) in (int, float) and abs(value) < 1e300:
            return float(value)
    elif type(value) is kind:
        return value
    raise _damaged(where, f"expected {getattr(kind, '__name__', kind)}, got {str(value)[:50]!r}")


def _parse_object(kind: Any, saved: Mapping[str, Any], template: str, where: str) -> Any:
    """Read a dataclass from those keys of an object that match a template."""
    values: dict[str, Any] = {}
    rest = {key: saved[key] for key in saved if key not in set(_fixed_keys(kind, template))}
    for spec in _specs(kind):
        key = template.replace("{}", spec.key)
        if spec.nested:
            if not spec.optional or any(name in saved for name in _fixed_keys(spec.nested, key)):
                values[spec.name] = _parse_object(spec.nested, saved, key, where)
        elif spec.spreads:
            start, end = key.split("{}")
            names = [name for name in rest if name.startswith(start) and name.endswith(end)]
            spread = {name[len(start) : len(name) - len(end)]: rest.pop(name) for name in names}
            values[spec.name] = _parse(spec.kind, spread, where)
        elif key in saved:
            values[spec.name] = _parse(spec.kind, saved[key], f"{where}, {key}")
        elif spec.required:
            raise _damaged(where, f"expected the key {key!r}")
    return kind(**values)


def _damaged(where: str, problem: str) -> BadArtifact:
    return BadArtifact(
        f"{' '.join(where.split())[:200]}: {problem}; results.json was edited, damaged or written by another version, "
        f"so run the study again"
    )


@dataclass(frozen=True)
class _Spec:
    """How one field of a dataclass is written."""

    name: str
    key: str
    kind: Any
    nested: Any
    """The dataclass that a `{}` in the key spreads, if it does."""
    optional: bool
    required: bool

    @property
    def spreads(self) -> bool:
        return "{}" in self.key


@cache
def _specs(kind: Any) -> tuple[_Spec, ...]:
    specs, hints = [], typing.get_type_hints(kind, include_extras=True)
    for item in dataclasses.fields(kind):
        column, kind = Column(), hints[item.name]
        if get_origin(kind) is Annotated:
            kind, column = get_args(kind)
        choices = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        key = item.name if column.key is None else column.key
        nested = next((choice for choice in choices if dataclasses.is_dataclass(choice)), None)
        spec = _Spec(
            name=item.name,
            key=key,
            kind=kind,
            nested=nested if "{}" in key else None,
            optional=column.optional or ("{}" in key and NoneType in choices),
            required=item.default is item.default_factory is dataclasses.MISSING,
        )
        specs.append(spec)
    return tuple(specs)


def _fixed_keys(kind: Any, template: str) -> Iterator[str]:
    """The keys of a dataclass without those of its mappings, whose keys vary."""
    for spec in _specs(kind):
        key = template.replace("{}", spec.key)
        if spec.nested:
            yield from _fixed_keys(spec.nested, key)
        elif not spec.spreads:
            yield key
