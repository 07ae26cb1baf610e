"""A panel: what a report shows of one finding (a sentence, figures or a table, the data behind them)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

Row = dict[str, Any]
Study = Mapping[str, Any]
"""One study as `results.json` holds it: tables, headline, notes, settings."""


@dataclass(frozen=True)
class Panel:
    """One finding of a study."""

    title: str
    reading: str
    """One sentence that says what the numbers say; plain text."""
    tables: tuple[str, ...]
    """The tables it is made from: their CSV stands beside it."""
    figures: Sequence[go.Figure] = field(default=())
    """Shown beside each other where the screen is wide enough."""
    html: str = ""
    """Shown below the figures; whoever makes it escapes what comes from data."""


Maker = Callable[[Study], list[Panel]]
"""Draws some of a study's tables; no panel where what it needs is not there."""


def unique(values: Iterable[Any]) -> list[Any]:
    """Each value once, in the order of first sight."""
    return list(dict.fromkeys(values))


def where(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """The rows that hold these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def mean(values: Iterable[float | None]) -> float:
    """The mean of what is there; NaN of nothing."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else float("nan")


def named(study: Study, start: str) -> list[str]:
    """The names of the tables that start so: a study makes one for each estimator."""
    return [name for name in study["tables"] if name.startswith(start) and study["tables"][name]]


def lenses_of(rows: Sequence[Row]) -> list[str]:
    """The lenses of a table: the fitted ones in their order, the identity last."""
    return sorted(unique(row["lens"] for row in rows), key=lambda name: bool(name == "identity"))


def listed(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([*([", ".join(parts[:-1])] if parts[1:] else []), *parts[-1:]])
