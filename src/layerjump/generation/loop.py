"""The decoding loops: early exit, and verified drafts.

From logits to tokens: Hugging Face's processors, the best token or a draw, and a draft held against the truth.

Growing texts: which tokens are decided, which rows are finished, what the streamer has been given.

One step of generation: the newest token of every row goes up, block by block, until the rule lets all rows stop.

The two loops that write text: with every token final at once, or held against the full model first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerjump.errors import BadJumps
from layerjump.generation.block_runner import Runner
from layerjump.generation.result import Counts
from layerjump.generation.rules import LevelReading, Rule, levels_of
from layerjump.generation.shortlist import ShortlistRule
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import apply_map
from layerjump.lens.lens import Lens
from layerjump.models.structure import Site

Processors = Callable[[Tensor, Tensor], Tensor]
"""(ids so far, scores) → scores: a `LogitsProcessorList`."""
NEAR = 1e-4
"""Two best logits closer than this may change places with the rounding of a product."""


class Choice:
    """How the next token is chosen, as `model.generate` does it."""

    def __init__(self, processors: Processors, *, sample: bool) -> None:
        self._processors = processors
        self.sample = sample

    def scores(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Scores of the next token of texts, (rows, vocabulary)."""
        # Hugging Face chooses in float32 too. Processors may write into what they are given.
        return self._processors(ids, logits.to(torch.float32, copy=True))

    def draw(self, scores: Tensor) -> Tensor:
        """The best token, or one drawn at random, of every row."""
        if not self.sample:
            return scores.argmax(-1)
        return torch.multinomial(scores.softmax(-1), 1)[:, 0]

    def settle(self, scores: Tensor, draft: Tensor, drafted_from: Tensor | None) -> Tensor:
        """The full model's token, given a draft: the draft itself wherever it may stay.

        Sampling accepts a draft x, drawn from q, with probability min(1, p(x)/q(x)), and else draws from (p − q)₊: the
        outcome is distributed as p, whatever q was.
        """
        if not self.sample:
            return scores.argmax(-1)
        assert drafted_from is not None
        p, q, at = scores.softmax(-1), drafted_from, draft[:, None]
        kept = torch.rand_like(p[:, 0]) * q.gather(1, at)[:, 0] < p.gather(1, at)[:, 0]
        rest = (p - q).clamp_min(0)
        # Where p = q nothing is left over, and nothing is ever rejected; the draw needs some weight all the same.
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)
        return torch.where(kept, draft, torch.multinomial(rest, 1)[:, 0])


def near_tie(scores: Tensor) -> Tensor:
    """Whether the two best are too close for rounding, (rows,)."""
    two = scores.topk(2).values
    return two[:, 0] - two[:, 1] < NEAR


Stops = Callable[[Tensor, Any], Tensor]
"""(ids so far, scores) → which rows are finished: a `StoppingCriteriaList`."""


class Texts:
    """The rows of a batch. A token is *known* once nothing can change it any more.

    Without verification that is at once. With it, rows may be known to different lengths: after a disagreement all go
    back to the shortest, and the others say again what they already know.
    """

    def __init__(
        self, prompt: Tensor, stops: Stops, *, pad: int | None, ends: frozenset[int], streamer: Any
    ) -> None:
        self.ids = prompt
        self.prompt = prompt.shape[1]
        rows = len(prompt)
        self.known = [self.prompt] * rows
        self.levels: list[dict[int, int]] = [{} for _ in range(rows)]
        """The level at which the token of a column left."""
        self.ended: list[int | None] = [None] * rows
        """The column of each row's last token."""
        self.ends = ends
        """Tokens that end a text."""
        self._pad, self._stops, self._streamer = pad, stops, streamer
        self._streamed = self.prompt
        if streamer is not None:
            streamer.put(prompt.cpu())

    @property
    def idle(self) -> list[bool]:
        """Rows that need no more tokens. Where nothing ends a text, Hugging Face goes on until all rows are done."""
        return [bool(self.ends) and end is not None for end in self.ended]

    @property
    def shortest(self) -> int:
        """How many tokens all rows that go on are known to."""
        going = [known for known, idle in zip(self.known, self.idle, strict=True) if not idle]
        return min(going, default=self.width)

    @property
    def width(self) -> int:
        """One more than the last column that any row has ended at so far."""
        return max((end + 1 for end in self.ended if end is not None), default=self.prompt)

    @property
    def done(self) -> bool:
        return all(end is not None for end in self.ended) and self.shortest >= self.width

    def busy(self, column: int) -> Tensor:
        """Rows whose token of this column is still to be decided, (rows,) booleans."""
        wanted = [
            not idle and known <= column for idle, known in zip(self.idle, self.known, strict=True)
        ]
        return torch.tensor(wanted, device=self.ids.device)

    def put(self, column: int, tokens: Tensor, rows: Tensor, levels: list[int]) -> None:
        """Write tokens into a column, for some rows; idle rows get padding."""
        if column == self.ids.shape[1]:
            blank = self.ids.new_full((len(self.ids), 1), self._pad or 0)
            self.ids = torch.cat([self.ids, blank], 1)
        self.ids[:, column] = torch.where(rows, tokens, self.ids[:, column])
        for row in rows.nonzero()[:, 0].tolist():
            self.levels[row][column] = levels[row]

    def fix(self, column: int, rows: Tensor, scores: Tensor) -> None:
        """These rows' tokens of this column are known now; see which rows end with them."""
        ended = self._stops(self.ids[:, : column + 1], scores)
        for row in rows.nonzero()[:, 0].tolist():
            self.known[row] = column + 1
            if bool(ended[row]) and self.ended[row] is None:
                self.ended[row] = column

    def stream(self) -> None:
        """Give the streamer the columns that all rows are known to; one that has `left` hears the levels first."""
        if self._streamer is None:
            return
        left = getattr(self._streamer, "left", None)
        for column in range(self._streamed, self.shortest):
            if left is not None:
                left([levels.get(column) for levels in self.levels])
            self._streamer.put(self.result(column + 1)[:, column].cpu())
        self._streamed = max(self._streamed, self.shortest)
        if self.done:
            self._streamer.end()

    def result(self, width: int | None = None) -> Tensor:
        """The texts so far, padded behind rows that ended."""
        ids = self.ids[:, : self.width if width is None else width].clone()
        for row, end in enumerate(self.ended):
            if self.idle[row] and end is not None:
                ids[row, end + 1 :] = self._pad or 0
        return ids

    def new(self, row: int) -> list[int]:
        """A row's new tokens, without padding."""
        end = self.ended[row]
        stop = self.width if end is None or not self.idle[row] else end + 1
        return self.ids[row, self.prompt : stop].tolist()


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
        among: ShortlistRule | None = None,
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
                look = LevelReading(level, states[:, -1], position, self._look, earlier)
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
        return self._among.whole(logits, self._lens.model.structure.vocab_size)

    def read(self, level: int, states: Tensor) -> Tensor:
        """Logits of states at a level: one vocabulary product."""
        self._counts.lap("rules")
        self._counts.heads += 1
        logits = self._lens.logits(level, states)
        self._counts.lap("heads")
        return logits


def _merged(before: Tensor | None, logits: Tensor, rows: Tensor) -> Tensor:
    return logits if before is None else torch.where(rows[:, None], logits, before)


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
    return apply_map(jumps[level, target], states)


def _require(jumps: Jumps | None, levels: tuple[int, ...], n_blocks: int) -> None:
    for level in levels:
        for target in range(level + 1, n_blocks):
            if jumps is None or (Site(level), Site(target)) not in jumps:
                raise BadJumps(
                    f"the cache `jump` needs jumps from every level where tokens may leave to all levels above, but "
                    f"{jumps} has none from {level} to {target}; fit with pairs all, or choose another cache"
                )
