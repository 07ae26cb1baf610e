"""The two loops that write text: with every token final at once, or held against the full model first."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from layerjump.decode.choice import Choice, near_tie
from layerjump.decode.climb import Climb, Climber
from layerjump.decode.result import Counts
from layerjump.decode.texts import Texts

Fill = Callable[[Climb], None]
"""Give the blocks above an exit their keys and values without running them."""


def write(
    texts: Texts, climber: Climber, choice: Choice, counts: Counts, fill: Fill | None
) -> None:
    """Write until all texts are done. A token that leaves early is what it is.

    Without `fill` the states of such tokens wait, and run through the blocks above when another token does.
    """
    last = climber.runner.n_blocks
    if fill and texts.prompt > 1:
        # Only the newest token may leave: the prompt's keys and values are the model's own.
        idle = ~texts.busy(texts.prompt)
        climber.climb(texts.ids[:, :-1], idle, may_leave=False)
    while not texts.done:
        column = texts.ids.shape[1]
        busy = texts.busy(column)
        step = climber.climb(texts.ids, ~busy)
        logits = step.logits
        if step.level == last:
            final = climber.read(last, step.states[:, -1])
            early = busy.new_tensor([level < last for level in step.left])
            logits = final if logits is None else logits.where(early[:, None], final)
        elif fill:
            fill(step)
            counts.lap("blocks")
        assert logits is not None
        scores = choice.scores(texts.ids, logits)
        texts.put(column, choice.draw(scores), busy, step.left)
        texts.fix(column, busy, scores)
        texts.stream()
        counts.lap("rest")


LATELY = 16
"""Drafts by which it is judged whether drafting pays."""
REST = 64
"""Tokens without drafts where it does not."""


class Verified:
    """Writes what the full model would: drafts that left early are held against it before anybody sees them."""

    def __init__(
        self,
        texts: Texts,
        climber: Climber,
        choice: Choice,
        counts: Counts,
        *,
        most: int,
        least: float = 0.0,
    ) -> None:
        self._texts, self._climber, self._choice, self._counts = texts, climber, choice, counts
        self._most = most
        """How many tokens may stay unverified."""
        self._least = least
        """The share of drafts that must be right for drafting to go on."""
        self._lately: list[bool] = []
        self._resting_until = 0
        self._drafted_from: dict[int, Tensor] = {}
        """Column → the distribution that its drafts were drawn from, after all processors (sampling only)."""

    def write(self, longest: int | None) -> None:
        """Write until all texts are done; `longest` is where they end at the latest."""
        texts, last = self._texts, self._climber.runner.n_blocks
        column = texts.prompt
        while not texts.done:
            busy = texts.busy(column)
            drafts = column + 1 - texts.shortest
            may_leave = drafts <= self._most and column >= self._resting_until and bool(busy.any())
            step = self._climber.climb(texts.ids[:, :column], ~busy, may_leave=may_leave)
            states, drafted = step.states, column
            if step.level < last:
                ended = self._draft(column, step, busy)
                drafted = column + 1
                if not ended and column + 1 != longest:
                    column += 1
                    continue
                states = self._climber.rest(step.level)
            self._settle(states, column, drafted)
            column = texts.shortest
            self._judge(column)
            self._go_back(column - 1)
            texts.stream()
            self._counts.lap("rest")

    def _draft(self, column: int, step: Climb, busy: Tensor) -> bool:
        """Put down drafts; whether one of them would end its text, so that it should be held against the model now."""
        assert step.logits is not None
        scores = self._choice.scores(self._texts.ids[:, :column], step.logits)
        tokens = self._choice.draw(scores)
        if self._choice.sample:
            self._drafted_from[column] = scores.softmax(-1)
        self._texts.put(column, tokens, busy, step.left)
        self._counts.lap("rest")
        return bool(self._texts.ends) and not self._texts.ends.isdisjoint(tokens[busy].tolist())

    def _settle(self, states: Tensor, column: int, drafted: int) -> None:
        """Level L has been reached: know the tokens up to this column. Those before `drafted` have drafts."""
        texts, last = self._texts, self._climber.runner.n_blocks
        base = texts.shortest
        logits = self._climber.read(last, states[:, base - column - 1 :])
        whole = [last] * len(states)
        wrong = texts.busy(column) & False
        for place, at in enumerate(range(base, column + 1)):
            rows = texts.busy(at) & ~wrong
            if not bool(rows.any()):
                continue
            scores = self._choice.scores(texts.ids[:, :at], logits[:, place])
            if at < drafted:
                draft = texts.ids[:, at]
                tokens = self._choice.settle(scores, draft, self._drafted_from.get(at))
                changed = (tokens != draft) & rows
                self._counts.drafts += int(rows.sum())
                self._counts.accepted += int((rows & ~changed).sum())
                self._lately += (~changed[rows]).tolist()
                texts.put(at, tokens, changed, whole)
                wrong = wrong | changed
            else:
                texts.put(at, self._choice.draw(scores), rows, whole)
            if not self._choice.sample:
                self._counts.near_ties += int((near_tie(scores) & rows).sum())
            texts.fix(at, rows, scores)
        self._drafted_from.clear()

    def _judge(self, column: int) -> None:
        """Rest for a while if too few of the latest drafts were right."""
        if len(self._lately) >= LATELY:
            if sum(self._lately) < self._least * len(self._lately):
                self._resting_until = column + REST
            self._lately.clear()

    def _go_back(self, length: int) -> None:
        """Forget all that was fed after the tokens that every row knows."""
        if length < self._climber.runner.length and not self._texts.done:
            self._counts.rollbacks += 1
            self._climber.runner.back(length)
