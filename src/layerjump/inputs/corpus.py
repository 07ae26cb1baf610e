"""Documents: what is read, and which of it is for fitting, for choosing and for testing."""

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from layerjump.errors import BadText, TextTooShort
from layerjump.inputs import sources


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


def read(
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
    found = sources.find(source, column)
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


def _stripped(found: sources.Found) -> Iterator[str]:
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


def split(
    n_documents: int, sizes: str | tuple[float | int, ...] = "80/10/10", *, seed: int = 0
) -> Splits:
    """Deal documents out to fit, select and test, at random, by the seed and their number alone.

    Sizes that add up to 100 are percentages (whoever gets a share gets at least one document);
    any others are counts.
    """
    if seed < 0:
        raise BadText(f"the seed given is {seed}; give 0 or more")
    parts = _parts(sizes)
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


def _parts(sizes: str | tuple[float | int, ...]) -> list[float]:
    shown = sizes if isinstance(sizes, str) else "/".join(str(size) for size in sizes)
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
