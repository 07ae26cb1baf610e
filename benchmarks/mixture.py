"""One corpus of several texts in equal parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import layerjump as lj


@dataclass(frozen=True)
class Mixture:
    """Documents of several texts, and the text of each document."""

    corpus: lj.Corpus
    of: Mapping[str, frozenset[int]]
    """Text → indices of its documents in the corpus."""


def mixture(texts: Mapping[str, lj.Corpus]) -> Mixture:
    """Mix texts in equal parts by words (a story is as long as ten sentences of news)."""
    words = min(sum(len(d.split()) for d in corpus.documents) for corpus in texts.values())
    documents: list[str] = []
    of = {}
    for name, corpus in texts.items():
        taken = _first(corpus, words)
        of[name] = frozenset(range(len(documents), len(documents) + len(taken)))
        documents += taken
    named = " + ".join(corpus.name for corpus in texts.values())
    return Mixture(lj.Corpus(named, tuple(documents), "equal parts, by words"), of)


def _first(corpus: lj.Corpus, words: int) -> list[str]:
    documents: list[str] = []
    for document in corpus.documents:
        if words <= 0:
            break
        documents.append(document)
        words -= len(document.split())
    return documents
