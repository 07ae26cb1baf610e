"""Real runs of commands that can be hurt: how they are started, what they leave, and what of it must be the same.

Runs are forked from a process that has imported everything, so that they take seconds; each is a process of its own,
with its own working directory, signals and limits.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import layerjump as lj
from layerjump.cli import main

TINY = Path(__file__).resolve().parents[1] / "fixtures" / "tiny-gpt2"
OUT, TEXT, LOG = "out", "stories.txt", "log.txt"
_SHAPE = " --layers 2 --hidden-size 32 --vocab-size 300 --length 32 --batch-size 4 --steps 12 --eval-every 3"
_TIMES = ("seconds", "minutes", "machine", "command", "log")
"""What two runs of one command may differ in: how long they took, and whether they were resumed."""
_PAGES = (".html", ".md")


@dataclass(frozen=True)
class Command:
    """A command, and what is added to it to go on after a stop."""

    name: str
    arguments: tuple[str, ...]
    resume: tuple[str, ...] = ()

    def line(self, *more: str) -> list[str]:
        return [*self.arguments, "-o", OUT, *more]


def _of(name: str, arguments: str, *resume: str) -> Command:
    first, *rest = arguments.split()
    model = [] if first == "pretrain" else [str(TINY)]
    return Command(name, (first, *model, "--text", TEXT, *rest), resume)


COMMANDS = (
    _of("fit", "fit --pairs all --positions all --checkpoint-seconds 0", "--resume"),
    _of("refine", "fit --estimator affine --checkpoint-seconds 0 --refine --refine-steps 75", "--resume"),
    _of("study", "study --tokens 1500 --n-test-positions 60 r2 predictions", "--resume"),
    _of("prune", "prune --drop 1 --method replaceme --criterion deepest"),
    _of("distil", "prune --drop 1 --method linear --criterion deepest --distill-steps 8"),
    _of("pretrain", "pretrain" + _SHAPE),
)


def import_everything() -> None:
    """Children then have nothing to import; no gradient is computed here, which a fork would not survive."""
    for module in pkgutil.walk_packages(lj.__path__, "layerjump."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    lj.load(TINY)


def launch(line: list[str], place: Path, before: Callable[[], object] = lambda: None) -> int:
    """Start a command in a folder; `before` is done in the child first. Returns its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        # Whoever runs in the background ignores Ctrl-C, and so would its children.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log = os.open(place.parent / LOG, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(place)
        before()
        sys.argv = ["layerjump", *line]
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def end_of(child: int, seconds: float = 300) -> int:
    """Wait for a run: its exit code, or −signal. One that hangs is killed, and is a finding."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGALRM


def said(place: Path) -> str:
    """What the last run in a folder printed."""
    return (place.parent / LOG).read_text(errors="replace")


def fresh(folder: Path, text: str) -> Path:
    """An empty working directory with the text in it."""
    shutil.rmtree(folder, ignore_errors=True)
    place = folder / "work"
    place.mkdir(parents=True)
    (place / TEXT).write_text(text)
    return place


def essence(place: Path) -> dict[str, Any]:
    """All that a run left in its output folder and must leave again, byte for byte; of pages, that they are there."""
    found: dict[str, Any] = {}
    for path in sorted((place / OUT).rglob("*")):
        name = str(path.relative_to(place / OUT))
        if not path.is_file() or ".tmp" in name or name == ".lock":
            continue
        if path.suffix == ".json":
            found[name] = _timeless(json.loads(path.read_text()))
        else:
            whole = path.read_bytes()
            found[name] = len(whole) > 0 if path.suffix in _PAGES else hashlib.sha256(whole)
        if not isinstance(found[name], (bool, dict)):
            found[name] = found[name].hexdigest()
    return found


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(inner) for key, inner in value.items() if key not in _TIMES}
    return [_timeless(inner) for inner in value] if isinstance(value, list) else value


def seen(command: Command, place: Path, whole: dict[str, Any], old: dict[str, Any]) -> str | None:
    """What is wrong with what a reader finds now; None: the old, the new, or nothing is there."""
    now = essence(place)
    if command.name in ("fit", "refine"):
        tensors = now.get("jumps.safetensors")
        if tensors is None:
            return None
        try:
            lj.Jumps.from_pretrained(place / OUT)
        except lj.LayerjumpError as error:
            return f"the jumps cannot be read: {error}"
        known = [whole["jumps.safetensors"], old.get("jumps.safetensors")]
        return None if tensors in known else "the jumps are neither the old nor the new"
    if command.name == "study":
        studies = now.get("results.json", {}).get("studies", {})
        right = whole["results.json"]["studies"]
        wrong = [name for name in studies if studies[name] != right.get(name)]
        return f"other results of {wrong}" if wrong else None
    if now in ({}, whole, old):
        return None
    return f"half a folder: {sorted(now)}"


def acknowledged(place: Path) -> int:
    """How far a run says it has come: its last whole checkpoint, or how many studies it has saved."""
    steps = [int(mark.parent.name.split("-")[1]) for mark in place.glob(f"{OUT}-training/checkpoint-*/whole")]
    path = place / OUT / "results.json"
    studies = len(json.loads(path.read_text())["studies"]) if path.is_file() else 0
    return max([studies, *steps])


def mounted(place: Path, options: str) -> bool:
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0


def stop_when_it_holds_its_folder(child: int, place: Path) -> None:
    """Stop a run once its lock is held, not merely there, so that it cannot end before another has asked."""
    while True:
        for lock in (*place.glob(".out.lock"), *(place / OUT).glob(".lock")):
            os.kill(child, signal.SIGSTOP)
            with contextlib.suppress(FileNotFoundError), lock.open("r+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return
            os.kill(child, signal.SIGCONT)
        time.sleep(0.002)


def unless_one_line(code: int, place: Path, words: str) -> str | None:
    """What is wrong with how a run said that it cannot be done."""
    printed = said(place)
    lines = [line for line in printed.splitlines() if line.startswith("error: ")]
    if code != 1 or len(lines) != 1 or "Traceback" in printed or words not in lines[0]:
        return f"exit {code}: {tail(place)}"
    return None


def tail(place: Path) -> str:
    return " | ".join(said(place).strip().splitlines()[-3:])[-400:]
