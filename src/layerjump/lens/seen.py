"""The model's own distribution at some rows, over all tokens or over few that stand for all.

A vocabulary product is what a step of tuning costs. Nearly all of the model's probability at some rows is on a few
thousand tokens. These are looked at, and of the others a random sample: each of it counts for many, so that what a
step sees is on average nearly what the whole vocabulary would show, unless a map is sure of what the model rules out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from layerjump.inputs.anatomy import Anatomy
from layerjump.inputs.short_head import can_shorten, rows_of, with_head

LIKELY, OTHERS = 4096, 2048
"""Tokens that are always seen, by the model's own probability, and how many of the others."""


@dataclass(frozen=True)
class Seen:
    """What levels are held against."""

    anatomy: Anatomy
    """Its head is of the tokens that are seen."""
    own: Tensor
    """(rows, tokens) the model's own probabilities."""
    counts: Tensor | None = None
    """(tokens,) the logarithm of how many tokens each stands for; None if all are there."""

    @classmethod
    @torch.no_grad()
    def all(cls, anatomy: Anatomy, final: Tensor) -> Seen:
        """Every token, from the states before the model's own vocabulary product."""
        return cls(anatomy, anatomy.decode(final).float().softmax(-1))

    @torch.no_grad()
    def few(self, draw: np.random.Generator, likely: int = LIKELY, others: int = OTHERS) -> Seen:
        """Some tokens in the place of all; itself, where that would not be fewer or cannot be."""
        size, head = self.own.shape[1], self.anatomy.head
        if size <= likely + others or not can_shorten(self.anatomy):
            return self
        assert isinstance(head, nn.Linear)
        order = self.own.sum(0).argsort(descending=True, stable=True)
        chosen = torch.from_numpy(draw.choice(size - likely, others, replace=False))
        tokens = torch.cat([order[:likely], order[likely:][chosen.to(order.device)]])
        counts = self.own.new_ones(len(tokens))
        counts[likely:] = (size - likely) / others
        own = self.own[:, tokens] * counts
        anatomy = with_head(self.anatomy, rows_of(head, tokens))
        return Seen(anatomy, own / own.sum(-1, keepdim=True), counts.log())

    def logits(self, landed: Tensor, *, to_final: bool) -> Tensor:
        """What a map's landing says of the tokens that are seen."""
        logits = self.anatomy.decode(landed if to_final else self.anatomy.to_final(landed))
        return logits if self.counts is None else logits + self.counts.to(logits.dtype)

    @torch.no_grad()
    def kl(self, logits: Tensor) -> tuple[float, Tensor]:
        """KL(own ‖ softmax), summed over rows, and its gradient, in fewer passes over the logits than autograd."""
        guessed = logits.float().log_softmax(-1)
        crossed = torch.linalg.vecdot(self.own, guessed).sum()
        return -float(self._entropy + crossed), guessed.exp_().sub_(self.own)

    @cached_property
    def _entropy(self) -> Tensor:
        return torch.special.entr(self.own).sum()
