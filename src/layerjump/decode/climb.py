"""One step of generation: the newest token of every row goes up, block by block, until the rule lets all rows stop."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from layerjump.decode.result import Counts
from layerjump.decode.rules import Look, Rule, levels_of
from layerjump.decode.runner import Runner
from layerjump.decode.shortlist import Among
from layerjump.lens.lens import Lens


@dataclass(frozen=True)
class Climb:
    """How far one step went."""

    level: int
    """The deepest level that any row reached."""
    states: Tensor
    """What left the last block that was run, (rows, tokens, d); the newest token is the last."""
    left: list[int]
    """The level at which each row's token left."""
    logits: Tensor | None
    """Of the rows that left early, (rows, vocabulary); None if none did."""


class Climber:
    """Runs blocks and asks the rule."""

    def __init__(
        self,
        lens: Lens,
        rule: Rule,
        runner: Runner,
        counts: Counts,
        among: Among | None = None,
        early: Lens | None = None,
    ) -> None:
        self.runner = runner
        self._lens, self._rule, self._counts = lens, rule, counts
        self._among, self._early = among, early
        """A shortlist, and what reads it."""
        self._checks = frozenset(levels_of(rule, runner.n_blocks))

    def climb(self, ids: Tensor, idle: Tensor, *, may_leave: bool = True) -> Climb:
        """Feed the texts' new tokens, and go to where every row that is not idle may stop, or to level L."""
        last = self.runner.n_blocks
        states, logits = self.runner.feed(ids), None
        stopped, left = idle, [last] * len(ids)
        alone = len(ids) == 1
        earlier: tuple[Tensor, ...] = ()
        position = self.runner.position.expand(len(ids)) if may_leave and self._checks else None
        for level in range(last):
            if position is not None and level in self._checks:
                self._counts.lap("blocks")
                look = Look(level, states[:, -1], position, self._look, earlier)
                stops = self._rule.stops(look)
                self._counts.gates += look.gates
                if not alone:
                    stops = stops & ~stopped
                if bool(stops if alone else stops.any()):
                    logits = _merged(logits, self._of_all_tokens(look.logits), stops)
                    stopped = stopped | stops
                    for row in stops.nonzero()[:, 0].tolist():
                        left[row] = level
                if look.predicted:
                    earlier += (look.top,)
                self._counts.lap("rules")
                if logits is not None and bool(stopped.all()):
                    return Climb(level, states, left, logits)
            self._counts.lost += len(left) - left.count(last)
            states = self.runner.up(level + 1)
        self._counts.lap("blocks")
        return Climb(last, states, left, logits)

    def rest(self, level: int) -> Tensor:
        """Take all that waits from this level up to level L; the states that arrive there."""
        for block in range(level + 1, self.runner.n_blocks + 1):
            states = self.runner.up(block)
        self._counts.lap("blocks")
        return states

    def _look(self, level: int, states: Tensor) -> Tensor:
        """What a rule sees of a level: logits of the shortlist where there is one."""
        if self._early is None:
            return self.read(level, states)
        self._counts.lap("rules")
        self._counts.short_heads += 1
        logits = self._early.logits(level, states)
        self._counts.lap("heads")
        return logits

    def _of_all_tokens(self, logits: Tensor) -> Tensor:
        if self._among is None:
            return logits
        return self._among.whole(logits, self._lens.model.anatomy.vocabulary)

    def read(self, level: int, states: Tensor) -> Tensor:
        """Logits of states at a level: one vocabulary product."""
        self._counts.lap("rules")
        self._counts.heads += 1
        logits = self._lens.logits(level, states)
        self._counts.lap("heads")
        return logits


def _merged(before: Tensor | None, logits: Tensor, rows: Tensor) -> Tensor:
    return logits if before is None else torch.where(rows[:, None], logits, before)
