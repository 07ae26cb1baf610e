"""The texts of requests: as the library takes them, and no longer than the server reads."""

from __future__ import annotations

from collections.abc import Sequence

from layerjump.data.chat import Message
from layerjump.errors import BadText
from layerjump.lens.prepare_prompt import chat_prompt
from layerjump.models.model import Model
from layerjump.server import schemas


def as_prompt(text: str | Sequence[schemas.Message]) -> str | list[Message]:
    """The text of a request as the library takes it: a text, or the messages of a chat."""
    return text if isinstance(text, str) else [message.model_dump() for message in text]


def count_tokens(model: Model, what: str, text: str | list[Message]) -> int:
    """The number of tokens of a text, chat or prompt; raise if the model does not read so many."""
    tokenization = model.tokenization
    if isinstance(text, str):
        length, characters = len(tokenization.wrap(tokenization.encode([text])[0])), len(text)
    else:
        length = len(chat_prompt(model, text).ids)
        characters = sum(len(message["content"]) for message in text)
    longest = min(schemas.MAX_PROMPT_TOKENS, tokenization.max_length)
    if length > longest:
        raise BadText(
            f"the {what} has {length:,} tokens, and at most {longest:,} are read; shorten it to about "
            f"{characters * longest // length:,} characters"
        )
    return length
