"""Answers as bytes, made once, and a cache that forgets the least used."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

CACHE_BYTES = 64 << 20
"""Bytes of answers that are kept: some 200 prompts of 32 tokens through a lens of 30 levels."""
ERRORS_KEPT = 10.0
"""Seconds that an error is kept: long enough for the one who asked to ask again, short enough to try anew."""

UNFORESEEN = "something went wrong here; the terminal that runs the server says what"
NOT_YET = 409
"""The status of an answer that a fit will change; it is never kept."""


@dataclass(frozen=True)
class Answer:
    """What goes back to the browser."""

    status: int
    body: bytes

    @property
    def good(self) -> bool:
        return self.status < 400


def encode(content: Any) -> bytes:
    """JSON without spaces; NaN and infinities, which JSON has not, are an error."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def refusal(status: int, message: str, **more: Any) -> Answer:
    """An error in one plain sentence."""
    return Answer(status, encode({"error": " ".join(message.split()), **more}))


class Answers:
    """The answers given last, up to so many bytes; errors only for a moment. Safe to use from any thread."""

    def __init__(self, size: int = CACHE_BYTES) -> None:
        self._room = size
        self._kept: OrderedDict[Hashable, tuple[Answer, float]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Answer | None:
        """The answer to a question, if it is still here."""
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            answer, end = found
            if time.monotonic() > end:
                self._drop(key)
                return None
            self._kept.move_to_end(key)
            return answer

    def keep(self, key: Hashable, answer: Answer) -> None:
        """Put an answer in, and let go of the least used ones if there is no room."""
        if answer.status == NOT_YET:
            return
        with self._lock:
            self._drop(key)
            end = float("inf") if answer.good else time.monotonic() + ERRORS_KEPT
            self._kept[key] = answer, end
            self._room -= len(answer.body)
            while self._room < 0:
                self._drop(next(iter(self._kept)))

    def _drop(self, key: Hashable) -> None:
        found = self._kept.pop(key, None)
        if found is not None:
            self._room += len(found[0].body)
