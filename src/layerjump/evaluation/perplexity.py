"""Perplexity of a text with a sliding window.

The text is one sequence of tokens, after the model's BOS if its texts begin with one. Windows of W tokens start at 0,
s, 2s, …; a window scores those of its tokens that no earlier window scored and that have a predecessor in it. So after
the first window every token is predicted from at least W − s tokens; with s = W windows do not overlap, and the first
token of each is not scored. The perplexity is exp of the mean loss of the scored tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from layerjump.errors import BadEvaluation, argument
from layerjump.evaluation.model_variants import ModelVariant, WholeModel, require_causal
from layerjump.metrics.bootstrap import mean_interval
from layerjump.metrics.logits import upcast
from layerjump.models.hooks import Capture
from layerjump.models.model import Model
from layerjump.models.sites import Site


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a text, with its 95 % interval over windows."""

    value: float
    low: float
    high: float
    loss: float
    """Mean loss in nats per token."""
    tokens: int
    """Number of scored tokens."""
    windows: int
    """Number of windows."""
    window: int
    """Number of tokens in a window."""
    stride: int
    """Number of tokens between the starts of two windows."""
    mean_level: float | None
    """Mean exit level of the scored positions; None without early exit."""


def perplexity(
    model: Model,
    text: str,
    *,
    window: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
    variant: ModelVariant | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Return the perplexity of a text.

    Args:
        model: A causal language model.
        text: The text.
        window: Number of tokens in a window; by default the model's context length.
        stride: Number of tokens between the starts of two windows; by default half a window.
        limit: Largest number of windows; by default all.
        variant: Early exit, or parts replaced by maps; by default the whole model.
        progress: Function that is called with the tokens read and the tokens in all.
    """
    require_causal(model)
    max_length = model.tokenization.max_length
    window = max_length if window is None else window
    if not 2 <= window <= max_length:
        raise BadEvaluation(f"expected {argument('window')} of 2 to {max_length}, got {window}")
    stride = max(1, window // 2) if stride is None else stride
    if not 1 <= stride <= window:
        raise BadEvaluation(f"expected {argument('stride')} of 1 to {window}, got {stride}")
    if limit is not None and limit < 1:
        raise BadEvaluation(f"expected {argument('limit')} of 1 window or more, got {limit}")
    ids = [*model.tokenization.prefix, *model.tokenization.encode([text])[0]]
    if len(ids) < 2:
        raise BadEvaluation("the text has fewer than two tokens, so none is predicted; pass a longer one")
    spans = list(windows(len(ids), window, stride))[:limit]
    variant = variant or WholeModel()
    reader, losses = variant.make_reader(model), []
    sites = [Site(level) for level in (*reader.levels, model.n_blocks)]
    with variant.applied_to(model), Capture(model.structure, sites) as capture, torch.no_grad():
        for start, end, first in spans:
            tokens = torch.tensor(ids[start:end])
            positions = torch.arange(first - start - 1, len(tokens) - 1)
            losses.append(torch.zeros(len(positions), dtype=torch.float64))
            if len(positions):
                capture.start(positions)
                model.run_body(tokens[None], torch.ones(1, len(tokens), dtype=torch.long))
                states = capture.take()
                for rows, logits in reader.read(states, positions.to(states[sites[-1]].device)):
                    targets = tokens[positions[rows.cpu()] + 1].to(logits.device)
                    loss_of_rows = cross_entropy(upcast(logits), targets, reduction="none")
                    losses[-1][rows.cpu()] = loss_of_rows.double().cpu()
            if progress:
                progress(end, spans[-1][1])
    window_index = torch.cat([torch.full((len(part),), i) for i, part in enumerate(losses)])
    all_losses = torch.cat(losses)
    loss, low, high = map(float, mean_interval(all_losses.numpy(), window_index.numpy()))
    return Perplexity(
        value=math.exp(loss),
        low=math.exp(low),
        high=math.exp(high),
        loss=loss,
        tokens=len(all_losses),
        windows=len(spans),
        window=window,
        stride=stride,
        mean_level=reader.mean_level,
    )


def windows(n_tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, first scored token) of every window."""
    n_scored = 0
    for start in range(0, n_tokens, stride):
        end = min(start + window, n_tokens)
        yield start, end, max(n_scored, start + 1)
        n_scored = end
        if end == n_tokens:
            return
