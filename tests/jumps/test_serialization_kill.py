"""On a full disk, killed at any step, or read meanwhile, a folder holds the old jumps or the new."""

import contextlib
import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from helpers import jumps_folder, synthetic_jumps
from helpers.jumps_folder import TENSORS, TEXT
from helpers.processes import end_of, in_child, start

from layerjump.errors import BadArtifact
from layerjump.jumps import serialization
from layerjump.jumps.jumps import Jumps

disk, tmp_path, folder = jumps_folder.disk, jumps_folder.tmp_path, jumps_folder.folder  # fixtures


def test_a_full_disk_leaves_the_old_jumps_or_the_new(small_disk):  # noqa: F811
    old, new = synthetic_jumps.jumps(), synthetic_jumps.jumps(seed=1)
    ends = []
    for pages in range(12):
        serialization.save(old, small_disk)
        filler = small_disk / "filler"
        with contextlib.suppress(OSError):
            filler.write_bytes(b"x" * 4096 * pages)
        ends.append(attempt(new, small_disk))
        filler.unlink()
        assert state_of(small_disk, old, new) in ("old", "new")
        assert {path.name for path in small_disk.iterdir()} <= {TENSORS, TEXT}
    assert ends[0] == "saved"
    assert "the disk is full" in ends[-1]
    assert [end for end in ends if end != "saved"] == ends[ends.index(ends[-1]) :]


def attempt(jumps: Jumps, place: Path) -> str:
    try:
        serialization.save(jumps, place)
    except BadArtifact as error:
        return str(error).removeprefix(str(place))
    return "saved"


def die_at(step: int) -> None:
    """Kill this process, as no handler can notice, just before its n-th change of the file system."""
    steps = itertools.count(1)
    changes = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod"}

    def watch(event: str, arguments: object) -> None:
        if event in changes and next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


@pytest.mark.parametrize("before", [None, "old"])
def test_death_before_any_step_of_saving(tmp_path, before):
    old, new = synthetic_jumps.jumps(), synthetic_jumps.jumps(seed=1)
    seen = []
    for step in itertools.count(1):
        place = tmp_path / str(step)
        if before:
            serialization.save(old, place)
        end = in_child(lambda: (die_at(step), serialization.save(new, place)))  # noqa: B023
        seen.append(state_of(place, old, new))
        if end == 0:
            break
        assert end == -signal.SIGKILL
    # Old (or nothing) up to some step, new from then on, and the last steps were all seen.
    first = before or "absent"
    assert seen == [first] * seen.count(first) + ["new"] * seen.count("new")
    assert seen.count(first) >= 4
    assert seen.count("new") >= 4


def state_of(place: Path, old: Jumps, new: Jumps) -> str:
    if not (place / TENSORS).exists():
        assert not (place / TEXT).exists()
        return "absent"
    found = serialization.load(place)
    return "old" if synthetic_jumps.same(found, old) else "new" if synthetic_jumps.same(found, new) else "neither"


def test_death_at_any_moment(tmp_path):
    """A child saves one set and the other in turn, until it is killed; again and again."""
    place = tmp_path / "jumps"
    sets = [synthetic_jumps.jumps(d=96), synthetic_jumps.jumps(seed=1, d=96)]
    began = time.perf_counter()
    serialization.save(sets[0], place)
    duration = time.perf_counter() - began

    def save_for_ever() -> None:
        while True:
            for jumps in reversed(sets):
                serialization.save(jumps, place)

    wait = random.Random(0)
    for _ in range(60):
        child = start(save_for_ever)
        time.sleep(wait.uniform(0, 4 * duration))
        os.kill(child, signal.SIGKILL)
        assert end_of(child) == -signal.SIGKILL
        assert state_of(place, *sets) in ("old", "new")


def test_who_reads_while_another_saves_gets_the_old_or_the_new(folder):
    saved = [synthetic_jumps.jumps(), synthetic_jumps.jumps(seed=1)]
    ends = time.monotonic() + 3

    def save_by_turns():
        for one in itertools.cycle(saved):
            serialization.save(one, folder)
            if time.monotonic() > ends:
                return

    child = start(save_by_turns)
    loads = 0
    while time.monotonic() < ends:
        found = serialization.load(folder)  # an error here is a mixture of two
        assert any(synthetic_jumps.same(found, one) for one in saved)
        loads += 1
    assert end_of(child) == 0
    assert loads > 5
