"""Combine drafters: ask the cheapest first, and stop where one more token gains less than it costs.

A verification step runs the newest token and the drafts after it through all blocks together. Its time hardly grows
with the number of tokens where weights are packed, and much where they are not; `StepCosts` holds what was measured.
`Acceptance` counts, while text is generated, how often proposals are right. From the two follows whether one more
draft pays, so a drafter that does not pay on a text goes quiet, and a batch whose rows rarely agree on progress gets
no drafts at all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from layerjump.errors import BadExit, argument
from layerjump.generation.block_runner import BlockRunner, prompt_positions
from layerjump.generation.drafters import DraftContext, Drafter, DraftHead, HeadJump, Lookup, Proposal, Recycled, Splice
from layerjump.generation.exit_rules import Shortlist
from layerjump.generation.packed_llama import choose_blocks, pack_unembedding
from layerjump.jumps.jumps import Jumps
from layerjump.metrics.timing import read_clock
from layerjump.models.model import Model
from layerjump.models.sites import FINAL, JointSource, Site, Term
from layerjump.models.structure import Structure

DrafterName = Literal["lookup", "recycled", "head", "splice", "exit"]
DRAFTERS: tuple[DrafterName, ...] = get_args(DrafterName)
"""From cheap to dear, the order in which a combination asks."""
HEAD_PAIR = ("final@-1+embedding", "final")
"""The jump of a draft head: the last final state and the token that follows it → that token's final state."""
MAX_DRAFT_TOKENS = 8
"""Drafts in one verification step unless a calibration says otherwise."""
PRIORS: dict[str, dict[int, float]] = {
    "lookup": {0: 0.2, 1: 0.35, 2: 0.5, 3: 0.6, 4: 0.75, 5: 0.85, 6: 0.92},
    "recycled": {0: 0.15, 1: 0.2, 2: 0.35},
}
"""Drafter → evidence → share of right proposals before any was seen; `PRIOR` for the others."""
PRIOR = 0.3
_PRIOR_WEIGHT = 6.0  # proposals that a prior counts for
_MEMORY = 0.96  # weight of the past at each new proposal: about the last 25 count
_FIRST_IMPROVEMENT = 0.2  # tokens that a drafter is taken to add to a step before it was asked
_ASK_AGAIN = 16  # steps after which a drafter that did not pay is asked once more
_TIMED_COLUMNS = (1, 2, 4, 8)
_TIMED_REPEATS = 5
ACCEPTANCE_WINDOW = 16
"""Drafts over which the acceptance rate of a rule with a minimum is measured."""
PAUSE = 64
"""Tokens without drafts of such a rule after an acceptance rate below the minimum."""


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a verification step by the number of its columns, newest token included."""

    seconds: tuple[tuple[int, float], ...]
    """(columns, seconds), rising in both."""

    def of(self, columns: int) -> float:
        """The time of a step with this many columns, interpolated between those that were measured."""
        points = self.seconds
        for (n0, t0), (n1, t1) in zip(points, points[1:], strict=False):
            if columns <= n1:
                return t0 + (t1 - t0) * (columns - n0) / (n1 - n0)
        if len(points) < 2:
            return points[-1][1]
        (n0, t0), (n1, t1) = points[-2:]
        return t1 + (t1 - t0) * (columns - n1) / (n1 - n0)


FREE = StepCosts(((1, 0.0),))
"""Costs with which every proposal is verified."""
_MEASURED: WeakKeyDictionary[Structure, dict[tuple[int, int], StepCosts]] = WeakKeyDictionary()


def step_costs(model: Model, rows: int) -> StepCosts:
    """Measure a verification step for a batch of this size; a model that was measured before is not run again."""
    measured = _MEASURED.setdefault(model.structure, {})
    key = rows, torch.get_num_threads()
    if key not in measured:
        measured[key] = measure_step_costs(model, rows)
    return measured[key]


@torch.no_grad()
def measure_step_costs(model: Model, rows: int = 1, *, context: int = 48, repeats: int = _TIMED_REPEATS) -> StepCosts:
    """Time steps of several numbers of columns in turns; the shortest of each, made non-decreasing."""
    most = max(_TIMED_COLUMNS)
    context = max(1, min(context, model.max_positions - most))
    ids = torch.ones((rows, context + most), dtype=torch.int64, device=model.device)
    runner = BlockRunner(model, choose_blocks(model), None, prompt_positions(model, ids[:, :context], None))
    structure = pack_unembedding(model).structure
    runner.extend(ids[:, :context])
    runner.run_all()
    times: dict[int, list[float]] = {columns: [] for columns in _TIMED_COLUMNS}
    for _ in range(repeats):
        for columns, seconds in times.items():
            start = read_clock()
            runner.extend(ids[:, : context + columns])
            structure.decode(structure.to_final(runner.run_all())).argmax(-1).tolist()
            seconds.append(read_clock() - start)
            runner.rollback(context)
    points, least = [], 0.0
    for columns, seconds in times.items():
        least = max(least, min(seconds))
        points.append((columns, least))
    return StepCosts(tuple(points))


class SpliceJump(NamedTuple):
    """A jump from an early level, and a late level one position before, to the late level: 1+26@-1 → 26."""

    jump: nn.Module
    source: Site
    level: int


@dataclass(frozen=True, eq=False)
class DraftConfig:
    """Which drafters propose tokens, with what calibration finds for them."""

    drafters: tuple[DrafterName, ...] = ("lookup", "recycled")
    max_tokens: int = MAX_DRAFT_TOKENS
    """Drafts in one verification step at most."""
    head: tuple[HeadJump, ...] = ()
    """The jumps of a draft head by depth; none: those among the jumps."""
    splice: SpliceJump | None = None
    """The jump of a splice; None: the one among the jumps."""
    head_shortlist: Shortlist | None = None
    """The tokens that a draft head may propose; None: all."""
    candidates: Tensor | None = None
    """(V,) the token that usually follows each token, −1 where none is known."""
    priors: Mapping[str, Mapping[int, float]] = field(default_factory=lambda: PRIORS)
    """Drafter → evidence → the share of its proposals that are right."""
    costs: StepCosts | None = None
    """What a verification step costs; None: measured when the model first generates."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.drafters if name not in DRAFTERS]
        if unknown or not self.drafters:
            raise BadExit(
                f"{argument('drafts')} expects one or more of {', '.join(DRAFTERS)}, got "
                f"{', '.join(map(repr, unknown)) or 'none'}"
            )
        if {"splice", "exit"} <= {*self.drafters}:
            raise BadExit(
                f"{argument('drafts')} expects splice or exit, got both, which run the same blocks; leave out one"
            )
        if self.max_tokens < 1:
            raise BadExit(f"{argument('max_draft_tokens')} must be 1 or more, got {self.max_tokens}")

    @classmethod
    def of(cls, drafts: DraftConfig | str | Sequence[str]) -> DraftConfig:
        """A configuration from names of drafters: `"lookup,head"` or a list."""
        if isinstance(drafts, DraftConfig):
            return drafts
        names = [name.strip() for name in (drafts.split(",") if isinstance(drafts, str) else drafts)]
        return cls(tuple(sorted(names, key=lambda name: DRAFTERS.index(name) if name in DRAFTERS else -1)))  # type: ignore[arg-type]

    def find_head(self, jumps: Jumps | None) -> tuple[HeadJump, ...]:
        """The jumps of the draft head, from here or from the jumps; `BadExit` if there is none for the first draft."""
        if self.head:
            return self.head
        to_final = [(source, target) for source, target in jumps or () if target == FINAL]
        heads = [HeadJump.of(jumps[pair], pair[0]) for pair in to_final if jumps is not None]
        by_depth = {head.depth: head for head in heads if head is not None}
        in_order = tuple(by_depth[depth] for depth in range(1, len(by_depth) + 1) if depth in by_depth)
        if in_order:
            return in_order
        source, target = HEAD_PAIR
        raise BadExit(
            f"the drafter head needs a jump {source} → {target}, but {jumps or 'no jumps'} were given; fit one with "
            f"{argument('sources', source)} and {argument('target', target)}, calibrate, or draft with lookup"
        )

    def find_splice(self, jumps: Jumps | None) -> SpliceJump:
        """The jump of a splice, from here or from the jumps; `BadExit` if there is none."""
        if self.splice is not None:
            return self.splice
        for source, target in jumps or ():
            late = Term(target, -1)
            early = [term for term in source.terms if term != late]
            is_splice = isinstance(source, JointSource) and target.part == "level" and late in source.terms
            if is_splice and len(early) == 1 and not early[0].offset and 0 < early[0].site.index < target.index:
                return SpliceJump(jumps[source, target], source, target.index)  # type: ignore[index]
        raise BadExit(
            f"the drafter splice needs a jump from an early and a late level to the late level, but "
            f"{jumps or 'no jumps'} were given; fit one with {argument('sources', '1+26@-1')} and "
            f"{argument('target', '26')}, or draft with lookup"
        )

    def make_drafters(self, model: Model, jumps: Jumps | None, runner: BlockRunner | None) -> list[Drafter]:
        """New drafters for one generation, the cheapest first; without `exit`, which needs the running decoder."""
        drafters: list[Drafter] = []
        for name in self.drafters:
            if name == "lookup":
                drafters.append(Lookup())
            elif name == "recycled":
                drafters.append(Recycled(self.candidates))
            elif name == "head":
                drafters.append(DraftHead(model, self.find_head(jumps), self.head_shortlist))
            elif name == "splice" and runner is not None:
                splice = self.find_splice(jumps)
                drafters.append(Splice(runner, model, splice.jump, splice.source, splice.level))
        return drafters


class Acceptance:
    """How often proposals are right, by drafter and evidence; recent ones count most.

    An estimate is the share of right proposals with the same evidence, times how much more or less often than estimated
    this drafter has been right of late: on a text that never repeats all lengths of matches lose their credit at once.
    """

    def __init__(self, priors: Mapping[str, Mapping[int, float]]) -> None:
        self._priors = priors
        self._shares: dict[tuple[str, int], tuple[float, float]] = {}
        """(drafter, evidence) → right and all proposals, with decaying weight."""
        self._totals: dict[str, tuple[float, float]] = {}
        """Drafter → right and expected right proposals, with decaying weight."""
        self.tally: dict[tuple[str, int], tuple[int, int]] = {}
        """(drafter, evidence) → right and all proposals."""

    def estimate(self, drafter: str, evidence: int) -> float:
        """The probability that a proposal is right."""
        right, expected = self._totals.get(drafter, (_PRIOR_WEIGHT, _PRIOR_WEIGHT))
        return min(0.98, self._share(drafter, evidence) * right / expected)

    def record(self, drafter: str, evidence: int, right: bool) -> None:
        """Count a proposal whose right answer is known."""
        before, expected = self._totals.get(drafter, (_PRIOR_WEIGHT, _PRIOR_WEIGHT))
        self._totals[drafter] = (
            _MEMORY * before + right + (1 - _MEMORY) * _PRIOR_WEIGHT,
            _MEMORY * expected + self._share(drafter, evidence) + (1 - _MEMORY) * _PRIOR_WEIGHT,
        )
        for key in ((drafter, evidence), (drafter, -1)):
            hits, total = self._shares.get(key) or self._prior(*key)
            self._shares[key] = _MEMORY * hits + right, _MEMORY * total + 1
            n_right, n = self.tally.get(key, (0, 0))
            self.tally[key] = n_right + right, n + 1

    def _share(self, drafter: str, evidence: int) -> float:
        hits, total = self._shares.get((drafter, evidence)) or self._prior(drafter, evidence)
        return hits / total

    def _prior(self, drafter: str, evidence: int) -> tuple[float, float]:
        return _PRIOR_WEIGHT * self._priors.get(drafter, {}).get(evidence, PRIOR), _PRIOR_WEIGHT


@dataclass(frozen=True)
class Choice:
    """The proposal that was drafted in one row of a column."""

    drafter: str
    proposal: Proposal
    chance: float
    """The estimated probability that this draft and those before it are right."""


@dataclass(frozen=True)
class _Asked:
    """A proposal whose right answer will be known if the drafts before it are accepted."""

    row: int
    column: int
    drafter: str
    proposal: Proposal


class Drafting:
    """The drafts of one generation: chooses proposals column by column, and learns from their verification."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        costs: StepCosts,
        *,
        max_tokens: int,
        priors: Mapping[str, Mapping[int, float]] = PRIORS,
        min_acceptance: float = 0.0,
    ) -> None:
        """`min_acceptance`: the share of all drafts below which drafting pauses, whatever the costs."""
        self.max_tokens = max_tokens
        self._drafters, self._costs, self._min_acceptance = drafters, costs, min_acceptance
        self._acceptance = Acceptance(priors)
        self._seconds: dict[str, float] = {}
        """Drafter → seconds of a call, the shortest of late."""
        self.seconds_asked = 0.0
        """Time of all calls so far, each taken as the shortest of late: other load does not count."""
        self._asked: list[_Asked] = []
        self._last_asked: dict[str, int] = {}
        self._improvement: dict[str, float] = {}
        """Drafter → how much it usually adds to the expected tokens of a step, beyond the drafters asked before it."""
        self._n_steps = 0
        self._recent: list[bool] = []
        self._paused_until = 0
        self._expected = 1.0

    @property
    def sites(self) -> frozenset[Site]:
        """The sites whose states the drafters read."""
        return frozenset(site for drafter in self._drafters for site in drafter.sites)

    @property
    def tally(self) -> Mapping[tuple[str, int], tuple[int, int]]:
        """(drafter, evidence) → right and all proposals whose answer is known; evidence −1: of any evidence."""
        return self._acceptance.tally

    def begin_step(self) -> None:
        """Begin to draft for the next verification step."""
        self._n_steps += 1
        self._asked.clear()
        self._expected = 1.0  # tokens that the step is expected to give

    def choose(
        self, context: DraftContext, column: int, chances: Mapping[int, float], n_columns: int
    ) -> dict[int, Choice]:
        """The drafts of one more column, by row; none if the column does not pay.

        `chances` holds the rows to draft for and the estimated probability that their drafts so far are right.
        `n_columns` is the number of columns of the step without this one.
        """
        rows = [row for row, chance in chances.items() if chance > 0]
        if column < self._paused_until or not rows:
            return {}
        best: dict[int, Choice] = {}
        step = self._costs.of(n_columns)
        for drafter in self._drafters:
            if not self._is_worth_asking(drafter.name, best, chances, step):
                continue
            start = time.perf_counter()
            proposals = drafter.propose(context, rows)
            self._last_asked[drafter.name] = self._n_steps
            took = time.perf_counter() - start
            self._seconds[drafter.name] = min(took, 1.1 * self._seconds.get(drafter.name, took))
            self.seconds_asked += self._seconds[drafter.name]
            before = _progress(best, chances)
            for row, proposal in proposals.items():
                self._asked.append(_Asked(row, column, drafter.name, proposal))
                share = self._acceptance.estimate(drafter.name, proposal.evidence)
                best[row] = _combine(best.get(row), drafter.name, proposal, share, chances[row])
            improvement = (_progress(best, chances) - before) / max(chances.values())
            usual = self._improvement.get(drafter.name, _FIRST_IMPROVEMENT)
            self._improvement[drafter.name] = 0.9 * usual + 0.1 * improvement
        gain = _progress(best, chances)
        if not best or gain * step < self._expected * (self._costs.of(n_columns + 1) - step):
            return {}
        self._expected += gain
        return best

    def _is_worth_asking(
        self, drafter: str, best: Mapping[int, Choice], chances: Mapping[int, float], step: float
    ) -> bool:
        """Whether a drafter's usual gain over the proposals so far is worth its time; always now and then."""
        cost = self._seconds.get(drafter, 0.0)
        if step == 0 or cost < 0.002 * step:
            return True
        if self._n_steps - self._last_asked.get(drafter, -_ASK_AGAIN) >= _ASK_AGAIN:
            return True
        # Proposals are rarely better than one that is almost certain.
        room = 1 - max((choice.chance / chances[row] for row, choice in best.items()), default=0.0)
        usual = min(self._improvement.get(drafter, _FIRST_IMPROVEMENT), room)
        return usual * max(chances.values()) * step > self._expected * cost

    def learn(
        self,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        final_lengths: Sequence[int],
        accepted: Sequence[bool],
    ) -> None:
        """Count which proposals were right, after a verification.

        `tokens` by row; the columns from `starts` on were open, and those before `final_lengths` are decided.
        """
        for asked in self._asked:
            if starts[asked.row] <= asked.column < final_lengths[asked.row]:
                right = tokens[asked.row][asked.column] == asked.proposal.token
                self._acceptance.record(asked.drafter, asked.proposal.evidence, right)
        self._recent += accepted
        if len(self._recent) >= ACCEPTANCE_WINDOW:
            if sum(self._recent) < self._min_acceptance * len(self._recent):
                self._paused_until = max(final_lengths) + PAUSE
            self._recent.clear()

    @property
    def remembers_predictions(self) -> bool:
        """Whether `observe` is worth calling."""
        return any(isinstance(drafter, Recycled) for drafter in self._drafters)

    def observe(self, tokens: Sequence[int], predictions: Sequence[int]) -> None:
        """Pass the model's top tokens after the last of these tokens to the drafters that remember them."""
        for drafter in self._drafters:
            if isinstance(drafter, Recycled):
                drafter.observe(tokens, predictions)


def _combine(before: Choice | None, drafter: str, proposal: Proposal, share: float, chance: float) -> Choice:
    """The better of two proposals for a row, each as likely as if the drafters erred independently.

    `share` is the estimated probability that the new proposal is right, if the drafts before it are (`chance`). Two
    proposals that agree are more likely to be right; of two that differ, at most one is.
    """
    if before is None:
        return Choice(drafter, proposal, chance * share)
    other = before.chance / chance
    if before.proposal.token == proposal.token:
        return Choice(before.drafter, before.proposal, chance * min(0.98, 1 - (1 - share) * (1 - other)))
    both = max(1e-6, 1 - share * other)
    if share > other:
        return Choice(drafter, proposal, chance * share * (1 - other) / both)
    return Choice(before.drafter, before.proposal, chance * other * (1 - share) / both)


def _progress(best: Mapping[int, Choice], chances: Mapping[int, float]) -> float:
    """Tokens per step that a column with these choices adds."""
    return expected_progress([best[row].chance if row in best else 0.0 for row in chances])


def expected_progress(chances: Sequence[float]) -> float:
    """Tokens per step that one more column adds, if each row's draft is right with its chance.

    Rows advance together: a row that is ahead waits for the slowest. One more column gives one more token each time
    that all m rows have had a draft accepted since the last time, which takes the largest of m geometric waiting
    times; for one row this is its chance.
    """
    if len(chances) == 1:
        return chances[0]
    mean = sum(chances) / len(chances)
    if mean < 0.02:
        return 0.0
    steps, miss = 0.0, 1.0
    while (waiting := 1 - (1 - miss) ** len(chances)) > 1e-3:
        steps += waiting
        miss *= 1 - mean
    return 1 / max(steps, 1.0)
