"""Spoilt files by the thousand: each must load, or be refused by an error of ours in one line.

    python tests/faults/fuzz.py --inputs 10000                  every format; a table, then a line of JSON
    python tests/faults/fuzz.py --format jumps --seed 7         one format, other inputs
    python tests/faults/fuzz.py --format jumps --seed 7 --only 123    one input again, with its traceback

Inputs are read in forked processes of limited memory: a crash, a hang or a gigabyte is then the finding of one input.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from faults.formats import FORMATS, Format
from faults.mutate_pickles import CANARY
from layerjump.errors import LayerjumpError

SECONDS = 5.0
"""A reader that takes longer hangs."""
AT_ONCE = 200
"""Inputs that one process reads."""
LONGEST = 1000
"""Characters of an error that still count as one line."""


@dataclass
class Tally:
    """What became of a format's inputs."""

    inputs: int = 0
    loaded: int = 0
    refused: int = 0
    findings: list[tuple[int, str]] = field(default_factory=list)
    """Number of the input, what happened."""

    def add(self, number: int, outcome: str) -> None:
        self.inputs += 1
        if outcome in ("loaded", "refused"):
            setattr(self, outcome, getattr(self, outcome) + 1)
        else:
            self.findings.append((number, outcome))


def fuzz(name: str, *, inputs: int, seed: int = 0, first: int = 0) -> Tally:
    """Read so many spoilt samples of a format."""
    tally, chosen = Tally(), FORMATS[name]
    with sample(chosen) as good:
        number, last = first, first + inputs
        while number < last:
            end = min(number + AT_ONCE, last)
            for outcome in _in_child(chosen, good, f"{seed}/{name}", range(number, end)):
                tally.add(number, outcome)
                number += 1
    return tally


@contextmanager
def sample(chosen: Format) -> Iterator[dict[str, bytes]]:
    """A format's good files, by name, with an empty working directory for their readers."""
    shared = Path("/dev/shm")  # in memory: the disk's speed is not what is tested
    before = Path.cwd()
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        try:
            os.chdir(folder)
            folder = Path("good")
            folder.mkdir()
            chosen.make(folder)
            good = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
            for name in good:
                chosen.read(folder / name)  # a reader that refuses the good sample tests nothing
            yield good
        finally:
            os.chdir(before)


def _in_child(chosen: Format, good: dict[str, bytes], seed: str, numbers: range) -> Iterator[str]:
    """The outcomes of some inputs, up to the one that the process does not survive."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _read_all(chosen, good, seed, numbers, writing)
    os.close(writing)
    done = 0
    try:
        for line in _lines(reading):
            yield line
            done += 1
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        yield f"hang: over {SECONDS:g} s"
        done = len(numbers)
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL if done < len(numbers) else 0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if done < len(numbers):
        yield f"crash: the process ended with {status}"


def _lines(pipe: int) -> Iterator[str]:
    waiting = b""
    while True:
        if not select.select([pipe], [], [], SECONDS)[0]:
            raise TimeoutError
        piece = os.read(pipe, 1 << 16)
        if not piece:
            return
        *whole, waiting = (waiting + piece).split(b"\n")
        yield from (line.decode() for line in whole)


def _read_all(chosen: Format, good: dict[str, bytes], seed: str, numbers: range, pipe: int) -> None:
    """What a child does: read one input after another, and say what became of each."""
    torch.set_num_threads(1)
    faulthandler.disable()  # of a crash the parent tells
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + chosen.memory, size + chosen.memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in numbers:
        outcome = outcome_of(chosen, good, Random(f"{seed}/{number}"))
        os.write(pipe, outcome.encode(errors="replace") + b"\n")
    os._exit(0)


def outcome_of(chosen: Format, good: dict[str, bytes], chance: Random, *, show: bool = False) -> str:
    """Spoil one file, read it, and say `loaded`, `refused`, or what is wrong with that."""
    path = spoilt(chosen, good, chance)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = "loaded"
    try:
        chosen.read(path)
    except LayerjumpError as error:
        outcome = _refusal(error)
        if show:
            traceback.print_exc()
    except BaseException as error:
        outcome = f"{type(error).__name__}: {_one_line(error)} ({_place(error)})"
        if show:
            traceback.print_exc()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if Path(CANARY).exists():
        Path(CANARY).rmdir()
        return f"code of the file was run ({outcome})"
    if grown > chosen.memory // 2:
        return f"memory: {grown >> 20} MB ({outcome})"
    return outcome


def spoilt(chosen: Format, good: dict[str, bytes], chance: Random) -> Path:
    """Write a folder of good files, one of them damaged; return that one."""
    ways = {name: mutations for name in good for end, mutations in chosen.ways.items() if name.endswith(end)}
    name = chance.choice(sorted(ways))
    content = chance.choice(ways[name])(chance, good[name])
    folder = Path("spoilt")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    lacking = chosen.may_lack if name != chosen.may_lack and chance.random() < 0.7 else ""
    for other, whole in good.items():
        if other == name:
            (folder / other).write_bytes(content)
        elif other != lacking:
            (folder / other).write_bytes(whole)
    return folder / name


def _refusal(error: LayerjumpError) -> str:
    message, cause = str(error), error.__cause__
    if "\n" in message or len(message) > LONGEST:
        return f"an error of {len(message)} characters, not one line: {_one_line(error)}"
    while cause is not None:
        if isinstance(cause, MemoryError) or "allocate memory" in str(cause):
            return f"memory: more than it may have ({_one_line(error)})"
        cause = cause.__cause__
    return "refused"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]


def _place(error: BaseException) -> str:
    """The last line of ours on the way to an error."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "layerjump" in frame.filename] or frames
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"


def replay(name: str, seed: int, number: int) -> str:
    """Read one input again, in this process, and show what it raises."""
    with sample(FORMATS[name]) as good:
        return outcome_of(FORMATS[name], good, Random(f"{seed}/{name}/{number}"), show=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=1000, help="of each format")
    parser.add_argument("--format", action="append", choices=list(FORMATS), help="(default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of the one input to read")
    options = parser.parse_args()
    names = options.format or list(FORMATS)
    if options.only is not None:
        print(replay(names[0], options.seed, options.only))
        return
    tallies = {}
    print(f"{'format':20}{'inputs':>8}{'loaded':>8}{'refused':>9}{'findings':>10}{'a second':>10}")
    for name in names:
        start = time.perf_counter()
        tally = fuzz(name, inputs=options.inputs, seed=options.seed)
        speed = tally.inputs / (time.perf_counter() - start)
        n_findings = len(tally.findings)
        print(f"{name:20}{tally.inputs:8}{tally.loaded:8}{tally.refused:9}{n_findings:10}{speed:10.0f}")
        for what, count in Counter(text for _, text in tally.findings).most_common(20):
            number = next(number for number, text in tally.findings if text == what)
            print(f"    {count} × {what}; --format {name} --seed {options.seed} --only {number}")
        sys.stdout.flush()
        counts = vars(tally) | {"findings": n_findings}
        tallies[name] = counts
    print(json.dumps({"seed": options.seed, "formats": tallies}))
    sys.exit(any(counts["findings"] for counts in tallies.values()))


if __name__ == "__main__":
    main()
