"""Exit rules: decide per row whether generation may exit at a level.

Exit rules: tiny classes that say, at the levels they check, which rows of a batch may stop there.

SoftmaxGap   the best token's probability leads the second's by enough (CALM, arXiv 2207.07061; `mat`)
MaxProb      the best token is likely enough
Entropy      the distribution is narrow enough
Agree        the best token has been the same at so many checked levels
Fixed        always at one level
Never        the whole model
Gate         a linear probe of the state says so, without a vocabulary product   (gates.py)
TwoStage     the gate says when a product is worth it, gate and gap then decide  (gates.py)
Drafting     another rule, for verified text, that rests while too few of its drafts are right

Early looks at the tokens that text is mostly made of.

A look at a level is a vocabulary product, which costs as much as several blocks. Most tokens of a text are among a few
thousand, and a product with these alone costs a fraction. What the model itself says at level L always comes from its
whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from layerjump.errors import BadExit

NEVER = 1.112
"""0.9 · 1.112 > 1: no confidence reaches it, so the whole model runs. Its negative always stops at level 1."""
GRID = (-NEVER, *(step / 10 for step in range(11)), NEVER)
"""The λ of the paper's curves."""
FINE = tuple(1 + 0.112 * step / 10 for step in range(1, 10))
"""Nine more λ between 1 and `NEVER`, which the authors use for identity."""


@dataclass
class LevelReading:
    """What a rule may see at a level: the state of the newest token of every row, and on demand what it predicts."""

    level: int
    state: Tensor
    """(rows, d)."""
    position: Tensor
    """(rows,), 0-based, padding not counted."""
    read: Callable[[int, Tensor], Tensor] = field(repr=False)
    """(level, states) → logits: a vocabulary product, made only if a rule asks for it."""
    earlier: tuple[Tensor, ...] = ()
    """The best tokens at the levels that were looked at before."""
    gates: int = 0
    """Gate evaluations made."""

    @cached_property
    def logits(self) -> Tensor:
        """(rows, vocabulary)."""
        return self.read(self.level, self.state)

    @property
    def predicted(self) -> bool:
        """Whether the vocabulary product has been made."""
        return "logits" in self.__dict__

    @cached_property
    def best(self) -> Tensor:
        """The two largest probabilities, (rows, 2)."""
        two = self.logits.topk(2).values
        return (two - self.logits.logsumexp(-1, keepdim=True)).exp()

    @property
    def gap(self) -> Tensor:
        """By how much the best probability leads the second, (rows,)."""
        return self.best[:, 0] - self.best[:, 1]

    @cached_property
    def top(self) -> Tensor:
        """The best token, (rows,)."""
        return self.logits.argmax(-1)


class Rule(Protocol):
    """What `generate` asks of a rule."""

    @property
    def at(self) -> tuple[int, ...] | None:
        """The levels to check, rising; None: every level from 1 to L − 1."""

    def stops(self, look: LevelReading) -> Tensor:
        """Which rows may stop here, (rows,) booleans."""


@dataclass(frozen=True)
class Never:
    """The whole model, always."""

    at: tuple[int, ...] = ()

    def stops(self, look: LevelReading) -> Tensor:
        return torch.zeros(len(look.state), dtype=torch.bool, device=look.state.device)


@dataclass(frozen=True)
class Fixed:
    """Always at one level."""

    level: int

    @property
    def at(self) -> tuple[int, ...]:
        return (self.level,)

    def stops(self, look: LevelReading) -> Tensor:
        return torch.ones(len(look.state), dtype=torch.bool, device=look.state.device)


@dataclass(frozen=True)
class SoftmaxGap:
    """Stop at the first level, from 1 on, where the best probability leads the second best by enough.

    Enough is 0.9 λ + 0.1 exp(−τ t / N): strict at first, looser as the text goes on. `strict` compares with >, as the
    authors of `mat` do in their code; CALM's paper has ≥ and a threshold clipped to [0, 1].
    """

    strength: float
    """λ."""
    length: float
    """N: the mean of position + 1 over the scored examples in the authors' code, the longest output in CALM."""
    decay: float = 4.0
    """τ."""
    strict: bool = True
    clip: bool = False
    at: tuple[int, ...] | None = None

    def threshold(self, position: Tensor) -> Tensor:
        """The lead asked for at 0-based positions t."""
        looser = torch.exp(-self.decay * position.double() / self.length)
        found = 0.9 * self.strength + 0.1 * looser
        return found.clamp(0, 1) if self.clip else found

    def sure(self, gap: Tensor, position: Tensor) -> Tensor:
        """Whether leads are enough."""
        lead, enough = gap.double(), self.threshold(position)
        return lead > enough if self.strict else lead >= enough

    def stops(self, look: LevelReading) -> Tensor:
        return self.sure(look.gap, look.position)

    def replay(self, confidence: Tensor, position: Tensor) -> Tensor:
        """Where each example stops, from its confidence at every level: (levels, examples) → (examples,).

        Level 0 never stops; if no level below L is sure enough, the whole model runs.
        """
        sure = self.sure(confidence, position)
        sure[0] = False
        sure[-1] = True
        return sure.int().argmax(0)


@dataclass(frozen=True)
class MaxProb:
    """Stop where the best token has at least this probability."""

    threshold: float
    at: tuple[int, ...] | None = None

    def stops(self, look: LevelReading) -> Tensor:
        return look.best[:, 0] >= self.threshold


@dataclass(frozen=True)
class Entropy:
    """Stop where the distribution has at most this entropy, in nats."""

    threshold: float
    at: tuple[int, ...] | None = None

    def stops(self, look: LevelReading) -> Tensor:
        entropy = torch.special.entr(look.logits.softmax(-1)).sum(-1)
        return entropy <= self.threshold


@dataclass(frozen=True)
class Agree:
    """Stop where the best token has been the same at so many checked levels in a row, this one included."""

    times: int
    at: tuple[int, ...] | None = None

    def stops(self, look: LevelReading) -> Tensor:
        if len(look.earlier) < self.times - 1:
            return torch.zeros_like(look.top, dtype=torch.bool)
        before = look.earlier[len(look.earlier) - self.times + 1 :]
        return torch.stack([look.top, *before]).eq(look.top).all(0)


@dataclass(frozen=True, eq=False)
class Drafting:
    """Another rule for verified text, with the share of right drafts below which drafting costs more than it saves."""

    rule: Rule
    least: float

    @property
    def at(self) -> tuple[int, ...] | None:
        return self.rule.at

    def stops(self, look: LevelReading) -> Tensor:
        return self.rule.stops(look)


def levels_of(rule: Rule, n_blocks: int) -> tuple[int, ...]:
    """The levels a rule checks in a model of so many blocks; an error if the model does not have them."""
    if rule.at is None:
        return tuple(range(1, n_blocks))
    wrong = [level for level in rule.at if not 0 <= level < n_blocks]
    if wrong:
        raise BadExit(
            f"the rule {type(rule).__name__} checks level {wrong[0]}, but this model can stop at levels 0 to "
            f"{n_blocks - 1}; give one of these"
        )
    return tuple(sorted(rule.at))


def parse_rule(text: str) -> Rule:
    """A rule from its short name: never, fixed:20, gap:0.9, maxprob:0.8, entropy:0.5, agree:3; `@8,16,24` adds levels.

    `gap:0.9` asks for the same lead at every position from 1 on.
    """
    name, _, rest = text.partition(":")
    value, _, levels = rest.partition("@")
    try:
        at = tuple(sorted(int(level) for level in levels.split(","))) if levels else None
        if name == "never" and not rest:
            return Never()
        if name == "fixed" and at is None:
            return Fixed(int(value))
        made: dict[str, Callable[[], Rule]] = {
            "gap": lambda: _constant_gap(_number(value), at),
            "maxprob": lambda: MaxProb(_number(value), at),
            "entropy": lambda: Entropy(_number(value), at),
            "agree": lambda: Agree(_times(value), at),
        }
        return made[name]()
    except (KeyError, ValueError):
        raise BadExit(
            f"the exit rule given is {text!r}; give never, fixed:20, gap:0.9, maxprob:0.8, entropy:0.5 or agree:3, "
            f"with the levels to check where not all: gap:0.9@8,16,24"
        ) from None


def _number(text: str) -> float:
    """Not NaN: nothing is above it, so that its rule would never stop and never say why."""
    if math.isnan(number := float(text)):
        raise ValueError
    return number


def _times(text: str) -> int:
    """Levels that must agree: one always does with itself."""
    if (times := int(text)) < 1:
        raise ValueError
    return times


def _constant_gap(lead: float, at: tuple[int, ...] | None) -> SoftmaxGap:
    """With N → 0 the part of the threshold that falls is gone from position 1 on."""
    return SoftmaxGap(lead / 0.9, length=1e-9, at=at)
