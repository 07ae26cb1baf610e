"""Small stories made on the spot, in the words that the tiny models of tests/fixtures were trained on."""

from __future__ import annotations

import random

import torch

from layerjump.data.corpus import Corpus

WORDS = {
    "name": "Lily Tom Ben Mia Sam Anna Tim Sue Max Lucy Jack Amy",
    "other": "Lily Tom Ben Mia Sam Anna Tim Sue Max Lucy Jack Amy",
    "thing": "ball dog cat tree car box book bird fish hat cake flower bear toy boat stone apple house bike kite duck",
    "thing2": "cup bag door star moon frog rabbit shell rock ball dog cat tree car box book bird fish hat cake",
    "place": "park garden house forest beach kitchen yard store river school room lake farm hill",
    "kind": "big little red blue happy sad old new shiny soft round green yellow pretty funny small",
    "does": "saw found wanted liked took lost made gave held kept hid dropped",
}
LINES = (
    "Once upon a time, there was a {kind} girl named {name}.",
    "One day, {name} went to the {place} with {other}.",
    "{name} {does} a {kind} {thing} in the {place}.",
    'She said, "Can I play with your {thing}?"',
    "{other} was very {kind} and {does} the {thing}.",
    "They played with the {kind} {thing} all day.",
    '{name} said, "I like your {kind} {thing}, {other}!"',
    "The {thing} was under the {thing2} near the {place}.",
    "Her mom smiled and gave {name} a {thing} and a {thing2}.",
    "They were happy and went home.",
)


def stories(count: int, *, seed: int = 0, sentences: int = 5, name: str = "stories") -> Corpus:
    """So many stories of so many sentences."""
    draw = random.Random(seed)
    words = {kind: list_.split() for kind, list_ in WORDS.items()}

    def sentence(who: dict[str, str]) -> str:
        drawn = {kind: draw.choice(some) for kind, some in words.items()}
        return draw.choice(LINES).format(**(drawn | who))

    documents = []
    for _ in range(count):
        who = {kind: draw.choice(words[kind]) for kind in ("name", "other")}
        documents.append(" ".join(sentence(who) for _ in range(sentences)))
    return Corpus(name, tuple(documents), "made for a test")


def letters(count: int, *, seed: int = 0, words: int = 40, name: str = "letters") -> Corpus:
    """Text that is no language: random words of random letters."""
    draw = random.Random(seed)

    def word() -> str:
        return "".join(draw.choice("abcdefghijklmnop") for _ in range(draw.randint(1, 7)))

    documents = tuple(" ".join(word() for _ in range(words)) for _ in range(count))
    return Corpus(name, documents, "made for a test")


def numbers(count: int) -> Corpus:
    """Text of small numbers, each a token of the tokenizers that are made on the spot."""
    draw = torch.Generator().manual_seed(3)
    lines = torch.randint(0, 54, (count, 12), generator=draw).tolist()
    return Corpus("toy", tuple(" ".join(map(str, line)) for line in lines), "made for a test")
