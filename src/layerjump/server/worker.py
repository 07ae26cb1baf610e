"""A FIFO queue with one worker thread per model, and a cache of answers.

A request whose turn does not come soon gets its position in the queue, and the client repeats it: the same request
finds its old place, or its answer in the cache. So no connection waits for long, no request loses its place, and a
repeated request is computed once. Long work (a generation, token by token) runs one short task between two steps.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from layerjump.errors import LayerjumpError
from layerjump.server.schemas import Problem

CACHE_BYTES = 64 << 20
"""Size of the answer cache: about 200 prompts of 32 tokens through a lens of 30 levels."""
ERROR_SECONDS = 10.0
"""How long the cache keeps an error: the client that polls must find it, a later request must try again."""
ABANDONED_SECONDS = 15.0
"""A task that no client repeats for so long is dropped."""
MAX_QUEUE = 64
"""Queued tasks before new requests are refused."""
INTERNAL_ERROR = "something went wrong here; the terminal that runs the server says what"
NOT_FITTED = 409
"""The status of an answer that a fit will change; it is never cached."""

log = logging.getLogger("layerjump")


@dataclass(frozen=True)
class Answer:
    """An HTTP status and a JSON body."""

    status: int
    body: bytes

    @property
    def is_ok(self) -> bool:
        return self.status < 400


def encode(content: BaseModel | dict[str, Any]) -> bytes:
    """Compact JSON; raise for NaN and infinities, which JSON does not have."""
    plain = content.model_dump() if isinstance(content, BaseModel) else content
    return json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def error_answer(status: int, message: str) -> Answer:
    """An error in one sentence."""
    return Answer(status, encode(Problem(error=" ".join(message.split()))))


class Refused(Exception):
    """Ends a task with another answer than its result."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


class AnswerCache:
    """The latest answers, up to a number of bytes; errors only for some seconds. Thread-safe."""

    def __init__(self, size: int = CACHE_BYTES) -> None:
        self._free = size
        self._entries: OrderedDict[Hashable, tuple[Answer, float]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Answer | None:
        """The cached answer, if there is one that has not expired."""
        with self._lock:
            if key not in self._entries:
                return None
            answer, expires = self._entries[key]
            if time.monotonic() > expires:
                self._drop(key)
                return None
            self._entries.move_to_end(key)
            return answer

    def put(self, key: Hashable, answer: Answer) -> None:
        """Add an answer; drop the least recently used ones if the cache is full."""
        if answer.status == NOT_FITTED:
            return
        with self._lock:
            self._drop(key)
            expires = float("inf") if answer.is_ok else time.monotonic() + ERROR_SECONDS
            self._entries[key] = answer, expires
            self._free -= len(answer.body)
            while self._free < 0:
                self._drop(next(iter(self._entries)))

    def _drop(self, key: Hashable) -> None:
        if key in self._entries:
            answer, _ = self._entries.pop(key)
            self._free += len(answer.body)


@dataclass
class QueuedTask:
    """A task in the queue."""

    work: Callable[[], Answer]
    label: str
    """What it does, for clients that wait: `reading`, `fitting mat`."""
    is_persistent: bool
    """Whether it runs even if no client repeats its request."""
    is_long: bool
    """Whether it never runs between the steps of another task, and its answer is not cached."""
    is_started: bool = False
    last_requested: float = field(default_factory=time.monotonic)
    future: Future[Answer] = field(default_factory=Future)


class Worker:
    """A queue of tasks, and the thread that runs them one at a time."""

    def __init__(self, cache: AnswerCache) -> None:
        self.cache = cache
        self._queue: OrderedDict[Hashable, QueuedTask] = OrderedDict()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def submit(
        self,
        key: Hashable,
        work: Callable[[], Answer],
        *,
        label: str = "reading",
        is_persistent: bool = False,
        is_long: bool = False,
    ) -> Future[Answer] | None:
        """Queue a task, or find the one of the same key; None if the queue is full."""
        with self._changed:
            task = self._queue.get(key)
            if task is not None:
                task.last_requested = time.monotonic()
                return task.future
            if len(self._queue) >= MAX_QUEUE and not is_persistent:
                return None
            task = self._queue[key] = QueuedTask(work, label, is_persistent, is_long)
            if self._thread is None:
                # A daemon: Ctrl-C does not wait for a long fit, which writes its files atomically.
                self._thread = threading.Thread(target=self._run_tasks, daemon=True)
                self._thread.start()
            self._changed.notify()
            return task.future

    def keep_alive(self, key: Hashable) -> None:
        """Note that a client still waits for a task, as if it had repeated its request."""
        with self._changed:
            if key in self._queue:
                self._queue[key].last_requested = time.monotonic()

    def run_one_short_task(self, within: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Run the first short task in the queue, if there is one, in a context; long work calls this between steps."""
        with self._changed:
            self._drop_abandoned()
            short = next(((key, task) for key, task in self._queue.items() if not task.is_long), None)
        if short is not None:
            with within():
                self._run(*short)

    def position(self, key: Hashable) -> int:
        """How many tasks come before this one; 0 while it runs, the queue's length if it is not queued."""
        with self._changed:
            return next((index for index, other in enumerate(self._queue) if other == key), len(self._queue))

    @property
    def current_label(self) -> str | None:
        """What the running task does."""
        with self._changed:
            return next((task.label for task in self._queue.values()), None)

    def _run_tasks(self) -> None:
        while True:
            with self._changed:
                self._drop_abandoned()
                while not self._queue:
                    self._changed.wait()
                key, task = next(iter(self._queue.items()))
            self._run(key, task)

    def _drop_abandoned(self) -> None:
        now = time.monotonic()
        for key, task in list(self._queue.items()):
            can_drop = not task.is_persistent and not task.is_started
            if can_drop and now - task.last_requested > ABANDONED_SECONDS:
                del self._queue[key]

    def _run(self, key: Hashable, task: QueuedTask) -> None:
        task.is_started = True
        try:
            answer = task.work()
        except Refused as refused:
            answer = refused.answer
        except LayerjumpError as error:
            answer = error_answer(422, str(error))
        except Exception:
            log.exception("a request failed")
            answer = error_answer(500, INTERNAL_ERROR)
        with self._changed:
            # Cached before it leaves the queue, so that a repeated request finds it in one of the two.
            if not task.is_long:
                self.cache.put(key, answer)
            del self._queue[key]
        task.future.set_result(answer)
