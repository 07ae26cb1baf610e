"""An output folder has one writer at a time, and what a killed one left half done is put right by the next."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from layerjump.errors import BadArtifact
from layerjump.fit.files import writing

OLD = "old"
"""What a folder is called while the new one takes its name."""


@contextlib.contextmanager
def only_writer(folder: Path, *, replaced: bool = False) -> Iterator[None]:
    """Hold a folder for one run, or say that another has it. The system lets go of what a killed run held.

    `replaced` folders get their name when they are whole, so that their lock lies beside them; into others files are
    written one by one, perhaps where nothing beside them may be.
    """
    folder = folder.expanduser()
    place = folder.parent if replaced else folder
    path = place / (f".{folder.name}.lock" if replaced else ".lock")
    with writing(folder):
        new = not place.exists()
        place.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise BadArtifact(
                f"another run is writing {folder}; wait until it ends, or give another folder"
            ) from None
    try:
        if replaced:
            _put_right(folder)
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is ours: whoever waits for it sees that it is gone
        lock.release()
        if new:
            with contextlib.suppress(OSError):  # something was written
                place.rmdir()


def _put_right(folder: Path) -> None:
    """Give a folder its name back if a kill came between two names; remove what was never finished."""
    for leftover in folder.parent.glob(f".{glob.escape(folder.name)}.*.tmp"):
        if (leftover / OLD).exists() and not folder.exists():
            os.replace(leftover / OLD, folder)
        shutil.rmtree(leftover, ignore_errors=True)
