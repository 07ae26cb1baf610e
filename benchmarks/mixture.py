"""One corpus of several texts in equal parts, and which documents are of which text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import layerjump as lj
from layerjump.data.mixture import mix_texts


@dataclass(frozen=True)
class Mixture:
    """Documents of several texts, and the text of each document."""

    corpus: lj.Corpus
    of: Mapping[str, frozenset[int]]
    """Text → indices of its documents in the corpus."""


def mixture(texts: Mapping[str, lj.Corpus]) -> Mixture:
    """Mix texts in equal parts by words (a story is as long as ten sentences of news)."""
    mixed = mix_texts(list(texts.values()))
    of = {
        name: frozenset(index for index, source in enumerate(mixed.sources) if source == corpus.name)
        for name, corpus in texts.items()
    }
    return Mixture(mixed, of)
