"""Tokens as text: decoded as inside a text, and printable, with visible whitespace."""

import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_texts: "WeakKeyDictionary[PreTrainedTokenizerBase, dict[int, str]]" = WeakKeyDictionary()
"""Cache of the texts of tokens: a trajectory has thousands of them, and decoding is slow."""


_WHITESPACE = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp"}
"""Unicode categories of invisible characters: controls, direction marks, joiners, unusual spaces."""


def token_texts(tokenizer: "PreTrainedTokenizerBase", ids: Iterable[int]) -> list[str]:
    """The texts of tokens inside a text: SentencePiece drops the leading space of a token that is decoded alone."""
    ids = list(ids)
    texts = _texts.setdefault(tokenizer, {})
    for token in {token for token in ids if token not in texts}:
        alone, twice = (str(tokenizer.decode([token] * times)) for times in (1, 2))
        texts[token] = twice[len(alone) :] if twice.startswith(alone) else alone
        if not alone and token >= len(tokenizer):
            texts[token] = f"<row {token}>"  # unembeddings are padded to a round number of rows
    return [texts[token] for token in ids]


def token_text(tokenizer: "PreTrainedTokenizerBase", token: int) -> str:
    """The text of a token inside a text."""
    return token_texts(tokenizer, [token])[0]


def escape_token(text: str) -> str:
    """A token's text with visible whitespace and escaped control characters; ∅ for an empty one."""
    escaped = "".join(map(_escape_character, text)) or "∅"
    # A combining mark would join the character before it, such as a table's border.
    return f"◌{escaped}" if unicodedata.combining(escaped[0]) else escaped


def _escape_character(character: str) -> str:
    if character in _WHITESPACE:
        return _WHITESPACE[character]
    if unicodedata.category(character) not in _INVISIBLE:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
