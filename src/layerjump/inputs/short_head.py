"""A model's way from the last state to logits, for some tokens alone: a vocabulary product with few rows is cheap."""

from __future__ import annotations

from copy import copy

from torch import Tensor, nn

from layerjump.inputs.anatomy import Anatomy


def can_shorten(anatomy: Anatomy) -> bool:
    """Whether some rows of the head are the head of some tokens."""
    return type(anatomy.head) is nn.Linear and anatomy.family.logits_bias is None


def with_head(anatomy: Anatomy, head: nn.Linear) -> Anatomy:
    """The same anatomy with another head."""
    changed = copy(anatomy)
    changed.head = head
    return changed


def rows_of(head: nn.Linear, tokens: Tensor) -> nn.Linear:
    """The head of these tokens, in their order."""
    rows = tokens.to(head.weight.device)
    short = nn.Linear(head.in_features, len(rows), bias=head.bias is not None, device="meta")
    short.weight = nn.Parameter(head.weight.detach()[rows], requires_grad=False)
    if head.bias is not None:
        short.bias = nn.Parameter(head.bias.detach()[rows], requires_grad=False)
    return short
