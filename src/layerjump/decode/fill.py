"""Caches that are not computed: keys and values of skipped blocks from states that are predicted or copied."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from layerjump.decode.climb import Climb
from layerjump.decode.rules import Rule, levels_of
from layerjump.decode.runner import Runner
from layerjump.errors import BadJumps
from layerjump.fit.jumps import Jumps
from layerjump.inputs.sites import Site
from layerjump.lens.lens import through


def filler(
    cache: str, jumps: Jumps | None, runner: Runner, rule: Rule
) -> Callable[[Climb], None] | None:
    """What fills the blocks above an exit; None for the exact cache, whose states wait instead."""
    if cache == "exact":
        return None
    if cache == "jump":
        _require(jumps, levels_of(rule, runner.n_blocks), runner.n_blocks)

    def fill(step: Climb) -> None:
        states = step.states[:, -1:]
        for block in range(step.level + 1, runner.n_blocks + 1):
            runner.fill(block, _predicted(jumps, cache, step.level, block - 1, states))
        runner.forget_waiting(step.level)

    return fill


def _predicted(jumps: Jumps | None, cache: str, level: int, target: int, states: Tensor) -> Tensor:
    if cache == "copy" or jumps is None or level == target:
        return states
    return through(jumps[level, target], states)


def _require(jumps: Jumps | None, levels: tuple[int, ...], n_blocks: int) -> None:
    for level in levels:
        for target in range(level + 1, n_blocks):
            if jumps is None or (Site(level), Site(target)) not in jumps:
                raise BadJumps(
                    f"the cache `jump` needs jumps from every level where tokens may leave to all levels above, but "
                    f"{jumps} has none from {level} to {target}; fit with pairs all, or choose another cache"
                )
