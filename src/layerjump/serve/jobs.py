"""Fits in the background: how far each is, and how it ended."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from layerjump.errors import one_line

KEPT = 50
"""Ended jobs that can still be asked about."""


@dataclass
class Job:
    """One fit. It is a context: entered when its turn comes, left when it is done or has failed."""

    model: str
    estimators: tuple[str, ...]
    id: str = field(default_factory=lambda: secrets.token_urlsafe(9))
    state: Literal["waiting", "fitting", "done", "failed"] = "waiting"
    done: int = 0
    total: int = 0
    error: str | None = None
    _started: float = 0.0

    def progress(self, done: int, total: int) -> None:
        """Tokens done and to do."""
        if not self._started:
            self._started = time.monotonic()
        self.done, self.total = done, total

    def __enter__(self) -> Job:
        self.state = "fitting"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.state = "done" if error is None else "failed"
        self.error = None if error is None else one_line(error, 1_000)

    @property
    def ended(self) -> bool:
        return self.state in ("done", "failed")

    @property
    def seconds_left(self) -> float | None:
        """At the speed so far; None before there is one."""
        spent = time.monotonic() - self._started
        if not self._started or not self.done or spent < 0.5:
            return None
        return spent * (self.total - self.done) / self.done

    def about(self) -> dict[str, Any]:
        """What the page shows of it."""
        left = self.seconds_left
        return {
            "id": self.id,
            "model": self.model,
            "estimators": list(self.estimators),
            "state": self.state,
            "done": self.done,
            "total": self.total,
            "seconds_left": None if left is None else round(left, 1),
            "error": self.error,
        }


class Jobs:
    """The fits of one run of the server, by id. Only the event loop uses it."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Job] = OrderedDict()

    def same(self, model: str, estimators: tuple[str, ...]) -> Job | None:
        """A fit of the same that has not ended."""
        return next(
            (
                job
                for job in self._jobs.values()
                if (job.model, job.estimators) == (model, estimators) and not job.ended
            ),
            None,
        )

    def add(self, job: Job) -> Job:
        """Remember a job, and forget the oldest that have ended."""
        self._jobs[job.id] = job
        ended = [each.id for each in self._jobs.values() if each.ended]
        for old in ended[: max(0, len(ended) - KEPT)]:
            del self._jobs[old]
        return job

    def get(self, id_: str) -> Job | None:
        return self._jobs.get(id_)
