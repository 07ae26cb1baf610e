"""The most striking findings of one prompt, as sentences: `trajectory.findings()`.

Each is true of the numbers in the trajectory; a threshold decides whether it is worth a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

import torch

from layerjump.models.sites import Site

if TYPE_CHECKING:
    from layerjump.lens.trajectory import Trajectory

Kind = Literal["decided", "unsure", "growth", "dropped", "early", "undecided", "sink"]
_UNSURE = 0.3  # the model's own probability of its top token
_GROWTH = 0.1  # of a probability, from one level to the next
_DROPPED = 0.2  # the highest probability of a token that leads and is dropped
_DROPPED_ELSEWHERE = 0.5  # the same, at another position than the last
_SINK = 5.0  # the norm of the state at position 0, relative to the median of the others
_LISTED = 4  # positions that a sentence names


@dataclass(frozen=True)
class LensFinding:
    """One finding: a sentence, and the cell that it is about."""

    kind: Kind
    sentence: str
    position: int
    """The position in the text."""
    level: str
    """The name of the level."""


@dataclass(frozen=True)
class _Run:
    """Levels in a row at which one token leads: indices `start` to `end`, both included."""

    row: int
    token: int
    start: int
    end: int
    peak: float


def find_striking(trajectory: Trajectory) -> tuple[LensFinding, ...]:
    """The findings at the last position that was read, then those at the others."""
    scan = _Scan(trajectory)
    findings = [scan.decided(), scan.unsure(), scan.growth(), scan.dropped(), scan.dropped_elsewhere()]
    findings += [scan.early(), scan.undecided(), scan.sink()]
    return tuple(finding for finding in findings if finding is not None)


class _Scan:
    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory, self.levels = trajectory, trajectory.levels
        self.settled: list[int] = trajectory.settled_level.tolist()
        self.last = len(trajectory.positions) - 1
        self.model_top: list[int] = trajectory.model_top.tolist()
        self.top = trajectory.top[:, :, 0]
        self.probability = trajectory.probability[:, :, 0]
        last_site = trajectory.states.sites[-1]
        self.reads_model = last_site == Site(trajectory.model.n_blocks)

    def token(self, token: int) -> str:
        return repr(self.trajectory.decode([token])[0])

    def place(self, row: int) -> str:
        """A position in words: `position 4 (' is')`."""
        position = self.trajectory.positions[row]
        return f"position {position} ({self.trajectory.tokens[position]!r})"

    def finding(self, kind: Kind, sentence: str, row: int, level: int) -> LensFinding:
        return LensFinding(kind, sentence, self.trajectory.positions[row], self.levels[level])

    def rows_to_compare(self) -> list[int]:
        """Positions before the last one at which the lens was fitted."""
        first = self.trajectory.first_fitted_position
        return [row for row in range(self.last) if self.trajectory.positions[row] >= first]

    def decided(self) -> LensFinding | None:
        """Where the answer is decided."""
        level = self.settled[self.last]
        if level < 0:
            return None
        answer, end = self.token(self.model_top[self.last]), len(self.levels) - 1
        if level == 0:
            when = f"is read from level {self.levels[0]} on, at every level"
        elif level == end and self.reads_model:
            when = "is decided only at the last level: no level that was read before it has it on top"
            if (self.top[:end, self.last] == self.model_top[self.last]).any():
                when = "is decided only at the last level: earlier levels with it on top go back to another token"
        else:
            when = (
                f"is decided at level {self.levels[level]} of {self.trajectory.model.n_blocks}: it leads from there on"
            )
        return self.finding("decided", f"The answer {answer} at {self.place(self.last)} {when}.", self.last, level)

    def unsure(self) -> LensFinding | None:
        """A model that is not sure of its answer itself."""
        level = len(self.levels) - 1
        best, *others = self.trajectory.probability[level, self.last].tolist()
        if not self.reads_model or best >= _UNSURE or not others:
            return None
        first, second = (self.token(token) for token in self.trajectory.top[level, self.last, :2].tolist())
        sentence = f"The model is not sure: {first} has a probability of {best:.2f}, {second} of {others[0]:.2f}."
        return self.finding("unsure", sentence, self.last, level)

    def growth(self) -> LensFinding | None:
        """The step at which the answer's probability grows most."""
        if len(self.levels) < 2:
            return None
        answer = self.model_top[self.last]
        probability = self.trajectory.track(answer).probability[:, self.last]
        steps = probability.diff()
        level = int(steps.argmax()) + 1
        if steps[level - 1] < _GROWTH:
            return None
        sentence = (
            f"The probability of {self.token(answer)} there grows most from level {self.levels[level - 1]} to level "
            f"{self.levels[level]}: from {probability[level - 1]:.2f} to {probability[level]:.2f}."
        )
        return self.finding("growth", sentence, self.last, level)

    def dropped(self) -> LensFinding | None:
        """A token that leads at the last position and is dropped."""
        run = self._strongest_dropped([self.last])
        return None if run is None or run.peak < _DROPPED else self._describe_dropped(run)

    def dropped_elsewhere(self) -> LensFinding | None:
        """The same at another position, if it is a strong one."""
        run = self._strongest_dropped(self.rows_to_compare())
        return None if run is None or run.peak < _DROPPED_ELSEWHERE else self._describe_dropped(run)

    def _strongest_dropped(self, rows: list[int]) -> _Run | None:
        """Of tokens that lead at two levels in a row or more and are not the model's, the most probable one."""
        runs = []
        for row in rows:
            by_token = groupby(enumerate(self.top[:, row].tolist()), key=lambda item: item[1])
            for token, items in by_token:
                indices = [index for index, _ in items]
                is_dropped = token != self.model_top[row] and indices[-1] < len(self.levels) - 1
                if is_dropped and len(indices) > 1:
                    peak = float(self.probability[indices[0] : indices[-1] + 1, row].max())
                    runs.append(_Run(row, token, indices[0], indices[-1], peak))
        return max(runs, key=lambda run: run.peak, default=None)

    def _describe_dropped(self, run: _Run) -> LensFinding:
        sentence = (
            f"At {self.place(run.row)}, {self.token(run.token)} leads at levels {self.levels[run.start]} to "
            f"{self.levels[run.end]} with a probability of up to {run.peak:.2f} and is dropped; the model says "
            f"{self.token(self.model_top[run.row])}."
        )
        return self.finding("dropped", sentence, run.row, run.start)

    def early(self) -> LensFinding | None:
        """The position whose prediction is decided earliest."""
        rows = [row for row in self.rows_to_compare() if self.settled[row] >= 0]
        if len(rows) < 2:
            return None
        row = min(rows, key=lambda row: self.settled[row])
        level = self.settled[row]
        if level >= len(self.levels) // 2:
            return None
        same = sum(self.settled[other] == level for other in rows) - 1
        others = f", as at {same} other position{'s' if same > 1 else ''}" if same else ""
        sentence = (
            f"Earliest of the other positions, {self.token(self.model_top[row])} at {self.place(row)} is decided from "
            f"level {self.levels[level]} on{others}."
        )
        return self.finding("early", sentence, row, level)

    def undecided(self) -> LensFinding | None:
        """Positions whose prediction is decided at the last level only."""
        end, rows = len(self.levels) - 1, [*self.rows_to_compare(), self.last]
        late = [row for row in rows if self.settled[row] == end]
        if not (self.reads_model and end and late) or late == [self.last]:
            return None
        names = [self.place(row) for row in late[:_LISTED]]
        more = f" and {len(late) - _LISTED} more" if len(late) > _LISTED else ""
        sentence = (
            f"{len(late)} of {len(rows)} positions {'stay' if len(late) > 1 else 'stays'} undecided up to the last "
            f"level: {', '.join(names)}{more}."
        )
        return self.finding("undecided", sentence, late[0], end)

    def sink(self) -> LensFinding | None:
        """A state at position 0 that is far longer than the others, as attention sinks are."""
        states, sites = self.trajectory.states.states, self.trajectory.states.sites
        levels = [index for index, site in enumerate(sites) if site.part == "level"]
        if len(self.trajectory.positions) < 4 or self.trajectory.positions[0] != 0 or not levels:
            return None
        norms = [states[index].float().norm(dim=-1) for index in levels]
        ratios = torch.stack([norm[0] / norm[1:].median() for norm in norms])
        ratio, index = float(ratios.max()), levels[int(ratios.argmax())]
        if not ratio >= _SINK:
            return None
        sentence = (
            f"At level {self.levels[index]} the state at {self.place(0)} is {ratio:.0f} times as long as the median of "
            f"the others, as that of an attention sink is."
        )
        return self.finding("sink", sentence, 0, index)
