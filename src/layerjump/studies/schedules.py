"""Schedules of blocks that run and levels that are jumped over: pure functions, no model.

A schedule is the jumps it makes, in order: ((4, 6), (9, 12)) runs blocks 1 to 4, jumps from level 4 to level 6, runs
blocks 7 to 9 and jumps from 9 to 12. No jump starts where another ends: one fitted map over both does better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

Jump = tuple[int, int]
Schedule = tuple[Jump, ...]


def blocks_run(schedule: Schedule, blocks: int) -> int:
    """How many blocks a schedule runs."""
    return blocks - sum(target - source for source, target in schedule)


def single(blocks: int) -> list[Schedule]:
    """The jump to the last level from every level."""
    return [((level, blocks),) for level in range(blocks)]


def round_robins(blocks: int) -> dict[tuple[int, int], Schedule]:
    """(a, b) → run a blocks, jump b, again and again, for all a + b that divide the blocks.

    With a + b = the number of blocks there is one jump only: those are `single`, and left out here.
    """
    found: dict[tuple[int, int], Schedule] = {}
    for turn in range(2, blocks):
        if blocks % turn == 0:
            for run in range(1, turn):
                starts = range(run, blocks, turn)
                found[run, turn - run] = tuple((level, level + turn - run) for level in starts)
    return found


def cheapest(blocks: int, cost: Mapping[Jump, float]) -> dict[int, Schedule]:
    """For each number of blocks run, from 0 to all but one, the schedule whose jumps' costs have the least sum.

    Dynamic programming over levels: the best way to a level with so many blocks run, which ends with a block or with a
    jump, extends such a way to an earlier level.
    """
    # (level, blocks run) → (cost, schedule), apart for ways that end with a block and with a jump
    by_block: dict[tuple[int, int], tuple[float, Schedule]] = {(0, 0): (0.0, ())}
    by_jump: dict[tuple[int, int], tuple[float, Schedule]] = {}
    for level in range(1, blocks + 1):
        for run in range(level + 1):
            before = (level - 1, run - 1)
            ways = [way[before] for way in (by_block, by_jump) if before in way]
            if ways:
                by_block[level, run] = min(ways, key=lambda way: way[0])
            jumps = [
                (by_block[source, run][0] + cost[source, level], source)
                for source in range(level)
                if (source, level) in cost and (source, run) in by_block
            ]
            if jumps:
                total, source = min(jumps)
                by_jump[level, run] = total, (*by_block[source, run][1], (source, level))
    ends = {run: _better(by_block, by_jump, (blocks, run)) for run in range(blocks)}
    return {run: schedule for run, (total, schedule) in ends.items() if total < math.inf}


def most_explained(blocks: int, r2: Mapping[Jump, float]) -> dict[int, Schedule]:
    """For each number of blocks run, the schedule whose jumps' R² have the greatest product."""
    floor = 1e-12  # an R² at or below 0 explains nothing, but a schedule may have to use it
    return cheapest(blocks, {jump: -math.log(max(value, floor)) for jump, value in r2.items()})


def said(schedule: Schedule, blocks: int) -> str:
    """A schedule in one line: `0-4 → 6-9 → 12` runs from level 0 to 4, jumps to 6, runs to 9, jumps to 12."""
    starts = [0, *(target for _, target in schedule)]
    ends = [*(source for source, _ in schedule), blocks]
    legs = zip(starts, ends, strict=True)
    return " → ".join(f"{start}-{end}" if start < end else str(start) for start, end in legs)


def _better(
    by_block: Mapping[tuple[int, int], tuple[float, Schedule]],
    by_jump: Mapping[tuple[int, int], tuple[float, Schedule]],
    end: tuple[int, int],
) -> tuple[float, Schedule]:
    ways = [way[end] for way in (by_block, by_jump) if end in way]
    return min(ways, key=lambda way: way[0], default=(math.inf, ()))
