"""Documents cut into the sequences that a model reads, kept end to end in a few arrays."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from layerjump.errors import TextTooShort
from layerjump.inputs.corpus import Corpus
from layerjump.inputs.positions import Positions
from layerjump.inputs.tokens import Tokens

Ints = NDArray[np.int64]

_DOCUMENTS_AT_ONCE = 256


@dataclass
class Sequences:
    """Sequences end to end: a million of them are eight arrays, not a million lists of integers."""

    ids: "array[int]" = field(default_factory=lambda: array("i"))
    start: "array[int]" = field(default_factory=lambda: array("q"))
    length: "array[int]" = field(default_factory=lambda: array("q"))
    source: "array[int]" = field(default_factory=lambda: array("q"))
    """How many tokens the encoder reads; they follow the sequence's own. 0 where there is one stack."""
    uncut: "array[int]" = field(default_factory=lambda: array("q"))
    document: "array[int]" = field(default_factory=lambda: array("q"))
    number: "array[int]" = field(default_factory=lambda: array("q"))
    picks: "array[int]" = field(default_factory=lambda: array("q"))

    def add(
        self,
        ids: Sequence[int],
        source: Sequence[int],
        *,
        uncut: int,
        document: int,
        number: int,
        picks: int,
    ) -> None:
        self.start.append(len(self.ids))
        self.uncut.append(uncut)
        self.ids.extend(ids)
        self.ids.extend(source)
        self.length.append(len(ids))
        self.source.append(len(source))
        self.document.append(document)
        self.number.append(number)
        self.picks.append(picks)

    def sizes(self) -> Ints:
        """Tokens of each sequence, its source included."""
        return np.asarray(self.length) + np.asarray(self.source)


def cut(
    corpus: Corpus,
    tokens: Tokens,
    positions: Positions,
    documents: Sequence[int],
    tokens_wanted: int | None,
    room: int,
    seed: int,
) -> Sequences:
    """Documents to sequences, as many as it takes. Those with nothing to draw from are left out.

    What follows the last pick cannot change a causal model's states there, and is not run. (A decoder's half is left
    whole all the same: rows that are as long as their sources pad less.)
    """
    sequences = Sequences()
    around = tokens.around
    ends_early = tokens.mask is None and not tokens.both_ways and positions.kind != "all"
    for document, ids in _encoded(corpus, tokens, documents):
        end = min(len(ids), room) if positions.first_sequence_only else len(ids)
        for number, start in enumerate(range(0, end, room)):
            source, row = _rows(tokens, ids[start : start + room])
            if not (picks := positions.count(len(row), *around)):
                continue
            end = len(row)
            if ends_early:
                drawn = positions.draw(end, *around, seed=seed, document=document, sequence=number)
                end = int(drawn[-1]) + 1
            which = {"document": document, "number": number, "picks": picks}
            sequences.add(row[:end], source, uncut=len(row), **which)
        if tokens_wanted is not None and len(sequences.ids) >= tokens_wanted:
            return sequences
    if tokens_wanted is not None:
        raise TextTooShort(
            f"asked for {tokens_wanted:,} tokens of {corpus.name}, but its {len(documents):,} "
            f"documents have {len(sequences.ids):,}; give more text or ask for at most "
            f"{len(sequences.ids)}"
        )
    return sequences


def _rows(tokens: Tokens, ids: list[int]) -> tuple[list[int], list[int]]:
    """What the encoder reads (nothing where there is one stack), and the row whose positions are drawn."""
    return ([], tokens.wrap(ids)) if tokens.start is None else tokens.halves(ids)


def _encoded(
    corpus: Corpus, tokens: Tokens, documents: Sequence[int]
) -> Iterator[tuple[int, list[int]]]:
    for start in range(0, len(documents), _DOCUMENTS_AT_ONCE):
        chunk = documents[start : start + _DOCUMENTS_AT_ONCE]
        encoded = tokens.encode([corpus.documents[document] for document in chunk])
        yield from zip(map(int, chunk), encoded, strict=True)
