"""Chats: messages as a model's chat template renders them, the role of every token, and a notice when it is missing."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerjump.errors import BadText, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKER = re.compile(r"<[^<>\s'\"{}]+>|\[/?[A-Z_]+\]")
"""A marker in a template: <|im_start|>, <start_of_turn>, [INST], [/INST]."""
_noted: set[str] = set()
"""Models whose note has been handed out: once a process is enough."""


Message = Mapping[str, str]
"""One turn of a chat: its `role` and its `content`."""
TEMPLATE = "template"
"""The role of tokens that the chat template adds around the messages."""


@dataclass(frozen=True)
class Chat:
    """Messages as the model reads them."""

    text: str
    ids: tuple[int, ...]
    roles: tuple[str, ...]
    """For each token the role of the message that it belongs to, or `template`."""


def is_chat(value: object) -> bool:
    """Whether a value is a list of messages rather than a text or a list of texts."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, Mapping) for item in value)


def has_chat_template(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Whether a tokenizer can render a chat."""
    return bool(getattr(tokenizer, "chat_template", None))


def render_chat(name: str, tokenizer: PreTrainedTokenizerBase | None, messages: Sequence[Message]) -> Chat:
    """Render messages by the tokenizer's chat template, ready for the assistant's answer if a user spoke last."""
    if tokenizer is None or not has_chat_template(tokenizer):
        raise BadText(f"expected a model with a chat template, got {name}; pass a plain text")
    for message in messages:
        if not (isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            raise BadText(f"expected messages such as {{'role': 'user', 'content': 'Hello'}}, got {repr(message)[:80]}")
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": messages[-1]["role"] != "assistant"}
    try:
        text = str(tokenizer.apply_chat_template([dict(message) for message in messages], **options))
    except Exception as error:  # a template raises whatever it likes
        raise BadText(f"the chat template of {name} refuses these messages: {one_line(error)}") from error
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    by_character = _roles_by_character(text, messages)
    roles = tuple(
        next((role for role in by_character[start:end] if role != TEMPLATE), TEMPLATE)
        for start, end in encoded["offset_mapping"]
    )
    return Chat(text, tuple(encoded["input_ids"]), roles)


def _roles_by_character(text: str, messages: Sequence[Message]) -> list[str]:
    """The role of every character; templates may strip the contents, but keep their order."""
    roles, start = [TEMPLATE] * len(text), 0
    for message in messages:
        content = message["content"].strip()
        found_at = text.find(content, start) if content else -1
        if found_at >= 0:
            start = found_at + len(content)
            roles[found_at:start] = [message["role"]] * len(content)
    return roles


def warn_of_plain_text(
    name: str, tokenizer: PreTrainedTokenizerBase | None, texts: Iterable[str], *, stacklevel: int
) -> None:
    """Warn once for each model if a text has none of the markers of the tokenizer's chat template."""
    note = plain_text_note(name, tokenizer, texts)
    if note:
        remedy = (
            "for a chat, pass its messages, [{'role': 'user', 'content': …}]; "
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
