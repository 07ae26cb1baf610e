"""A FIFO queue with one worker thread per model, and event streams to the client.

Answers as bytes, made once, and a cache that forgets the least used.

One model's desk: work waits in a line and is done one piece at a time, by a thread of its own.

A request whose turn does not come soon is told its place, and asks again: the same question finds its old place in the
line, or its answer in the cache. So nobody stalls, nobody loses a place, and a question asked twice is answered once.

Work that takes long in small steps (a generation, token by token) lets one question in between two of its steps.

Answers that come in lines: from the desk's thread to the event loop, and on for as long as somebody listens.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from layerjump.errors import LayerjumpError

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


FORGOTTEN = 15.0
"""Seconds after which a question that nobody repeats is not worked on any more."""
LONGEST = 64
"""Questions in line before new ones are turned away."""

log = logging.getLogger("layerjump")


@dataclass
class Task:
    """A piece of work in line."""

    work: Callable[[], Answer]
    doing: str
    """What it is, for those who wait: `reading`, `fitting mat`."""
    lasting: bool
    """Done even if nobody asks for it again."""
    long: bool
    """Never let in between the steps of another; its answer is for the one who asked, and not kept."""
    begun: bool = False
    asked: float = field(default_factory=time.monotonic)
    answer: Future[Answer] = field(default_factory=Future)


class Worker:
    """A line of work, and the thread that does it."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self._line: OrderedDict[Hashable, Task] = OrderedDict()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def ask(
        self,
        key: Hashable,
        work: Callable[[], Answer],
        *,
        doing: str = "reading",
        lasting: bool = False,
        long: bool = False,
    ) -> Future[Answer] | None:
        """Get in line, or back to one's place in it; the future gets the answer. None: the line is too long."""
        with self._changed:
            found = self._line.get(key)
            if found is not None:
                found.asked = time.monotonic()
                return found.answer
            if len(self._line) >= LONGEST and not lasting:
                return None
            piece = self._line[key] = Task(work, doing, lasting, long)
            self._start()
            self._changed.notify()
            return piece.answer

    def still_wanted(self, key: Hashable) -> None:
        """Somebody waits for this: it keeps its place, as if it were asked again."""
        with self._changed:
            if key in self._line:
                self._line[key].asked = time.monotonic()

    def let_in(self) -> None:
        """For long work to call between two of its steps: one short piece that waits is done now."""
        with self._changed:
            self._drop_forgotten()
            short = next(((key, each) for key, each in self._line.items() if not each.long), None)
        if short is not None:
            self._do(*short)

    def place(self, key: Hashable) -> int:
        """How many pieces are done before this one is; 0 while it is worked on, the line's length if not in it."""
        with self._changed:
            return next(
                (place for place, other in enumerate(self._line) if other == key), len(self._line)
            )

    @property
    def doing(self) -> str | None:
        """What is being worked on, in words."""
        with self._changed:
            return next((piece.doing for piece in self._line.values()), None)

    def _start(self) -> None:
        if self._thread is None:
            # A daemon: Ctrl-C does not wait for a long fit, whose files are only ever whole or not there.
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._drop_forgotten()
                while not self._line:
                    self._changed.wait()
                key, piece = next(iter(self._line.items()))
            self._do(key, piece)

    def _drop_forgotten(self) -> None:
        now = time.monotonic()
        for key, piece in list(self._line.items()):
            if not piece.lasting and not piece.begun and now - piece.asked > FORGOTTEN:
                del self._line[key]

    def _do(self, key: Hashable, piece: Task) -> None:
        piece.begun = True
        answer = _answer(piece.work)
        with self._changed:
            # Before it leaves the line, so that one who asks again finds it in one of the two.
            if not piece.long:
                self.answers.keep(key, answer)
            del self._line[key]
        piece.answer.set_result(answer)


def _answer(work: Callable[[], Answer]) -> Answer:
    try:
        return work()
    except LayerjumpError as error:
        return refusal(422, str(error))
    except Exception:
        log.exception("a request failed")
        return refusal(500, UNFORESEEN)


class ClientDisconnected(Exception):  # noqa: N818  (a signal, not an error)
    """Nobody listens any more."""


class EventQueue:
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
            raise ClientDisconnected

    def tell(self, answer: Answer) -> None:
        """Hand something over."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, answer)
        except RuntimeError:  # the loop ended in this very moment
            raise ClientDisconnected from None

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
        self, first: Answer | None, told: EventQueue, busy: Callable[[], Answer], *, patience: float
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
    first: Answer | None, told: EventQueue, busy: Callable[[], Answer], patience: float
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
