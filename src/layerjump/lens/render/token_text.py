"""Printable tokens: visible whitespace, escaped control characters."""

from __future__ import annotations

import unicodedata

_BLANKS = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp"}
"""Unicode categories of what is not seen: controls, marks of direction, joiners, odd blanks."""


def visible(text: str) -> str:
    """The text with blanks as signs and whatever is hidden as its code; ∅ for an empty one."""
    shown = "".join(map(_shown, text)) or "∅"
    # A mark that joins the letter before it would join the frame around it.
    return f"◌{shown}" if unicodedata.combining(shown[0]) else shown


def _shown(letter: str) -> str:
    if letter in _BLANKS:
        return _BLANKS[letter]
    if unicodedata.category(letter) not in _HIDDEN:
        return letter
    code = ord(letter)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
