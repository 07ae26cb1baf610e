"""Mix several texts in equal parts: what a map is calibrated on decides where it is good."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from layerjump.data.corpus import Corpus
from layerjump.errors import BadText


@dataclass(frozen=True)
class Mixture(Corpus):
    """Documents of several texts, and the name of each document's text."""

    sources: tuple[str, ...] = ()


def mix_texts(texts: Sequence[Corpus]) -> Mixture:
    """Return the first documents of several texts, as many words of each as the shortest has."""
    if not texts:
        raise BadText("expected one or more texts to mix, got none")
    words = min(sum(len(document.split()) for document in text.documents) for text in texts)
    documents = [(text.name, document) for text in texts for document in _first(text, words)]
    sources, contents = zip(*documents, strict=True)
    return Mixture(" + ".join(text.name for text in texts), contents, "equal parts, by words", sources)


def _first(text: Corpus, words: int) -> Iterator[str]:
    for document in text.documents:
        if words <= 0:
            return
        yield document
        words -= len(document.split())
