"""Time rivals in one run and describe the machine."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch


def read_clock() -> float:
    """Seconds on a monotonic clock, read when every accelerator has done what was asked of it.

    Accelerators run behind the program: without the wait, a time would be that of launching kernels.
    """
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)
    return time.perf_counter()


def time_alternately(
    rivals: Mapping[str, Callable[[], object]], *, repeats: int = 5, warm_up: bool = True
) -> dict[str, list[float]]:
    """The seconds of each rival in `repeats` alternating runs, after one untimed run of each.

    Leave out the warm-up only for runs that are so long that their start does not matter. Alternating, forwards and
    backwards, spreads the other load of the machine evenly over all rivals.
    """
    if warm_up:
        for rival in rivals.values():
            rival()
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(repeats):
        order = list(rivals) if turn % 2 == 0 else list(rivals)[::-1]
        for name in order:
            start = read_clock()
            rivals[name]()
            seconds[name].append(read_clock() - start)
    return seconds


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median ratio of paired times: both times of a pair were measured under the same conditions."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def describe_machine() -> str:
    """One line that describes the machine of a measurement."""
    try:
        with open("/proc/cpuinfo") as lines:
            processor = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        processor = platform.machine()
    return (
        f"{os.cpu_count()} CPU cores ({processor}), {torch.get_num_threads()} threads, "
        f"{'GPU ' + torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU'}, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )
