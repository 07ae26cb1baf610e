"""Results as text: numbers, percentages and names, HTML tables, CSV links."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, TypeVar

Item = TypeVar("Item")


def number(value: Any, digits: int = 3) -> str:
    """Format a number: thin spaces between thousands, about three significant digits, a true minus sign."""
    if value is None or value != value:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    size = abs(value)
    if isinstance(value, int) or size >= 1000:
        text = f"{value:,.0f}".replace(",", "\u202f")
    elif size >= 10:
        text = f"{value:.1f}"
    elif size >= 0.01 or size == 0:
        text = f"{value:.{digits - 1}f}"
    else:
        text = f"{value:.1g}"
    return text.replace("-", "−")


def percent(share: float) -> str:
    """Format 0.953 as 95.3 %."""
    return f"{100 * share:.3g}\u00a0%".replace("-", "−") if share == share else "–"


def safe(value: object) -> str:
    """Escape text from data for a figure or a page: both plotly and browsers take `<` for markup."""
    return escape(str(value), quote=True)


def plain_words(name: str) -> str:
    """Format a key such as `pairs_where_map_beats_identity` as words."""
    return name.replace("_", " ")


def listed(parts: Sequence[str]) -> str:
    """Join texts: `a`, `a and b`, `a, b and c`."""
    return " and ".join([*([", ".join(parts[:-1])] if parts[1:] else []), *parts[-1:]])


def unique(values: Iterable[Item]) -> list[Item]:
    """Return each value once, in the order of first occurrence."""
    return list(dict.fromkeys(values))


def identity_last(lenses: Iterable[str]) -> list[str]:
    """Return each lens once: the fitted ones in their order, the identity last."""
    return sorted(unique(lenses), key=lambda name: name == "identity")


def mean(values: Iterable[float | None]) -> float:
    """Return the mean of the finite numbers; NaN if there are none."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


MAX_ROWS = 40
"""Rows of a table that a page shows; the CSV file has all."""


def html_table(head: Sequence[str], body: Iterable[Sequence[str]], *, numeric: Iterable[int] = ()) -> str:
    """Return a table of cells that are HTML already; `numeric` columns are aligned to the right."""
    right = set(numeric)

    def line(cells: Sequence[str], tag: str) -> str:
        classes = [' class="number"' if index in right else "" for index in range(len(cells))]
        pairs = zip(cells, classes, strict=True)
        return "<tr>" + "".join(f"<{tag}{css}>{cell}</{tag}>" for cell, css in pairs) + "</tr>"

    lines = "".join(line(cells, "td") for cells in body)
    return f'<div class="wide"><table><thead>{line(head, "th")}</thead><tbody>{lines}</tbody></table></div>'


def table_of_records(records: Sequence[Mapping[str, Any]]) -> str:
    """Return JSON records as an HTML table, the first rows only."""
    names = _keys(records)
    body = [[html_cell(row.get(name)) for name in names] for row in records[:MAX_ROWS]]
    kinds = {name: {type(row.get(name)) for row in records} for name in names}
    numeric = [index for index, name in enumerate(names) if kinds[name] <= {int, float, type(None)}]
    table = html_table([safe(name) for name in names], body, numeric=numeric)
    if len(records) <= MAX_ROWS:
        return table
    return f'{table}<p class="quiet">The first {MAX_ROWS} of {number(len(records))} rows; the CSV file has all.</p>'


def html_cell(value: Any) -> str:
    """Return one value of a table as HTML."""
    if isinstance(value, list):
        return ", ".join(html_cell(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return safe(number(value))


def csv_link(records: Sequence[Mapping[str, Any]], file: str) -> str:
    """Return a link that saves a table as CSV; its data is in the page itself.

    It has every digit of every number; lists are JSON, null is an empty cell.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, _keys(records), lineterminator="\n")
    writer.writeheader()
    for row in records:
        cells = {key: json.dumps(v, ensure_ascii=False) if isinstance(v, list | dict) else v for key, v in row.items()}
        writer.writerow(cells)
    data = base64.b64encode(text.getvalue().encode()).decode()
    return f'<a class="data" download="{safe(file)}" href="data:text/csv;charset=utf-8;base64,{data}">{safe(file)}</a>'


def _keys(records: Sequence[Mapping[str, Any]]) -> list[str]:
    return unique(key for row in records for key in row)
