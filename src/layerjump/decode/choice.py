"""From logits to tokens: Hugging Face's processors, the best token or a draw, and a draft held against the truth."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
