"""Spoilt copies of a text, for asking what a fit needs: word order, variety, cleanness."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from layerjump.inputs.corpus import Corpus

NOISE = 0.15
"""The share of words that `noised` replaces."""
_BLANKS = re.compile(r"(\s+)")

Spoil = Callable[[list[str], int], list[str]]


def spoilt(corpus: Corpus, documents: Sequence[int], variant: str, *, seed: int) -> Corpus:
    """The corpus with some of its documents spoilt, the others as they were."""
    changed = list(corpus.documents)
    new = VARIANTS[variant]([changed[document] for document in documents], seed)
    for document, text in zip(documents, new, strict=True):
        changed[document] = text
    return Corpus(f"{corpus.name} ({variant})", tuple(changed), corpus.note)


def shuffled(documents: list[str], seed: int) -> list[str]:
    """The words of each document in random order; the blanks stay where they were."""
    draw = random.Random(seed)
    found = []
    for document in documents:
        parts = _BLANKS.split(document)
        # Sorted by random(): the only draw that Python promises to repeat in any version.
        parts[::2] = sorted(parts[::2], key=lambda _: draw.random())
        found.append("".join(parts))
    return found


def duplicated(documents: list[str], seed: int) -> list[str]:
    """The first half of the documents, and again."""
    half = (len(documents) + 1) // 2
    return [documents[place % half] for place in range(len(documents))]


def noised(documents: list[str], seed: int) -> list[str]:
    """Some words replaced by random words of the text, common ones more often."""
    draw = random.Random(seed)
    words = [word for document in documents for word in document.split()]

    def change(word: str) -> str:
        replaced = draw.random() < NOISE
        return words[int(draw.random() * len(words))] if replaced else word

    found = []
    for document in documents:
        parts = _BLANKS.split(document)
        parts[::2] = [change(word) for word in parts[::2]]
        found.append("".join(parts))
    return found


VARIANTS: dict[str, Spoil] = {
    "shuffled": shuffled,
    "duplicated": duplicated,
    "noised": noised,
}
