"""Documents: load them from files, tables, the hub or Python's manual, and split them by document.

Nothing heavy is imported until a source needs it, so that the command line starts fast.
"""

from __future__ import annotations

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

from layerjump.errors import BadText, TextTooShort, argument

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
TEXT_COLUMNS = ("text", "sentence", "content")
HUB_DOCUMENTS = 10_000
"""How many documents of a hub dataset are read without a limit: some datasets are endless."""

_LEIPZIG = re.compile(r"[0-9]+\t(.*)")
_BLANK_LINES = re.compile(r"\n\s*\n")
_HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.-]+))?")


@dataclass(frozen=True)
class Corpus:
    """Documents in order, with a name and a note on how the source was read."""

    name: str
    documents: tuple[str, ...]
    note: str

    @cached_property
    def sha256(self) -> str:
        """The hash of the documents, each preceded by its length, so that different lists never agree."""
        digest = hashlib.sha256()
        for document in self.documents:
            data = document.encode()
            digest.update(len(data).to_bytes(8, "big") + data)
        return digest.hexdigest()


@dataclass(frozen=True)
class Splits:
    """Disjoint document indices: to fit maps, to choose their settings (validation), to test them."""

    fit: tuple[int, ...]
    validation: tuple[int, ...]
    test: tuple[int, ...]


def load_text(source: str | Path | Iterable[str], *, column: str | None = None, limit: int | None = None) -> Corpus:
    """Load documents from a file, a hub dataset, standard input (`-`), `pydoc`, or a list of strings.

    A text file is read as Leipzig (`id<TAB>sentence`), as paragraphs between blank lines, or as one document a line;
    `note` of the corpus says which. JSON, CSV, TSV and Parquet have a `column`. A hub dataset is `owner/name`,
    `owner/name:config` or `owner/name@split`; without a `limit` only its first 10,000 documents are read. `pydoc` is
    the prose of Python's own manual.
    """
    if limit is not None and limit < 1:
        raise BadText(f"expected {argument('limit')} of 1 or more documents, got {limit}")
    opened = _open(source, column)
    at_most = opened.at_most if limit is None else limit
    documents = tuple(islice(_strip(opened), at_most))
    if not documents:
        raise BadText(f"{opened.name} has no documents, only whitespace; pass another text")
    if limit is not None and len(documents) < limit:
        raise TextTooShort(
            f"expected {limit:,} documents in {opened.name}, got {len(documents):,}; "
            f"pass more text, or {argument('limit', len(documents))} or less"
        )
    first = "the first " if len(documents) == at_most else ""
    noun = "document" if len(documents) == 1 else "documents"
    return Corpus(opened.name, documents, f"{first}{len(documents):,} {noun}, {opened.format}")


def split_indices(n_documents: int, split: str | tuple[float | int, ...] = "80/10/10", *, seed: int = 0) -> Splits:
    """Assign documents to the fit, validation and test splits at random.

    The result depends on the seed and the number of documents alone. Sizes that add up to 100 are percentages (a
    split with a share gets at least one document); any others are counts.
    """
    if seed < 0:
        raise BadText(f"expected {argument('seed')} of 0 or more, got {seed}")
    text = split if isinstance(split, str) else "/".join(str(size) for size in split)
    try:
        sizes = [float(size) for size in text.split("/")]
    except ValueError:
        sizes = []
    if len(sizes) != 3 or not all(math.isfinite(s) and s >= 0 for s in sizes) or not sum(sizes):
        raise BadText(
            f"expected {argument('split')} of three sizes for fit/select/test, such as 80/10/10 (percent) or "
            f"9000/500/500 (documents), got {text!r}"
        )
    if math.isclose(sum(sizes), 100):
        n_splits = sum(size > 0 for size in sizes)
        if n_documents < n_splits:
            raise TextTooShort(
                f"expected at least {n_splits} documents (lines or paragraphs of a file, rows of a table) for "
                f"{n_splits} splits, got {n_documents}; pass more text"
            )
        # The tiny addend keeps 0.1 % of 3,000 from being floored to 2.
        counts = [max(1, math.floor(s * n_documents / 100 + 1e-9)) if s else 0 for s in sizes]
        counts[sizes.index(max(sizes))] += n_documents - sum(counts)
    else:
        text = "/".join(f"{size:.12g}" for size in sizes)
        counts = [int(size) for size in sizes]
        if counts != sizes:
            raise BadText(
                f"expected {argument('split')} of percentages that add up to 100, or of integer numbers of documents, "
                f"got {text}, which adds up to {sum(sizes):.12g}"
            )
        if sum(counts) > n_documents:
            raise TextTooShort(
                f"expected {sum(counts):,} documents for {argument('split')} {text}, got {n_documents:,}; pass more "
                f"text, or a smaller split"
            )
    # Raw bits: numpy promises that these stay the same in all versions, but not `permutation`.
    order = np.argsort(np.random.PCG64(seed).random_raw(n_documents), kind="stable").tolist()
    validation, test = counts[0], counts[0] + counts[1]
    return Splits(
        fit=tuple(order[:validation]),
        validation=tuple(order[validation:test]),
        test=tuple(order[test : test + counts[2]]),
    )


def _strip(source: _Source) -> Iterator[str]:
    """The documents without surrounding whitespace, empty ones left out."""
    for number, document in enumerate(source.documents, start=1):
        document = document.strip()
        try:
            document.encode()
        except UnicodeEncodeError:  # JSON can spell this, but tokenizers and hashes cannot encode it
            raise BadText(
                f"expected Unicode text, got a lone surrogate (half a character) in document {number} of "
                f"{source.name}; correct or remove that document"
            ) from None
        if document:
            yield document


@dataclass(frozen=True)
class _Source:
    """An opened source. Its documents may be read only when they are iterated over."""

    name: str
    format: str  # how the source was read, for `Corpus.note`
    documents: Iterable[str]
    at_most: int | None = None  # how many documents are read if the caller sets no limit


def _open(source: str | Path | Iterable[str], column: str | None) -> _Source:
    """Open a source according to its kind."""
    if not isinstance(source, str | Path):
        return _without_columns(_Source("the list", "as given", _strings(source)), column)
    if source == "pydoc":
        return _without_columns(_pydoc(), column)
    if source == "-":
        return _without_columns(_text("standard input", sys.stdin.buffer.read()), column)
    if os.path.isdir(source):
        raise BadText(f"{source} is a folder; expected a file")
    if not os.path.exists(source):
        hub = _HUB_ID.fullmatch(str(source))
        if isinstance(source, Path) or hub is None or source.endswith((".txt", *SUFFIXES)):
            raise BadText(
                f"file {shorten(source)!r} does not exist; pass a file, a hub dataset (owner/name), "
                "`pydoc`, `-` for standard input, or a list of texts"
            )
        return _hub(hub, column)
    path = Path(source)
    name, suffix = path.name, path.suffix.lower()
    if suffix == ".parquet":
        return _read_parquet(path, column)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadText(f"{path} cannot be read ({shorten(error)}); pass a readable file") from error
    if suffix not in SUFFIXES:
        return _without_columns(_text(name, data), column)
    text = _decode(name, data)
    if not text.strip():
        return _Source(name, "empty", [])
    if suffix in (".jsonl", ".json"):
        return _read_json(name, text, column)
    return _read_csv(name, text, column, tabs=suffix == ".tsv")


def _without_columns(source: _Source, column: str | None) -> _Source:
    if column is not None:
        raise BadText(f"{source.name} has no columns, got {argument('column', column)}; leave it out")
    return source


def _strings(items: Iterable[object]) -> Iterator[str]:
    for number, item in enumerate(items):
        if not isinstance(item, str):
            raise BadText(f"expected a list of strings, got {type(item).__name__} {shorten(item)} as item {number}")
        yield item


def _pydoc() -> _Source:
    """The prose of Python's language reference, which every full installation has."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise BadText("this Python has no `pydoc` topics; pass a text file") from error
    paragraphs = (p for topic in sorted(topics) for p in _BLANK_LINES.split(topics[topic]))
    folded = (" ".join(paragraph.split()) for paragraph in paragraphs)
    # Topics repeat sections of each other. A repeated paragraph could be in both fit and test.
    prose = dict.fromkeys(paragraph for paragraph in folded if _is_prose(paragraph))
    return _Source("pydoc", f"paragraphs of the manual of Python {platform.python_version()}", prose)


def _is_prose(paragraph: str) -> bool:
    """Whether a paragraph is a sentence or more, and not a table, a heading, a grammar rule or code."""
    plain = sum(character.isalpha() or character == " " for character in paragraph)
    ends = paragraph.rstrip("\"')*”’").endswith((".", ":", ";", ",", "!", "?"))
    code = ">>>" in paragraph or "::=" in paragraph
    return len(paragraph) >= 40 and plain >= 0.85 * len(paragraph) and ends and not code


def _decode(name: str, data: bytes) -> str:
    """The text of UTF-8 bytes, with bare newlines and without a byte order mark."""
    # A zero byte is valid UTF-8, but texts do not contain it: this is UTF-16 or a binary file.
    bad = data.find(b"\0")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        bad = error.start if bad < 0 else min(bad, error.start)
    if bad >= 0:
        raise BadText(f"{name} is not UTF-8 text: byte 0x{data[bad]:02x} at offset {bad:,}; convert it to UTF-8 first")
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _text(name: str, data: bytes) -> _Source:
    text = _decode(name, data)
    # Not splitlines(), which also splits at U+2028, form feeds and other characters inside sentences.
    solid = [(i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if solid and all(_LEIPZIG.fullmatch(line) for _, line in solid[:100]):
        return _Source(name, "one a line (Leipzig: id<TAB>sentence)", _leipzig(name, solid))
    blank = solid[-1][0] - solid[0][0] + 1 - len(solid) if solid else 0
    # Not a single blank line but a share of them decides: one stray blank line must not join all lines of a file.
    if blank and blank >= 0.2 * len(solid):
        return _Source(name, "paragraphs between blank lines", _BLANK_LINES.split(text))
    skipped = f" (blank lines skipped: {blank:,})" if blank else ""
    return _Source(name, f"one a line{skipped}", [line for _, line in solid])


def _leipzig(name: str, lines: Iterable[tuple[int, str]]) -> Iterator[str]:
    for number, line in lines:
        match = _LEIPZIG.fullmatch(line)
        if match is None:
            raise BadText(
                f"expected digits<TAB>text in line {number} of {name}, as in its first lines, got {shorten(line)!r}; "
                "correct the line, or remove the digits from all of them"
            )
        yield match[1]


def _hub(hub: re.Match[str], column: str | None) -> _Source:
    import datasets
    from huggingface_hub import HfApi

    shows_progress = not datasets.are_progress_bars_disabled()
    try:
        # A quick request first: without a network, `datasets` retries for half a minute.
        HfApi().dataset_info(hub["id"], timeout=10)
        datasets.disable_progress_bars()
        rows = datasets.load_dataset(hub["id"], hub["config"], split=hub["split"] or "train", streaming=True)
    except Exception as error:  # `datasets` raises whatever its back ends do
        raise BadText(
            f"{hub[0]!r} is not a file, and as a hub dataset it cannot be read "
            f"({shorten(error)}); check the name and the network, or pass a file"
        ) from error
    finally:
        if shows_progress:
            datasets.enable_progress_bars()
    return _stream(hub[0], rows, column)


def _stream(name: str, rows: Iterable[Mapping[str, Any]], column: str | None) -> _Source:
    def read() -> Iterator[Mapping[str, Any]]:
        try:
            yield from rows
        except Exception as error:  # the network may fail at any row
            raise BadText(f"hub dataset {name} broke off ({shorten(error)}); try again") from error

    stream = read()
    first = next(stream, None)
    if first is None:
        return _Source(name, "empty", [])
    column = _choose_column(name, column, {key: isinstance(value, str) for key, value in first.items()})
    return _column(name, column, (row[column] for row in chain([first], stream)), HUB_DOCUMENTS)


def _read_json(name: str, text: str, column: str | None) -> _Source:
    """The text column of one object a line or of an array of objects."""
    rows = list(json_rows(name, text))
    kinds: dict[str, set[type]] = {}
    for row in rows:
        for key, value in row.items():
            kinds.setdefault(key, set()).add(type(value))
    is_text = {key: kind - {type(None)} == {str} for key, kind in kinds.items()}
    column = _choose_column(name, column, is_text)
    return _column(name, column, (row.get(column) for row in rows))


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
                f'expected an object such as {{"text": "..."}} in row {number} of {name}, got '
                f"{shorten(json.dumps(row))}"
            )
        yield row


def _json_value(name: str, line: int, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        inside = getattr(error, "lineno", 1)
        raise BadText(
            f"line {line + inside - 1} of {name} is not JSON ({shorten(error)}); "
            "expected one object a line, or one array of objects"
        ) from error


def _read_csv(name: str, text: str, column: str | None, *, tabs: bool) -> _Source:
    """The text column of a table whose first row names the columns."""
    import pyarrow as pa
    from pyarrow import csv

    data = text.encode()
    # The file as one block: a document longer than a block would be an error.
    block = csv.ReadOptions(block_size=min(len(data) + 1, 2**31 - 1))
    # Tab-separated files have no quoting by definition, and a sentence in one may start with a quote.
    parse = csv.ParseOptions(
        delimiter="\t" if tabs else ",", quote_char=False if tabs else '"', newlines_in_values=not tabs
    )
    try:
        table = csv.read_csv(io.BytesIO(data), read_options=block, parse_options=parse)
    except pa.ArrowInvalid as error:
        raise BadText(f"{name} is not a table ({shorten(error)}); correct that row") from error
    column = _choose_column(name, column, _arrow_texts(table.schema))
    cells = table.column(table.schema.names.index(column))
    return _column(name, column, cells.to_pylist())


def _read_parquet(path: Path, column: str | None) -> _Source:
    """The text column of a Parquet file, read one row group at a time."""
    import pyarrow as pa
    from pyarrow import parquet

    @contextmanager
    def reading() -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise BadText(f"{path.name} cannot be read as Parquet ({shorten(error)}); write it again") from error

    def cells(column: str) -> Iterator[object]:
        with reading():
            for batch in file.iter_batches(columns=[column]):
                yield from batch.column(0).to_pylist()

    with reading():
        file = parquet.ParquetFile(path)
    column = _choose_column(path.name, column, _arrow_texts(file.schema_arrow))
    return _column(path.name, column, cells(column))


def _arrow_texts(schema: Any) -> dict[str, bool]:
    kinds = {field.name: str(field.type).removeprefix("large_") for field in schema}
    return {
        name: kind in ("string", "string_view") or kind.startswith("dictionary<values=string")
        for name, kind in kinds.items()
    }


def _choose_column(name: str, column: str | None, is_text: Mapping[str, bool]) -> str:
    """The named column; without a name, the only column of text, or the one with a usual name."""
    if column is not None:
        candidates = [other for other in is_text if other == column]
    else:
        candidates = [other for other, good in is_text.items() if good]
        if len(candidates) > 1:
            candidates = [usual for usual in TEXT_COLUMNS if usual in candidates][:1]
    if candidates:
        return candidates[0]
    missing = "no single column of text" if column is None else f"no column {column!r}"
    names = ", ".join(is_text) or "none"
    raise BadText(f"{name} has {missing}; pass {argument('column')} as one of its columns: {names}")


def _column(name: str, column: str, cells: Iterable[object], at_most: int | None = None) -> _Source:
    """The source of a column's cells, which must be texts; empty ones are left out."""

    def texts() -> Iterator[str]:
        for row, cell in enumerate(cells, start=1):
            if cell is None:  # an empty cell of Arrow and pandas
                continue
            if not isinstance(cell, str):
                raise BadText(
                    f"expected text in row {row} of column {column!r} of {name}, got {type(cell).__name__} "
                    f"{shorten(cell)}; pass another {argument('column')}"
                )
            yield cell

    return _Source(name, f"column {column!r}", texts(), at_most)


def shorten(value: object) -> str:
    """The text of a value on one line and not too long, for a message."""
    line = " ".join(str(value).split())
    return line if len(line) <= 160 else line[:157] + "..."
