"""One model's desk: work waits in a line and is done one piece at a time, by a thread of its own.

A request whose turn does not come soon is told its place, and asks again: the same question finds its old place in the
line, or its answer in the cache. So nobody stalls, nobody loses a place, and a question asked twice is answered once.

Work that takes long in small steps (a generation, token by token) lets one question in between two of its steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field

from layerjump.errors import LayerjumpError
from layerjump.serve.answers import UNFORESEEN, Answer, Answers, refusal

FORGOTTEN = 15.0
"""Seconds after which a question that nobody repeats is not worked on any more."""
LONGEST = 64
"""Questions in line before new ones are turned away."""

log = logging.getLogger("layerjump")


@dataclass
class Piece:
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


class Desk:
    """A line of work, and the thread that does it."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self._line: OrderedDict[Hashable, Piece] = OrderedDict()
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
            piece = self._line[key] = Piece(work, doing, lasting, long)
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

    def _do(self, key: Hashable, piece: Piece) -> None:
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
