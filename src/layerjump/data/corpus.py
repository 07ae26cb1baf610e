"""Documents: read them from files, tables, the hub or Python's manual, and split them.

Rows with columns: JSON, CSV, TSV and Parquet files, and which column of theirs is the text.

Where documents come from: text files, tables, the hub, Python's own manual.

Nothing heavy is imported until a source needs it, so that the command line can read this early.

Documents: what is read, and which of it is for fitting, for choosing and for testing.
"""

import hashlib
import io
import json
import math
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from layerjump.errors import BadText, TextTooShort

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
                f"row {number} of {name} is {shorten(json.dumps(row))}, but an object was wanted, "
                'such as {"text": "..."}; rewrite it so'
            )
        yield row


def _json_value(name: str, line: int, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        inside = getattr(error, "lineno", 1)
        raise BadText(
            f"line {line + inside - 1} of {name} is not JSON ({shorten(error)}); "
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
        raise BadText(f"{name} is not a table ({shorten(error)}); mend that row") from error
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
            f"{name} cannot be read as Parquet ({shorten(error)}); write it again"
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
                f"{shorten(cell)}, but text was wanted; name another column"
            )
        yield cell


def shorten(thing: object) -> str:
    """On one line and not too long, for a message."""
    line = " ".join(str(thing).split())
    return line if len(line) <= 160 else line[:157] + "..."


HUB_DOCUMENTS = 10_000
"""How many documents of a hub dataset are read when no limit is given: some never end."""

_LEIPZIG = re.compile(r"[0-9]+\t(.*)")
_BLANK_LINES = re.compile(r"\n\s*\n")
_HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.-]+))?")


@dataclass(frozen=True)
class Found:
    """A source that has been opened. Its documents may still come in as they are asked for."""

    name: str
    how: str
    documents: Iterable[str]
    at_most: int | None = None


def find(source: str | Path | Iterable[str], column: str | None) -> Found:
    """Tell what kind of source it is, and open it."""
    if not isinstance(source, str | Path):
        return _without_columns(Found("the list", "as given", _strings(source)), column)
    if source == "pydoc":
        return _without_columns(_pydoc(), column)
    if source == "-":
        return _without_columns(_text("standard input", sys.stdin.buffer.read()), column)
    if os.path.isdir(source):
        raise BadText(f"{source} is a folder, but a file was wanted; name one file in it")
    if os.path.exists(source):
        return _file(Path(source), column)
    hub = _HUB_ID.fullmatch(str(source))
    if isinstance(source, Path) or hub is None or source.endswith((".txt", *SUFFIXES)):
        raise BadText(
            f"there is no file {shorten(source)!r}; give a file, a hub dataset (owner/name), "
            "`pydoc`, `-` for standard input, or a list of texts"
        )
    return _hub(hub, column)


def _file(path: Path, column: str | None) -> Found:
    name, suffix = path.name, path.suffix.lower()
    if suffix == ".parquet":
        return _table(name, read_parquet(path, column))
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadText(f"{path} cannot be read ({shorten(error)}); give a readable file") from error
    if suffix not in SUFFIXES:
        return _without_columns(_text(name, data), column)
    text = _decoded(name, data)
    if not text.strip():
        return Found(name, "empty", [])
    if suffix in (".jsonl", ".json"):
        return _table(name, read_json(name, text, column))
    return _table(name, read_csv(name, text, column, tabs=suffix == ".tsv"))


def _table(name: str, table: tuple[str, Iterator[str]]) -> Found:
    column, documents = table
    return Found(name, f"column {column!r}", documents)


def _without_columns(found: Found, column: str | None) -> Found:
    if column is not None:
        raise BadText(
            f"column {column!r} was asked for, but {found.name} has no columns; ask for none"
        )
    return found


def _strings(items: Iterable[object]) -> Iterator[str]:
    for number, item in enumerate(items):
        if not isinstance(item, str):
            raise BadText(
                f"item {number} of the list is {type(item).__name__} {shorten(item)}, "
                "but text was wanted; give a list of strings"
            )
        yield item


def _decoded(name: str, data: bytes) -> str:
    """Text with bare newlines and no byte order mark."""
    # A zero byte is good UTF-8, but no text has one: it is UTF-16 or a binary file.
    bad = data.find(b"\0")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        bad = error.start if bad < 0 else min(bad, error.start)
    if bad >= 0:
        raise BadText(
            f"{name} is not UTF-8 text: byte 0x{data[bad]:02x} at offset {bad:,}; "
            "give UTF-8 text, or convert it first"
        )
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _text(name: str, data: bytes) -> Found:
    text = _decoded(name, data)
    # Not splitlines(): that also cuts at U+2028, form feeds and others that sentences contain.
    solid = [(i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if solid and all(_LEIPZIG.fullmatch(line) for _, line in solid[:100]):
        return Found(name, "one a line (Leipzig: id<TAB>sentence)", _leipzig(name, solid))
    blank = solid[-1][0] - solid[0][0] + 1 - len(solid) if solid else 0
    # A share and not a single blank line decides: one stray blank must not glue a file together.
    if blank and blank >= 0.2 * len(solid):
        return Found(name, "paragraphs between blank lines", _BLANK_LINES.split(text))
    skipped = f" (blank lines skipped: {blank:,})" if blank else ""
    return Found(name, f"one a line{skipped}", [line for _, line in solid])


def _leipzig(name: str, lines: Iterable[tuple[int, str]]) -> Iterator[str]:
    for number, line in lines:
        match = _LEIPZIG.fullmatch(line)
        if match is None:
            raise BadText(
                f"line {number} of {name} is {shorten(line)!r}, but digits<TAB>text was wanted, as "
                "in its first lines; mend the line, or take the digits off all of them"
            )
        yield match[1]


def _pydoc() -> Found:
    """The prose of the language reference, which every full Python carries."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise BadText("this Python comes without `pydoc` topics; give a text file") from error
    paragraphs = (p for topic in sorted(topics) for p in _BLANK_LINES.split(topics[topic]))
    folded = (" ".join(paragraph.split()) for paragraph in paragraphs)
    # Topics repeat each other's sections. Kept twice, a paragraph could be in both fit and test.
    prose = dict.fromkeys(paragraph for paragraph in folded if _is_prose(paragraph))
    return Found("pydoc", f"paragraphs of the manual of Python {platform.python_version()}", prose)


def _is_prose(paragraph: str) -> bool:
    """Whether it is a sentence or more, and not a table, a heading, a grammar rule or code."""
    plain = sum(character.isalpha() or character == " " for character in paragraph)
    ends = paragraph.rstrip("\"')*”’").endswith((".", ":", ";", ",", "!", "?"))
    code = ">>>" in paragraph or "::=" in paragraph
    return len(paragraph) >= 40 and plain >= 0.85 * len(paragraph) and ends and not code


def _hub(hub: re.Match[str], column: str | None) -> Found:
    import datasets
    from huggingface_hub import HfApi

    try:
        # Ask once first: without a network, `datasets` retries for half a minute.
        HfApi().dataset_info(hub["id"], timeout=10)
        with _no_progress_bars(datasets):
            rows = datasets.load_dataset(
                hub["id"], hub["config"], split=hub["split"] or "train", streaming=True
            )
    except Exception as error:  # `datasets` raises whatever its back ends do
        raise BadText(
            f"there is no file {hub[0]!r}, and as a hub dataset it cannot be read "
            f"({shorten(error)}); check the name, the network, or give a file"
        ) from error
    return _stream(hub[0], rows, column)


def _stream(name: str, rows: Iterable[Mapping[str, Any]], column: str | None) -> Found:
    stream = _unbroken(name, rows)
    first = next(stream, None)
    if first is None:
        return Found(name, "empty", [])
    is_text = {key: isinstance(value, str) for key, value in first.items()}
    column = choose_column(name, column, is_text)
    documents = texts(name, column, (row[column] for row in chain([first], stream)))
    return Found(name, f"column {column!r}", documents, HUB_DOCUMENTS)


def _unbroken(name: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    try:
        yield from rows
    except Exception as error:  # the network may go away at any row
        raise BadText(f"hub dataset {name} broke off ({shorten(error)}); try again") from error


@contextmanager
def _no_progress_bars(datasets: Any) -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


@dataclass(frozen=True)
class Corpus:
    """Documents in order, with a name and a note on how they were read."""

    name: str
    documents: tuple[str, ...]
    note: str

    @cached_property
    def sha256(self) -> str:
        """The hash of the documents. Each goes in behind its length, so that no two lists agree."""
        digest = hashlib.sha256()
        for document in self.documents:
            data = document.encode()
            digest.update(len(data).to_bytes(8, "big") + data)
        return digest.hexdigest()


@dataclass(frozen=True)
class Splits:
    """Document indices, disjoint: fit the maps, select their settings, test what is shown."""

    fit: tuple[int, ...]
    select: tuple[int, ...]
    test: tuple[int, ...]


def load_text(
    source: str | Path | Iterable[str], *, column: str | None = None, limit: int | None = None
) -> Corpus:
    """Read documents from a file, a hub dataset, standard input (`-`), `pydoc`, or a list.

    A text file may be Leipzig (`id<TAB>sentence`), paragraphs between blank lines, or one document
    a line: `note` says which it was taken for. JSON, CSV, TSV and Parquet have a `column`. A hub
    dataset is `owner/name`, `owner/name:config`, `owner/name@split`; without a `limit` only its
    first 10,000 documents are read. `pydoc` is the English of Python's own manual.
    """
    if limit is not None and limit < 1:
        raise BadText(f"the limit given is {limit} documents; give 1 or more, or none for all")
    found = find(source, column)
    at_most = found.at_most if limit is None else limit
    documents = tuple(islice(_stripped(found), at_most))
    if not documents:
        raise BadText(f"{found.name} has no documents in it: nothing but blanks; give it some text")
    if limit is not None and len(documents) < limit:
        raise TextTooShort(
            f"asked for {limit:,} documents of {found.name}, but it has {len(documents):,}; "
            f"give more text or ask for at most {len(documents)}"
        )
    first = "the first " if len(documents) == at_most else ""
    many = "document" if len(documents) == 1 else "documents"
    return Corpus(found.name, documents, f"{first}{len(documents):,} {many}, {found.how}")


def _stripped(found: Found) -> Iterator[str]:
    for number, document in enumerate(found.documents, start=1):
        document = document.strip()
        try:
            document.encode()
        except UnicodeEncodeError:  # JSON can spell this; no tokenizer and no hash can take it
            raise BadText(
                f"document {number} of {found.name} has half a character in it (a lone surrogate), "
                "but Unicode text was wanted; mend or leave out that document"
            ) from None
        if document:
            yield document


def split_documents(
    n_documents: int, split: str | tuple[float | int, ...] = "80/10/10", *, seed: int = 0
) -> Splits:
    """Deal documents out to fit, select and test, at random, by the seed and their number alone.

    Sizes that add up to 100 are percentages (whoever gets a share gets at least one document);
    any others are counts.
    """
    if seed < 0:
        raise BadText(f"the seed given is {seed}; give 0 or more")
    parts = _parts(split)
    percent = math.isclose(sum(parts), 100)
    counts = _shares(parts, n_documents) if percent else _counts(parts, n_documents)
    # Raw bits, because numpy promises that these stay the same from version to version, and does
    # not promise it of `permutation`.
    order = np.argsort(np.random.PCG64(seed).random_raw(n_documents), kind="stable").tolist()
    select, test = counts[0], counts[0] + counts[1]
    return Splits(
        fit=tuple(order[:select]),
        select=tuple(order[select:test]),
        test=tuple(order[test : test + counts[2]]),
    )


def _parts(split: str | tuple[float | int, ...]) -> list[float]:
    shown = split if isinstance(split, str) else "/".join(str(size) for size in split)
    try:
        parts = [float(part) for part in shown.split("/")]
    except ValueError:
        parts = []
    good = len(parts) == 3 and all(math.isfinite(p) and p >= 0 for p in parts) and sum(parts) > 0
    if not good:
        raise BadText(
            f"the split given is {shown!r}; give three sizes for fit/select/test, such as "
            "80/10/10 (percent) or 9000/500/500 (documents)"
        )
    return parts


def _shares(parts: list[float], n_documents: int) -> list[int]:
    wanted = sum(part > 0 for part in parts)
    if n_documents < wanted:
        raise TextTooShort(
            f"the text has {n_documents} documents (lines or paragraphs of a file, rows of a table), which cannot be "
            f"split into {wanted} parts; give at least {wanted}"
        )
    # The tiny addend keeps 0.1 % of 3,000 from being floored to 2.
    counts = [max(1, math.floor(p * n_documents / 100 + 1e-9)) if p else 0 for p in parts]
    largest = parts.index(max(parts))
    counts[largest] += n_documents - sum(counts)
    return counts


def _counts(parts: list[float], n_documents: int) -> list[int]:
    shown = "/".join(f"{part:.12g}" for part in parts)
    if any(part != int(part) for part in parts):
        raise BadText(
            f"the split given is {shown}, which adds up to {sum(parts):.12g}; give percentages "
            "that add up to 100, or whole numbers of documents"
        )
    counts = [int(part) for part in parts]
    if sum(counts) > n_documents:
        raise TextTooShort(
            f"the split given is {shown}, {sum(counts):,} documents in all, but there are "
            f"{n_documents:,}; give more text or ask for fewer"
        )
    return counts
