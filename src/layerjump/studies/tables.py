"""Tables as HTML and CSV."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from layerjump.studies.charts import number, safe
from layerjump.studies.results import Row

MOST_ROWS = 40
"""A longer table is cut in the page; its CSV is whole."""


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Every key of any row, in the order of first sight."""
    return list(dict.fromkeys(key for row in rows for key in row))


def to_csv(rows: Sequence[Row]) -> str:
    """Every digit of every number; a list is written as JSON, what is not there as nothing."""
    file = io.StringIO()
    writer = csv.DictWriter(file, columns_of(rows), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: _cell(value) for key, value in row.items()})
    return file.getvalue()


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value


def csv_link(rows: Sequence[Row], file: str) -> str:
    """A link that saves the table: the data is in the page itself."""
    data = base64.b64encode(to_csv(rows).encode()).decode()
    name = escape(file, quote=True)
    return f'<a class="data" download="{name}" href="data:text/csv;charset=utf-8;base64,{data}">{name}</a>'


def html_table(
    head: Sequence[str], body: Iterable[Sequence[str]], *, numeric: Iterable[int] = ()
) -> str:
    """A table of cells that are already HTML; `numeric` columns are set to the right."""
    right = set(numeric)

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="number"' if place in right else "" for place in range(len(cells))]
        pairs = zip(cells, kinds, strict=True)
        return "<tr>" + "".join(f"<{tag}{kind}>{cell}</{tag}>" for cell, kind in pairs) + "</tr>"

    lines = "".join(line(cells, "td") for cells in body)
    return f'<div class="wide"><table><thead>{line(head, "th")}</thead><tbody>{lines}</tbody></table></div>'


def any_table(rows: Sequence[Row]) -> str:
    """Whatever a study left behind, as a table to read."""
    names = columns_of(rows)
    body = [[cell(row.get(name)) for name in names] for row in rows[:MOST_ROWS]]
    numeric = [
        place for place, name in enumerate(names) if all(_is_number(row.get(name)) for row in rows)
    ]
    cut = f"<p class=quiet>The first {MOST_ROWS} of {number(len(rows))} rows; the CSV has all.</p>"
    table = html_table([safe(name) for name in names], body, numeric=numeric)
    return table + (cut if len(rows) > MOST_ROWS else "")


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def cell(value: Any) -> str:
    """One value of a table as HTML."""
    if isinstance(value, list):
        return ", ".join(cell(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return safe(number(value))
