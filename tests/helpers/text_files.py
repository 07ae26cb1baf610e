"""Files of text written on the spot, and the message with which one is refused."""

from pathlib import Path

import pytest

from layerjump.data.corpus import load_text
from layerjump.errors import BadText

ROWS = [{"id": i, "text": f"row number {i}"} for i in range(5)]
TEXTS = tuple(row["text"] for row in ROWS)


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def complaint(source, *, kind: type[BadText] = BadText, **options) -> str:
    """The message of the error that reading must end in."""
    with pytest.raises(BadText) as caught:
        load_text(source, **options)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert "\n" not in message
    return message
