"""Result of a study: tables, headline, notes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Row = dict[str, Any]


@dataclass
class Result:
    """A study's numbers. Every figure and CSV of the report is made from these tables and nothing else."""

    study: str
    tables: dict[str, list[Row]] = field(default_factory=dict)
    headline: dict[str, Any] = field(default_factory=dict)
    """The few numbers a summary quotes, by name."""
    notes: list[str] = field(default_factory=list)
    """Sentences a reader must know: definitions that are ours, shortfalls, warnings."""
    settings: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    skipped: str | None = None
    """Why the study was not run, if it was not."""
    files: dict[str, str] = field(default_factory=dict)
    """Further files for the folder, name to text: not part of the results, nor of the report."""

    def as_json(self) -> dict[str, Any]:
        saved = asdict(self)
        del saved["files"]
        return plain(saved)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Result:
        return cls(**saved)


def plain(value: Any) -> Any:
    """Only what JSON knows: numbers that are not finite become None, numpy and torch scalars become Python's."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
