"""Placeholder until the report is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_report(results: dict[str, Any], folder: Path) -> list[Path]:
    path = folder / "summary.md"
    path.write_text("todo")
    return [path]


def write_comparison(results: list[dict[str, Any]], folder: Path) -> list[Path]:
    return []
