"""Restrict early readings to a shortlist of common tokens.

A look at a level is a vocabulary product, which costs as much as several blocks. Most tokens of a text are among a few
thousand, and a product with these alone costs a fraction. What the model itself says at level L always comes from its
whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from layerjump.data.corpus import Corpus
from layerjump.errors import BadExit
from layerjump.generation.packed_cpu import WeightCache, with_lean_head
from layerjump.generation.rules import Drafting, LevelReading, Rule
from layerjump.models.model import Model
from layerjump.models.unembedding import can_restrict, unembedding_rows, with_unembedding

LENGTH = 2048
"""Tokens of a shortlist at most."""
WORTH = 4
"""A vocabulary less than so many times as long is looked at whole."""
COUNTED = 4_000
"""Documents in which tokens are counted."""
UNLIKELY = 30.0
"""How far below the least likely token of a shortlist all others are put: not infinitely, so that a text in which
only others are allowed still has a most likely one."""


@dataclass(frozen=True, eq=False)
class ShortlistRule:
    """Another rule, which looks at these tokens alone; what leaves early is one of them."""

    rule: Rule
    tokens: Tensor
    """(tokens,)."""
    _heads: WeightCache[nn.Linear] = field(default_factory=WeightCache, repr=False)

    @property
    def at(self) -> tuple[int, ...] | None:
        return self.rule.at

    def stops(self, look: LevelReading) -> Tensor:
        return self.rule.stops(look)

    def check(self, model: Model) -> None:
        """Refuse a model that does not have these tokens, or whose head cannot be shortened."""
        if (
            not can_restrict(model.structure)
            or int(self.tokens.max()) >= model.structure.vocab_size
        ):
            raise BadExit(
                f"the exit rule looks at a shortlist of {len(self.tokens):,} tokens that {model.name} does not have; "
                f"calibrate a rule for this model"
            )

    def model(self, model: Model) -> Model:
        """The same model, whose head knows these tokens alone."""
        head = model.structure.unembedding
        assert isinstance(head, nn.Linear)
        short = self._heads.get(head, lambda: unembedding_rows(head, self.tokens))
        return with_lean_head(replace(model, structure=with_unembedding(model.structure, short)))

    def whole(self, logits: Tensor, vocabulary: int) -> Tensor:
        """Logits of these tokens as logits of all."""
        lowest = logits.amin(-1, keepdim=True) - UNLIKELY
        wide = lowest.repeat(*[1] * (logits.dim() - 1), vocabulary)
        wide[..., self.tokens.to(logits.device)] = logits
        return wide


def build_shortlist(model: Model, text: Corpus, documents: Sequence[int]) -> Tensor | None:
    """The most frequent tokens of these documents; None where a shorter head cannot be made, or would save little."""
    size = model.structure.vocab_size
    if not can_restrict(model.structure) or size < WORTH * LENGTH:
        return None
    found = torch.zeros(size, dtype=torch.int64)
    for ids in model.tokenization.encode([text.documents[each] for each in documents[:COUNTED]]):
        found += torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=size)
    order = found.argsort(descending=True, stable=True)
    return order[: max(2, min(LENGTH, int((found > 0).sum())))].sort().values


def shortlist_of(rule: Rule) -> ShortlistRule | None:
    """The shortlist that a rule looks at, if it has one."""
    if isinstance(rule, ShortlistRule):
        return rule
    return shortlist_of(rule.rule) if isinstance(rule, Drafting) else None
