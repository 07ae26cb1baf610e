"""Save the moments of an unfinished run from time to time, and resume from them.

A file holds the sums of some sources and, for every split, how many of its batches are in them: always the first ones,
in order. So a run can be resumed with any number of processes: each reads what there is of its own sources, whoever
wrote it, and adds the batches that are missing.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from layerjump.errors import BadArtifact, argument
from layerjump.io import writing
from layerjump.jumps.moments_of_splits import MomentsHeader, SplitMoments, read_header
from layerjump.jumps.process_group import ProcessGroup
from layerjump.models.sites import Site

log = logging.getLogger("layerjump")

SAVING_SHARE = 0.05
"""Saving sums takes at most this share of a run's time, however large they are."""


@dataclass
class PartialSums:
    """The sums of some sources, and how many batches of every split are in them: the first ones, in order."""

    moments: SplitMoments
    done: dict[str, int]


def join_equal_parts(parts: list[PartialSums], fresh: SplitMoments) -> list[PartialSums]:
    """Return one part instead of several that have the same batches."""
    if len(parts) < 2 or any(part.done != parts[0].done for part in parts):
        return parts
    joined = fresh.select([source for part in parts for source in part.moments.fit.sources])
    joined.fill([part.moments for part in parts])
    return [PartialSums(joined, parts[0].done)]


@dataclass
class Checkpoint:
    """Saved moments of an unfinished run, one file for each process."""

    folder: Path
    every: float = 60.0
    """Seconds between saves; more where saving is slow."""
    resume: bool = False
    group: ProcessGroup = field(default_factory=lambda: ProcessGroup())

    def __post_init__(self) -> None:
        self._saved_at = time.monotonic()
        self._seconds_to_save = 0.0

    def restore(self, fresh: SplitMoments, splits: Sequence[str]) -> list[PartialSums]:
        """Return the sums of this process's sources: those saved with the most batches, or empty ones.

        They are in several parts where processes had saved at different batches.
        """
        sources = self.group.divide_sources(fresh.fit.pairs)[self.group.rank]
        if not self.resume:
            for path in self._files() if self.group.rank == 0 else ():
                path.unlink(missing_ok=True)  # of a run that is not to be resumed
            return [PartialSums(fresh.select(sources), dict.fromkeys(splits, 0))] if sources else []
        best: dict[Site, tuple[Path, dict[str, int]]] = {}
        for path in (files := self._files()):
            header = read_header(path)
            self._check_same_run(fresh, header, splits)
            for source in dict.fromkeys(source for source, _ in header.pairs):
                if source not in best or sum(header.done.values()) > sum(best[source][1].values()):
                    best[source] = path, header.done
        parts = []
        for path in files:
            if chosen := [source for source in sources if source in best and best[source][0] == path]:
                parts.append(PartialSums(SplitMoments.load_sources(path, chosen), best[chosen[0]][1]))
        if missing := [source for source in sources if source not in best]:
            parts.append(PartialSums(fresh.select(missing), dict.fromkeys(splits, 0)))
        if self.group.rank == 0:
            every = [best[source][1] if source in best else {} for source in fresh.fit.sources]
            batches = sum(min(done.get(name, 0) for done in every) for name in splits)
            log.warning(
                "resuming after %s batches: %s files of saved sums in %s", f"{batches:,}", len(files), self.folder
            )
        return join_equal_parts(parts, fresh)

    def is_due(self) -> bool:
        """Whether the last save is long enough ago."""
        return time.monotonic() - self._saved_at >= max(self.every, self._seconds_to_save / SAVING_SHARE)

    def save(self, parts: Sequence[PartialSums]) -> None:
        """Save the sums of this process's sources; all processes save after the same batch.

        A process whose parts still differ saves nothing: they are as they were saved, but for a few batches. Files of
        another number of processes are removed when all have saved.
        """
        start = time.monotonic()
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        if len(parts) == 1:
            path = self.folder / f"unfinished-{self.group.rank}{self._of_world}"
            parts[0].moments.save(path, progress=parts[0].done)
        self._saved_at = time.monotonic()
        self._seconds_to_save = self._saved_at - start
        (some_differ,) = self.group.any_of(len(parts) > 1)
        if self.group.rank == 0 and not some_differ:
            for path in self._files():
                if not path.name.endswith(self._of_world):
                    path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove the unfinished files of all processes, and of a tuning that has ended."""
        for path in self.folder.glob("unfinished-*"):
            path.unlink(missing_ok=True)

    @property
    def _of_world(self) -> str:
        return f"-of-{self.group.world}.safetensors"

    def _files(self) -> list[Path]:
        """The files of any number of processes."""
        return sorted(self.folder.glob("unfinished-*-of-*.safetensors"))

    def _check_same_run(self, fresh: SplitMoments, saved: MomentsHeader, splits: Sequence[str]) -> None:
        again = f"{argument('force', True)} instead of {argument('resume', True)} to start again"
        if saved.products is None:
            raise BadArtifact(
                f"the unfinished run in {self.folder} was saved by an older layerjump, which resumes it; use {again}"
            )
        ours, theirs = asdict(fresh.info), asdict(saved.info)
        ours |= {"max_length": fresh.max_length, "features": fresh.fit.features, "products": fresh.fit.products}
        theirs |= {"max_length": saved.about.max_length, "features": saved.reads}
        theirs["products"] = getattr(torch, saved.products)
        changed = [name for name in ours if theirs[name] != ours[name]]
        sources = {source for source, _ in saved.pairs}
        pairs = [pair for pair in fresh.fit.pairs if pair[0] in sources]
        if changed or saved.pairs != pairs or set(saved.done) != set(splits):
            changes = ", ".join(f"{name} {theirs[name]} → {ours[name]}" for name in changed)
            raise BadArtifact(
                f"the unfinished run in {self.folder} had other settings ({changes or 'pairs'}); use the same, or "
                f"{again}"
            )


@contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Let a batch finish before Ctrl-C or a termination request, which set the event: half-added sums are useless.

    A second Ctrl-C stops at once, and loses what came after the last save.
    """
    interrupt = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt  # only the main thread may handle signals
        return

    def request(number: int, frame: object) -> None:
        if interrupt.is_set():
            raise KeyboardInterrupt
        interrupt.set()

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
