"""Rows with columns: JSON, CSV, TSV and Parquet files, and which column of theirs is the text."""

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from layerjump.errors import BadText

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
TEXT_COLUMNS = ("text", "sentence", "content")


def read_json(name: str, text: str, wanted: str | None) -> tuple[str, Iterator[str]]:
    """The column taken and its texts, from one object a line or an array of objects."""
    rows = list(json_rows(name, text))
    kinds: dict[str, set[type]] = {}
    for row in rows:
        for key, value in row.items():
            kinds.setdefault(key, set()).add(type(value))
    is_text = {key: kind - {type(None)} == {str} for key, kind in kinds.items()}
    column = choose_column(name, wanted, is_text)
    return column, texts(name, column, (row.get(column) for row in rows))


def json_rows(name: str, text: str) -> Iterator[dict[str, Any]]:
    """The objects of a text: one a line, or an array of them."""
    if text.lstrip().startswith("["):
        numbered: Iterable[tuple[int, Any]] = enumerate(_json_value(name, 1, text), start=1)
    else:
        lines = enumerate(text.split("\n"), start=1)
        numbered = ((i, _json_value(name, i, line)) for i, line in lines if line.strip())
    for number, row in numbered:
        if not isinstance(row, dict):
            raise BadText(
                f"row {number} of {name} is {short(json.dumps(row))}, but an object was wanted, "
                'such as {"text": "..."}; rewrite it so'
            )
        yield row


def _json_value(name: str, line: int, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        inside = getattr(error, "lineno", 1)
        raise BadText(
            f"line {line + inside - 1} of {name} is not JSON ({short(error)}); "
            "give one object a line, or one array of objects"
        ) from error


def read_csv(
    name: str, text: str, wanted: str | None, *, tabs: bool = False
) -> tuple[str, Iterator[str]]:
    """The column taken and its texts. The first row names the columns."""
    import pyarrow as pa
    from pyarrow import csv

    data = text.encode()
    # One block for the file: a document longer than a block would be an error.
    block = csv.ReadOptions(block_size=min(len(data) + 1, 2**31 - 1))
    # Tab-separated files have no quotes by definition; a sentence in one may well start with one.
    parse = csv.ParseOptions(
        delimiter="\t" if tabs else ",",
        quote_char=False if tabs else '"',
        newlines_in_values=not tabs,
    )
    try:
        table = csv.read_csv(io.BytesIO(data), read_options=block, parse_options=parse)
    except pa.ArrowInvalid as error:
        raise BadText(f"{name} is not a table ({short(error)}); mend that row") from error
    column = choose_column(name, wanted, _arrow_texts(table.schema))
    cells = table.column(table.schema.names.index(column))
    return column, texts(name, column, cells.to_pylist())


def read_parquet(path: Path, wanted: str | None) -> tuple[str, Iterator[str]]:
    """The column taken and its texts, a row group at a time."""
    from pyarrow import parquet

    with _parquet_errors(path.name):
        file = parquet.ParquetFile(path)
    column = choose_column(path.name, wanted, _arrow_texts(file.schema_arrow))
    return column, texts(path.name, column, _parquet_cells(file, path.name, column))


def _parquet_cells(file: Any, name: str, column: str) -> Iterator[object]:
    with _parquet_errors(name):
        for batch in file.iter_batches(columns=[column]):
            yield from batch.column(0).to_pylist()


@contextmanager
def _parquet_errors(name: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise BadText(
            f"{name} cannot be read as Parquet ({short(error)}); write it again"
        ) from error


def _arrow_texts(schema: Any) -> dict[str, bool]:
    kinds = {field.name: str(field.type).removeprefix("large_") for field in schema}
    return {
        name: kind in ("string", "string_view") or kind.startswith("dictionary<values=string")
        for name, kind in kinds.items()
    }


def choose_column(name: str, wanted: str | None, is_text: Mapping[str, bool]) -> str:
    """The column wanted; if none is, the only column of text, or the one with the usual name."""
    candidates = [column for column, good in is_text.items() if good]
    if wanted is None and len(candidates) > 1:
        candidates = [column for column in TEXT_COLUMNS if column in candidates][:1]
    if wanted is not None:
        candidates = [column for column in is_text if column == wanted]
    if candidates:
        return candidates[0]
    missing = "no one column of text" if wanted is None else f"no column {wanted!r}"
    raise BadText(f"{name} has {missing}; name one of its columns: {', '.join(is_text) or 'none'}")


def texts(name: str, column: str, cells: Iterable[object]) -> Iterator[str]:
    """The cells, which must be texts. An empty cell is passed over."""
    for row, cell in enumerate(cells, start=1):
        if cell is None:  # how Arrow and pandas write an empty cell
            continue
        if not isinstance(cell, str):
            raise BadText(
                f"row {row} of column {column!r} of {name} is {type(cell).__name__} "
                f"{short(cell)}, but text was wanted; name another column"
            )
        yield cell


def short(thing: object) -> str:
    """On one line and not too long, for a message."""
    line = " ".join(str(thing).split())
    return line if len(line) <= 160 else line[:157] + "..."
