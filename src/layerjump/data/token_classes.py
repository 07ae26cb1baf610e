"""The class of the token at a position: first, special, word, continuation, number, punctuation, whitespace, other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, get_args

TokenClass = Literal["first", "special", "word", "continuation", "number", "punctuation", "whitespace", "other"]
TOKEN_CLASSES: tuple[TokenClass, ...] = get_args(TokenClass)


def classify_tokens(ids: Sequence[int], texts: Sequence[str], special: Collection[int]) -> list[TokenClass]:
    """The class of each token of a sequence, from its position and its text inside the sequence.

    `first` is position 0, whatever stands there: it is an attention sink. `special` are the tokens whose ids are in
    `special`, such as [SEP] or the markers of a chat template. By their characters, others are `word` (with a letter,
    and the first piece of its word), `continuation` (with a letter, after a letter or digit without a space between),
    `number` (digits without letters), `punctuation` (visible characters without both), `whitespace`, or `other` (part
    of a character, or no character at all).
    """
    classes: list[TokenClass] = []
    for position, (token, text) in enumerate(zip(ids, texts, strict=True)):
        if position == 0:
            classes.append("first")
        elif token in special:
            classes.append("special")
        else:
            before = "" if ids[position - 1] in special else texts[position - 1]
            classes.append(_classify(text, before))
    return classes


def _classify(text: str, before: str) -> TokenClass:
    if any(character.isalpha() for character in text):
        return "continuation" if before[-1:].isalnum() and not text[0].isspace() else "word"
    if any(character.isnumeric() for character in text):
        return "number"
    if not text or "\ufffd" in text:
        return "other"
    return "whitespace" if text.isspace() else "punctuation"
