"""Early looks at the tokens that text is mostly made of.

A look at a level is a vocabulary product, which costs as much as several blocks. Most tokens of a text are among a few
thousand, and a product with these alone costs a fraction. What the model itself says at level L always comes from its
whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from layerjump.decode.lean import with_lean_head
from layerjump.decode.packed import Kept
from layerjump.decode.rules import Drafting, Look, Rule
from layerjump.errors import BadExit
from layerjump.inputs.corpus import Corpus
from layerjump.inputs.models import Model

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
class Among:
    """Another rule, which looks at these tokens alone; what leaves early is one of them."""

    rule: Rule
    tokens: Tensor
    """(tokens,)."""
    _heads: Kept[nn.Linear] = field(default_factory=Kept, repr=False)

    @property
    def at(self) -> tuple[int, ...] | None:
        return self.rule.at

    def stops(self, look: Look) -> Tensor:
        return self.rule.stops(look)

    def check(self, model: Model) -> None:
        """Refuse a model that does not have these tokens, or whose head cannot be shortened."""
        if not can_shorten(model) or int(self.tokens.max()) >= model.anatomy.vocabulary:
            raise BadExit(
                f"the exit rule looks at a shortlist of {len(self.tokens):,} tokens that {model.name} does not have; "
                f"calibrate a rule for this model"
            )

    def model(self, model: Model) -> Model:
        """The same model, whose head knows these tokens alone."""
        head = model.anatomy.head
        assert isinstance(head, nn.Linear)
        anatomy = copy(model.anatomy)
        anatomy.head = self._heads.get(head, lambda: _rows_of(head, self.tokens))
        return with_lean_head(replace(model, anatomy=anatomy))

    def whole(self, logits: Tensor, vocabulary: int) -> Tensor:
        """Logits of these tokens as logits of all."""
        lowest = logits.amin(-1, keepdim=True) - UNLIKELY
        wide = lowest.repeat(*[1] * (logits.dim() - 1), vocabulary)
        wide[..., self.tokens.to(logits.device)] = logits
        return wide


def shortlist(model: Model, text: Corpus, documents: Sequence[int]) -> Tensor | None:
    """The most frequent tokens of these documents; None where a shorter head cannot be made, or would save little."""
    size = model.anatomy.vocabulary
    if not can_shorten(model) or size < WORTH * LENGTH:
        return None
    found = torch.zeros(size, dtype=torch.int64)
    for ids in model.tokens.encode([text.documents[each] for each in documents[:COUNTED]]):
        found += torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=size)
    order = found.argsort(descending=True, stable=True)
    return order[: max(2, min(LENGTH, int((found > 0).sum())))].sort().values


def can_shorten(model: Model) -> bool:
    """Whether some rows of the head are the head of some tokens."""
    return type(model.anatomy.head) is nn.Linear and model.anatomy.family.logits_bias is None


def shortlist_of(rule: Rule) -> Among | None:
    """The shortlist that a rule looks at, if it has one."""
    if isinstance(rule, Among):
        return rule
    return shortlist_of(rule.rule) if isinstance(rule, Drafting) else None


def _rows_of(head: nn.Linear, tokens: Tensor) -> nn.Linear:
    rows = tokens.to(head.weight.device)
    short = nn.Linear(head.in_features, len(rows), bias=head.bias is not None, device="meta")
    short.weight = nn.Parameter(head.weight.detach()[rows], requires_grad=False)
    if head.bias is not None:
        short.bias = nn.Parameter(head.bias.detach()[rows], requires_grad=False)
    return short
