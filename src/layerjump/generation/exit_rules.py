"""Exit rules: decide, row by row, whether a token may exit at a level.

SoftmaxGap   the top probability exceeds the second by a threshold (CALM, arXiv 2207.07061)
MaxProb      the top probability reaches a threshold
Entropy      the entropy of the prediction is below a threshold
Agree        the last k checked levels predict the same token
Fixed        exit at one level, always
Never        run the full model
Probe        a linear probe of the hidden state reaches a threshold, without an unembedding   (probes.py)
TwoStage     the probe selects the rows worth an unembedding; probe and gap together decide   (probes.py)

`ExitConfig` adds what calibration finds for a rule: the shortlist of tokens that early levels are read with, and the
acceptance rate below which drafting pauses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from layerjump.errors import BadExit, argument
from layerjump.generation.packed_llama import WeightCache, pack_unembedding
from layerjump.metrics.logits import top_two
from layerjump.models.model import Model
from layerjump.models.structure import can_restrict, unembedding_rows, with_unembedding

if TYPE_CHECKING:
    from layerjump.generation.combine_drafters import DraftConfig

NEVER = 1.112
"""A λ that no confidence reaches, since 0.9 · 1.112 > 1. Its negative always exits at level 1."""
GRID = (-NEVER, *(step / 10 for step in range(11)), NEVER)
"""The λ of the published accuracy–efficiency curves."""
FINE = tuple(1 + 0.112 * step / 10 for step in range(1, 10))
"""Nine more λ between 1 and `NEVER`, which the published curves of the identity baseline use."""
_MARGIN = 30.0
"""Logits by which all other tokens lie below the least likely token of a shortlist. The margin is finite so that a
logits processor that forbids every token of the shortlist still leaves an argmax."""


@dataclass
class LevelReading:
    """What a rule sees at a level: the newest token's hidden state in every row, and its logits on demand."""

    level: int
    states: Tensor
    """(rows, d_model)."""
    positions: Tensor
    """(rows,) positions, counted from 0 without padding."""
    unembed: Callable[[int, Tensor], Tensor] = field(repr=False)
    """(level, states) → logits; called at most once, when a rule reads the logits."""
    earlier_tokens: tuple[Tensor, ...] = ()
    """The top tokens, (rows,) each, of the checked levels whose logits were read."""
    probe_evaluations: int = 0
    """Probes evaluated on this reading."""
    unembedding_seconds: float = 0.0
    """Time spent on the logits."""

    @cached_property
    def logits(self) -> Tensor:
        """(rows, tokens): the vocabulary, or the shortlist where the configuration has one."""
        start = time.perf_counter()
        logits = self.unembed(self.level, self.states)
        self.unembedding_seconds = time.perf_counter() - start
        return logits

    @property
    def has_logits(self) -> bool:
        """Whether the logits have been computed."""
        return "logits" in self.__dict__

    @cached_property
    def top2_probs(self) -> Tensor:
        """The two largest probabilities, (rows, 2)."""
        return top_two(self.logits)[1]

    @property
    def gap(self) -> Tensor:
        """The difference between the two largest probabilities, (rows,)."""
        return self.top2_probs[:, 0] - self.top2_probs[:, 1]

    @cached_property
    def top_token(self) -> Tensor:
        """The index of the largest logit, (rows,)."""
        return self.logits.argmax(-1)


class Rule(Protocol):
    """An exit rule. Any object with these two members is one."""

    @property
    def levels(self) -> tuple[int, ...] | None:
        """The levels to check, in rising order; None: every level from 1 to L − 1."""

    def should_exit(self, reading: LevelReading) -> Tensor:
        """Which rows may exit at this level, (rows,) booleans."""


@dataclass(frozen=True)
class Never:
    """Run the full model for every token."""

    levels: tuple[int, ...] = ()

    def should_exit(self, reading: LevelReading) -> Tensor:
        return torch.zeros(len(reading.states), dtype=torch.bool, device=reading.states.device)


@dataclass(frozen=True)
class Fixed:
    """Exit at one level, always."""

    level: int

    @property
    def levels(self) -> tuple[int, ...]:
        return (self.level,)

    def should_exit(self, reading: LevelReading) -> Tensor:
        return torch.ones(len(reading.states), dtype=torch.bool, device=reading.states.device)


@dataclass(frozen=True)
class SoftmaxGap:
    """Exit at the first level, from 1 on, where the gap between the two largest probabilities exceeds a threshold.

    The threshold is CALM's 0.9 λ + 0.1 exp(−τ t / N), which falls with the position t. The defaults (`strict`
    comparison, no clipping) are those of the published `mat` code; CALM itself has ≥ and clips to [0, 1].
    """

    lam: float
    """λ, the confidence that the threshold tends to."""
    length: float
    """N: the mean of position + 1 over the scored examples in the `mat` code, the longest output in CALM."""
    decay: float = 4.0
    """τ, the decay rate of the threshold."""
    strict: bool = True
    clip: bool = False
    levels: tuple[int, ...] | None = None

    def threshold(self, positions: Tensor) -> Tensor:
        """The gap required at positions t, counted from 0."""
        decayed = torch.exp(-self.decay * positions.double() / self.length)
        threshold = 0.9 * self.lam + 0.1 * decayed
        return threshold.clamp(0, 1) if self.clip else threshold

    def is_confident(self, gap: Tensor, positions: Tensor) -> Tensor:
        """Whether each gap passes the threshold of its position."""
        gap, threshold = gap.double(), self.threshold(positions).to(gap.device)
        return gap > threshold if self.strict else gap >= threshold

    def should_exit(self, reading: LevelReading) -> Tensor:
        return self.is_confident(reading.gap, reading.positions)

    def replay(self, confidence: Tensor, positions: Tensor) -> Tensor:
        """The exit level of each example, from its gap at every level: (levels, examples) → (examples,).

        No example exits at level 0. Where no level below L passes, the exit level is L.
        """
        exits = self.is_confident(confidence, positions)
        exits[0] = False
        exits[-1] = True
        return exits.int().argmax(0)


@dataclass(frozen=True)
class MaxProb:
    """Exit where the top token has at least this probability."""

    threshold: float
    levels: tuple[int, ...] | None = None

    def should_exit(self, reading: LevelReading) -> Tensor:
        return reading.top2_probs[:, 0] >= self.threshold


@dataclass(frozen=True)
class Entropy:
    """Exit where the entropy of the prediction is at most this many nats."""

    threshold: float
    levels: tuple[int, ...] | None = None

    def should_exit(self, reading: LevelReading) -> Tensor:
        entropy = torch.special.entr(reading.logits.softmax(-1)).sum(-1)
        return entropy <= self.threshold


@dataclass(frozen=True)
class Agree:
    """Exit where this level and the checked levels before it, `times` in all, predict the same token."""

    times: int
    levels: tuple[int, ...] | None = None

    def should_exit(self, reading: LevelReading) -> Tensor:
        earlier = reading.earlier_tokens
        if len(earlier) < self.times - 1:
            return torch.zeros_like(reading.top_token, dtype=torch.bool)
        recent = earlier[len(earlier) - self.times + 1 :]
        return torch.stack([reading.top_token, *recent]).eq(reading.top_token).all(0)


@dataclass(frozen=True, eq=False)
class Shortlist:
    """Frequent tokens that early levels are read with, in place of the full vocabulary.

    An unembedding costs as much as several blocks. Most tokens of a text are among a few thousand, and an unembedding
    onto these alone costs a fraction. A token that exits early is one of them; level L always uses the full
    vocabulary.
    """

    tokens: Tensor
    """(tokens,) token ids, rising."""
    _unembeddings: WeightCache[nn.Linear] = field(default_factory=WeightCache, repr=False)

    def check(self, model: Model) -> None:
        """Refuse a model without these tokens, or whose unembedding cannot be restricted."""
        vocab_size = model.structure.vocab_size
        if not can_restrict(model.structure) or int(self.tokens.max()) >= vocab_size:
            raise BadExit(
                f"the exit rule has a shortlist of {len(self.tokens):,} tokens that {model.name} does not have; "
                f"calibrate a rule for this model"
            )

    def restrict(self, model: Model) -> Model:
        """The same model with an unembedding onto these tokens alone."""
        full = model.structure.unembedding
        assert isinstance(full, nn.Linear)
        short = self._unembeddings.get(full, lambda: unembedding_rows(full, self.tokens))
        return pack_unembedding(replace(model, structure=with_unembedding(model.structure, short)))

    def expand(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Logits of the shortlist, (…, tokens), as logits of the vocabulary, (…, vocab_size)."""
        lowest = logits.amin(-1, keepdim=True) - _MARGIN
        expanded = lowest.repeat(*[1] * (logits.dim() - 1), vocab_size)
        expanded[..., self.tokens.to(logits.device)] = logits
        return expanded


@dataclass(frozen=True, eq=False)
class ExitConfig:
    """An exit rule with the settings that calibration finds for it. `exit=` takes one wherever it takes a rule."""

    rule: Rule
    shortlist: Shortlist | None = None
    """The tokens that early levels are read with; None: the full vocabulary."""
    min_acceptance: float = 0.0
    """With `verify`: the share of drafts that must be accepted; drafting pauses while fewer are."""
    drafts: DraftConfig | None = None
    """With `verify`: the drafters that calibration chose; None: this rule, if it can fire."""

    @classmethod
    def of(cls, exit: ExitConfig | Rule | str) -> ExitConfig:
        """A configuration from a rule, or from a rule's short name such as gap:0.9."""
        if isinstance(exit, ExitConfig):
            return exit
        return cls(parse_rule(exit) if isinstance(exit, str) else exit)


def checked_levels(rule: Rule, n_blocks: int) -> tuple[int, ...]:
    """The levels that a rule checks in a model of `n_blocks` blocks; `BadExit` if the model does not have them."""
    if rule.levels is None:
        return tuple(range(1, n_blocks))
    wrong = [level for level in rule.levels if not 0 <= level < n_blocks]
    if wrong:
        raise BadExit(
            f"the rule {type(rule).__name__} checks level {wrong[0]}, but this model can exit at levels 0 to "
            f"{n_blocks - 1}; check only these"
        )
    return tuple(sorted(rule.levels))


def parse_rule(text: str) -> Rule:
    """A rule from its short name: never, fixed:20, gap:0.9, maxprob:0.8, entropy:0.5, agree:3; `@8,16,24` sets
    levels.

    `gap:0.9` requires the same gap at every position from 1 on.
    """
    name, _, rest = text.partition(":")
    value, _, listed = rest.partition("@")
    try:
        levels = tuple(sorted(int(level) for level in listed.split(","))) if listed else None
        match name:
            case "never" if not rest:
                return Never()
            case "fixed" if levels is None:
                return Fixed(int(value))
            case "agree" if int(value) >= 1:
                return Agree(int(value), levels)
            case "gap" | "maxprob" | "entropy" if not math.isnan(number := float(value)):  # NaN would never exit
                make: dict[str, Callable[..., Rule]] = {"gap": constant_gap, "maxprob": MaxProb, "entropy": Entropy}
                return make[name](number, levels)
    except ValueError:
        pass
    raise BadExit(
        f"{argument('exit')} expects never, fixed:20, gap:0.9, maxprob:0.8, entropy:0.5 or agree:3, optionally with "
        f"the levels to check (gap:0.9@8,16,24), got {text!r}"
    )


def constant_gap(threshold: float, levels: tuple[int, ...] | None, *, strict: bool = True) -> SoftmaxGap:
    """A `SoftmaxGap` with the same threshold at every position from 1 on: with N → 0 its decaying term vanishes."""
    return SoftmaxGap(threshold / 0.9, length=1e-9, strict=strict, levels=levels)
