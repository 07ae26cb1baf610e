"""Answers that come in lines: from the desk's thread to the event loop, and on for as long as somebody listens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from layerjump.serve.answers import Answer


class Gone(Exception):  # noqa: N818  (a signal, not an error)
    """Nobody listens any more."""


class Told:
    """What one generation has told so far, from the desk's thread to the event loop that made this."""

    def __init__(self, closing: threading.Event) -> None:
        self.gone = threading.Event()
        """Set when the one who asked went away."""
        self._closing = closing
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Answer] = asyncio.Queue()
        self._complete = False

    def check(self) -> None:
        """`Gone` if there is nobody to tell anything."""
        if self.gone.is_set() or self._closing.is_set():
            raise Gone

    def tell(self, answer: Answer) -> None:
        """Hand something over."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, answer)
        except RuntimeError:  # the loop ended in this very moment
            raise Gone from None

    def end(self, answer: Answer) -> None:
        """Called in the loop itself: this is the last."""
        self._queue.put_nowait(answer)
        self._complete = True

    @property
    def ended(self) -> bool:
        """Whether all that was told has been taken."""
        return self._complete and self._queue.empty()

    async def next(self, seconds: float) -> Answer | None:
        """What was told next, or None if nothing was for so long."""
        try:
            return await asyncio.wait_for(self._queue.get(), seconds)
        except TimeoutError:
            return None


class Stream(StreamingResponse):
    """JSON lines: what is told, and until then the place in line, every `patience` seconds."""

    media_type = "application/x-ndjson"

    def __init__(
        self, first: Answer | None, told: Told, busy: Callable[[], Answer], *, patience: float
    ) -> None:
        self._told = told
        super().__init__(_lines(first, told, busy, patience))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # However it ended, nobody listens now; a generator that never began would not come to say so.
            self._told.gone.set()


async def _lines(
    first: Answer | None, told: Told, busy: Callable[[], Answer], patience: float
) -> AsyncIterator[bytes]:
    answer, begun = first, first is not None
    while True:
        if answer is not None:
            begun = True
            yield answer.body + b"\n"
        elif not begun:
            yield busy().body + b"\n"
        if told.ended:
            return
        answer = await told.next(patience)
