"""The fault programme: real runs are killed, starved of disk, stopped and started twice, and must lose nothing.

python tests/faults/programme.py --rounds 3 --seed 0

Prints a table, and as its last line JSON: fault → injected, survived, skipped, findings. What is wanted: a reader sees
the old artifact, the new one or none; what a run has acknowledged is not lost; a run that is taken up ends in the same
bytes as one that was never hurt; and who runs it reads one line, never a traceback.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import runs
from helpers.story_text import stories
from runs import (
    COMMANDS,
    OUT,
    Command,
    end_of,
    essence,
    fresh,
    launch,
    mounted,
    said,
    stop_when_it_holds_its_folder,
    tail,
    unless_one_line,
)

ANSWER = 20.0
"""Seconds in which a run that was told twice to stop must have ended, on a machine that is busy."""


@dataclass
class Tally:
    """What became of one kind of fault."""

    injected: int = 0
    survived: int = 0
    skipped: str = ""
    findings: list[str] = field(default_factory=list)

    def note(self, where: str, wrong: str | None) -> None:
        self.injected += 1
        print(f"{where}: {wrong or 'right'}", file=sys.stderr, flush=True)
        if wrong:
            self.findings.append(f"{where}: {wrong}")
        else:
            self.survived += 1


@dataclass
class Programme:
    """One run of all faults."""

    folder: Path
    seed: int
    commands: tuple[Command, ...] = COMMANDS
    tallies: dict[str, Tally] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.text = "\n\n".join(stories(40, seed=1).documents)
        self.other = "\n\n".join(stories(30, seed=2).documents)
        self.whole: dict[str, dict[str, Any]] = {}
        self.old: dict[str, Path] = {}
        self.seconds: dict[str, float] = {}

    def prepare(self) -> None:
        """Uninterrupted runs, to compare with; and of the quickest one, an older artifact of another text."""
        for command in self.commands:
            place = fresh(self.folder / f"whole-{command.name}", self.text)
            start = time.monotonic()
            code = end_of(launch(command.line(), place))
            self.seconds[command.name] = time.monotonic() - start
            if code:
                raise SystemExit(f"{command.name} does not run unhurt: {said(place)}")
            self.whole[command.name] = essence(place)
        for command in self.commands:
            if command.name in ("fit", "prune"):
                place = fresh(self.folder / f"old-{command.name}", self.other)
                assert end_of(launch(command.line(), place)) == 0, said(place)
                self.old[command.name] = place / OUT

    def tally(self, fault: str) -> Tally:
        return self.tallies.setdefault(fault, Tally())

    def begin(self, command: Command, *, over_old: bool = False) -> tuple[Path, tuple[str, ...]]:
        """A fresh working directory, perhaps with an older artifact; and what must be said to write over it."""
        place = fresh(self.folder / "hurt", self.text)
        old = self.old.get(command.name) if over_old else None
        if old is None:
            return place, ()
        shutil.copytree(old, place / OUT)
        return place, ("--force",)

    def finished(self, command: Command, place: Path) -> str | None:
        """Take a hurt run up (or make it again, where it was done before); what is wrong with its end."""
        code = end_of(launch(command.line(*command.resume, "--force"), place))
        if code:
            return f"it does not go on (exit {code}): {tail(place)}"
        return self.differs(command, place)

    def differs(self, command: Command, place: Path) -> str | None:
        now, whole = essence(place), self.whole[command.name]
        changed = [name for name in now.keys() | whole.keys() if now.get(name) != whole.get(name)]
        left = [path.name for path in place.iterdir() if path.name.startswith(".")]
        if changed:
            return f"ends otherwise in {sorted(changed)}"
        return f"leaves {left}" if left else None

    # -- the faults

    def kill(self, command: Command, times: int) -> None:
        """SIGKILL at random moments, again and again; then the run is let go on to its end."""
        over_old = self.draw.random() < 0.5
        place, more = self.begin(command, over_old=over_old)
        old = essence(place) if over_old else {}
        tally, known, resume = self.tally("SIGKILL"), 0, ()
        for _ in range(times):
            child = launch(command.line(*resume, *more), place)
            time.sleep(self.draw.uniform(0, self.seconds[command.name]))
            os.kill(child, signal.SIGKILL)
            code, resume = end_of(child), command.resume
            if code != -signal.SIGKILL:
                self.seconds[command.name] *= 0.8  # it was done before: runs are faster by now
                break
            wrong = runs.seen(command, place, self.whole[command.name], old)
            now = runs.acknowledged(place)
            if now < known and essence(place) in ({}, old):
                wrong = wrong or f"{known} was acknowledged, and {now} is left"
            known = now
            tally.note(command.name, wrong)
        tally.note(f"{command.name}, taken up", self.finished(command, place))

    def interrupt(self, command: Command, times: int, tries: int = 8) -> None:
        """Ctrl-C once, or twice: one line that says how to go on; and it goes on."""
        fault = "Ctrl-C" if times == 1 else "Ctrl-C twice"
        place, more = self.begin(command)
        child = launch(command.line(*more), place)
        # Not before the command has begun: until then Ctrl-C is Python's.
        stop_when_it_holds_its_folder(child, place)
        os.kill(child, signal.SIGCONT)
        time.sleep(self.seconds[command.name] * self.draw.uniform(0, 0.8))
        for _ in range(times):
            os.kill(child, signal.SIGINT)
            time.sleep(0.02)
        start = time.monotonic()
        code, printed, wrong = end_of(child), said(place), None
        done_before = code == 0 or self.differs(command, place) is None
        if done_before and tries:  # once more, earlier
            self.seconds[command.name] *= 0.8
            return self.interrupt(command, times, tries - 1)
        if done_before:
            return self.tally(fault).note(command.name, "it ends as if nobody had stopped it")
        if code != 130:
            wrong = f"exit {code}: {tail(place)}"
        elif "Traceback" in printed:
            wrong = f"a traceback: {tail(place)}"
        elif "run the same command" not in printed.strip().splitlines()[-1]:
            wrong = f"does not say how to go on: {tail(place)}"
        elif times > 1 and time.monotonic() - start > ANSWER:
            wrong = f"took {time.monotonic() - start:.0f} s to end"
        if wrong is None:
            wrong = self.finished(command, place)
        return self.tally(fault).note(command.name, wrong)

    def full_disk(self, command: Command) -> None:
        """A disk too small for the run; then it is made larger, and the run goes on."""
        tally = self.tally("disk full")
        place = fresh(self.folder / "hurt", self.text)
        size = self.draw.choice([24, 64, 150, 400, 900])
        if not mounted(place, f"size={size}k"):
            tally.skipped = "mounting a small disk needs root"
            return
        try:
            (place / runs.TEXT).write_text(self.text)
            code = end_of(launch(command.line(), place))
            wrong = unless_one_line(code, place, "cannot be written") if code else None
            subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)
            tally.note(f"{command.name} on {size} kB", wrong or self.finished(command, place))
        finally:
            subprocess.run(["umount", "--lazy", str(place)], check=True)

    def read_only(self, command: Command) -> None:
        """A folder in which nothing can be written."""
        tally = self.tally("read-only folder")
        place = fresh(self.folder / "hurt", self.text)
        if not mounted(place, "size=1m"):
            tally.skipped = "mounting a read-only disk needs root"
            return
        try:
            (place / runs.TEXT).write_text(self.text)
            subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
            code = end_of(launch(command.line(), place))
            tally.note(command.name, unless_one_line(code, place, "read-only"))
        finally:
            subprocess.run(["umount", "--lazy", str(place)], check=True)

    def removed_directory(self, command: Command) -> None:
        """The working directory is gone before the run begins."""
        place, _ = self.begin(command)
        text = place.parent / "text.txt"
        text.write_text(self.text)
        line = [str(text) if word == runs.TEXT else word for word in command.line()]
        code = end_of(launch(line, place, lambda: shutil.rmtree(place)))
        self.tally("removed directory").note(command.name, unless_one_line(code, place, "cannot be"))

    def two_at_once(self, command: Command) -> None:
        """A second run on the same folder is refused, and the first one does not notice."""
        place, _ = self.begin(command)
        first = launch(command.line(), place)
        stop_when_it_holds_its_folder(first, place)
        second = end_of(launch(command.line(), place))
        wrong = unless_one_line(second, place, "another run is writing")
        os.kill(first, signal.SIGCONT)
        if end_of(first):
            wrong = wrong or f"the first run ended badly: {tail(place)}"
        self.tally("two runs").note(command.name, wrong or self.differs(command, place))

    def clock_jumps(self, command: Command) -> None:
        """The time of day jumps to and fro by a day, all through the run."""
        tally, library = self.tally("clock jump"), self.folder / "clock.so"
        source = Path(__file__).with_name("clock.c")
        compiler = shutil.which("cc")
        if compiler is None or sys.platform != "linux":
            tally.skipped = "a clock to preload needs Linux and a C compiler"
            return
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        place, _ = self.begin(command)
        with (place.parent / runs.LOG).open("wb") as log:
            code = subprocess.run(
                [sys.executable, "-m", "layerjump", *command.line()],
                cwd=place,
                env=os.environ | {"LD_PRELOAD": str(library)},
                stdout=log,
                stderr=log,
                check=False,
            ).returncode
        wrong = f"exit {code}: {tail(place)}" if code else self.differs(command, place)
        tally.note(command.name, wrong)

    def run(self, rounds: int) -> None:
        """Every fault on every command, so many times; what can only be right or wrong once, once."""
        for command in self.commands:
            self.two_at_once(command)
            self.read_only(command)
            self.removed_directory(command)
            self.clock_jumps(command)
        for _ in range(rounds):
            for command in self.commands:
                self.kill(command, times=3)
                self.interrupt(command, times=1)
                self.interrupt(command, times=2)
                self.full_disk(command)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="commands, e.g. fit,prune (default: all)")
    given = parser.parse_args()
    names = given.only.split(",") if given.only else [command.name for command in COMMANDS]
    runs.import_everything()
    with tempfile.TemporaryDirectory() as folder:
        chosen = tuple(command for command in COMMANDS if command.name in names)
        programme = Programme(Path(folder), given.seed, chosen)
        programme.prepare()
        programme.run(given.rounds)
    print(f"{'fault':<20} {'injected':>8} {'survived':>8}  findings")
    for fault, tally in programme.tallies.items():
        print(f"{fault:<20} {tally.injected:>8} {tally.survived:>8}  {tally.skipped}")
        for finding in tally.findings:
            print(f"    {finding}")
    print(json.dumps({fault: vars(tally) for fault, tally in programme.tallies.items()}))
    sys.exit(any(tally.findings for tally in programme.tallies.values()))


if __name__ == "__main__":
    main()
