"""An unfinished run: its saved sums, and how it is stopped without losing them."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from layerjump.errors import BadArtifact
from layerjump.fit.collected import Collected
from layerjump.fit.files import writing
from layerjump.fit.group import Group

SAVING_SHARE = 0.05
"""Saving sums takes at most this share of a run's time, however large they are."""


@dataclass
class Interrupt:
    """Whether somebody asked the run to stop."""

    asked: bool = False


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Let a batch finish before Ctrl-C or a termination request stops the run: half-added sums are worthless.

    A second Ctrl-C stops at once, and loses what came after the last save.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt  # only the main thread may handle signals
        return

    def ask(number: int, frame: object) -> None:
        if interrupt.asked:
            raise KeyboardInterrupt
        interrupt.asked = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Checkpoint:
    """Saved sums of an unfinished run, one file for each process."""

    folder: Path
    every: float = 60.0
    resume: bool = False
    group: Group = field(default_factory=Group)

    def __post_init__(self) -> None:
        self._saved = time.monotonic()
        self._cost = 0.0

    @property
    def path(self) -> Path:
        return self.folder / f"unfinished-{self.group.rank}-of-{self.group.world}.safetensors"

    def restore(self, fresh: Collected, steps: dict[str, int]) -> tuple[Collected, dict[str, int]]:
        """What was saved, if the run is to be taken up and was started with the same settings."""
        if not self.resume or not self.path.is_file():
            return fresh, steps
        saved, progress = Collected.load_unfinished(self.path)
        mine, theirs = (each.about | {"features": each.fit.reads} for each in (fresh, saved))
        changed = [key for key in mine if theirs.get(key) != mine[key]]
        if changed or saved.fit.pairs != fresh.fit.pairs or set(progress or {}) != set(steps):
            what = ", ".join(f"{key} {theirs.get(key)} → {mine[key]}" for key in changed) or "pairs"
            raise BadArtifact(
                f"the unfinished run in {self.folder} had other settings ({what}); give the same, or --force "
                f"in place of --resume to start anew"
            )
        return saved, progress or steps

    def save_now_and_then(self, done: Collected, steps: dict[str, int]) -> None:
        """Save if it is time: every so many seconds, less often if saving is slow."""
        if time.monotonic() - self._saved >= max(self.every, self._cost / SAVING_SHARE):
            self.save(done, steps)

    def save(self, done: Collected, steps: dict[str, int]) -> None:
        start = time.monotonic()
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        done.save(self.path, progress=dict(steps))
        self._saved = time.monotonic()
        self._cost = self._saved - start

    def clear(self) -> None:
        """Remove what a finished run no longer needs: all processes' sums, and a tuning that has come to its end."""
        for path in self.folder.glob("unfinished-*"):
            path.unlink(missing_ok=True)
