"""Where documents come from: text files, tables, the hub, Python's own manual.

Nothing heavy is imported until a source needs it, so that the command line can read this early.
"""

import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from layerjump.errors import BadText
from layerjump.inputs import tables
from layerjump.inputs.tables import short

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
    if isinstance(source, Path) or hub is None or source.endswith((".txt", *tables.SUFFIXES)):
        raise BadText(
            f"there is no file {short(source)!r}; give a file, a hub dataset (owner/name), "
            "`pydoc`, `-` for standard input, or a list of texts"
        )
    return _hub(hub, column)


def _file(path: Path, column: str | None) -> Found:
    name, suffix = path.name, path.suffix.lower()
    if suffix == ".parquet":
        return _table(name, tables.read_parquet(path, column))
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadText(f"{path} cannot be read ({short(error)}); give a readable file") from error
    if suffix not in tables.SUFFIXES:
        return _without_columns(_text(name, data), column)
    text = _decoded(name, data)
    if not text.strip():
        return Found(name, "empty", [])
    if suffix in (".jsonl", ".json"):
        return _table(name, tables.read_json(name, text, column))
    return _table(name, tables.read_csv(name, text, column, tabs=suffix == ".tsv"))


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
                f"item {number} of the list is {type(item).__name__} {short(item)}, "
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
                f"line {number} of {name} is {short(line)!r}, but digits<TAB>text was wanted, as "
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
            f"({short(error)}); check the name, the network, or give a file"
        ) from error
    return _stream(hub[0], rows, column)


def _stream(name: str, rows: Iterable[Mapping[str, Any]], column: str | None) -> Found:
    stream = _unbroken(name, rows)
    first = next(stream, None)
    if first is None:
        return Found(name, "empty", [])
    is_text = {key: isinstance(value, str) for key, value in first.items()}
    column = tables.choose_column(name, column, is_text)
    documents = tables.texts(name, column, (row[column] for row in chain([first], stream)))
    return Found(name, f"column {column!r}", documents, HUB_DOCUMENTS)


def _unbroken(name: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    try:
        yield from rows
    except Exception as error:  # the network may go away at any row
        raise BadText(f"hub dataset {name} broke off ({short(error)}); try again") from error


@contextmanager
def _no_progress_bars(datasets: Any) -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
