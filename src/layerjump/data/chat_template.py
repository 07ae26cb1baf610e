"""Notice when a chat model reads a text without its chat template."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKER = re.compile(r"<[^<>\s'\"{}]+>|\[/?[A-Z_]+\]")
"""A marker in a template: <|im_start|>, <start_of_turn>, [INST], [/INST]."""
_noted: set[str] = set()
"""Models whose note has been handed out: once a process is enough."""


def warn_of_plain_text(
    name: str, tokenizer: PreTrainedTokenizerBase | None, texts: Iterable[str], *, stacklevel: int
) -> None:
    """Warn once for each model if a text has none of the markers of the tokenizer's chat template."""
    note = plain_text_note(name, tokenizer, texts)
    if note:
        remedy = (
            "for a chat, pass model.tokenizer.apply_chat_template(messages, tokenize=False); "
            "warnings.filterwarnings('ignore', '.* is a chat model') silences this"
        )
        warnings.warn(f"{note}; {remedy}", UserWarning, stacklevel=stacklevel + 1)


def plain_text_note(name: str, tokenizer: PreTrainedTokenizerBase | None, texts: Iterable[str]) -> str | None:
    """What there is to say of texts without the markers of a chat template; None if nothing, or if said before."""
    markers = template_markers(tokenizer)
    if not markers or name in _noted or all(any(marker in text for marker in markers) for text in texts):
        return None
    _noted.add(name)
    return f"{name} is a chat model; the text is read as plain text, without its chat template"


def template_markers(tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    """The markers of a tokenizer's chat template, in the order of the template; none if it has no template."""
    template = getattr(tokenizer, "chat_template", None)
    if tokenizer is None or not template:
        return []
    source = template if isinstance(template, str) else "\n".join(map(str, template.values()))
    special = {token for token in tokenizer.all_special_tokens if token.strip() and token in source}
    return sorted(special | set(_MARKER.findall(source)), key=source.index)
