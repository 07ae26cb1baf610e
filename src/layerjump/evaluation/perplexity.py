"""Perplexity with a sliding window.

The text is one sequence of tokens (behind the model's BOS, where its texts begin with one). Windows of W tokens start
at 0, s, 2s, …; a window scores those of its tokens that no earlier window has scored and that have a token before them
in it. So behind the first window every token is predicted from at least W − s tokens; with s = W windows do not
overlap, and the first token of each is not scored. The perplexity is exp of the mean loss of the scored tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from layerjump.errors import BadEvaluation
from layerjump.evaluation.early_exit import ModelVariant, TeacherForcedExit, require_causal
from layerjump.metrics.bootstrap import mean_interval
from layerjump.metrics.logits import upcast
from layerjump.models.hooks import Capture
from layerjump.models.model import Model
from layerjump.models.structure import Site


@dataclass(frozen=True)
class Perplexity:
    """Of a text, with the 95 % interval over windows."""

    value: float
    low: float
    high: float
    loss: float
    """Nats a token."""
    tokens: int
    """That were scored."""
    windows: int
    window: int
    stride: int
    mean_level: float | None


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
    """Run windows (as long as the model's context) over a text (half a window apart); `limit` stops after so many."""
    require_causal(model)
    longest = model.tokenization.max_length
    window = longest if window is None else window
    if not 2 <= window <= longest:
        raise BadEvaluation(f"the window given is {window}; this model takes 2 to {longest} tokens")
    stride = max(1, window // 2) if stride is None else stride
    if not 1 <= stride <= window:
        raise BadEvaluation(f"the stride given is {stride}; give 1 to the window's {window} tokens")
    if limit is not None and limit < 1:
        raise BadEvaluation(f"the limit given is {limit}; give 1 window or more")
    ids = [*model.tokenization.prefix, *model.tokenization.encode([text])[0]]
    if len(ids) < 2:
        raise BadEvaluation("the text has no two tokens, so none is predicted; give a longer one")
    spans = list(windows(len(ids), window, stride))[:limit]
    variant = variant or ModelVariant()
    reader, found = variant.reader(model), []
    with variant.changed(model):
        for begin, end, first in spans:
            found.append(_losses(model, reader, ids[begin:end], first - begin))
            if progress:
                progress(end, spans[-1][1])
    level = reader.mean_level if reader.levels else None
    return _summed(found, window, stride, level)


def windows(tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, first token scored) of every window over so many tokens."""
    scored = 0
    for begin in range(0, tokens, stride):
        end = min(begin + window, tokens)
        yield begin, end, max(scored, begin + 1)
        scored = end
        if end == tokens:
            return


@torch.no_grad()
def _losses(model: Model, reader: TeacherForcedExit, ids: Sequence[int], first: int) -> Tensor:
    """The losses of a window's tokens from `first` on."""
    tokens = torch.tensor(ids)
    places = torch.arange(first - 1, len(ids) - 1)
    if not len(places):
        return torch.zeros(0, dtype=torch.float64)
    sites = [Site(level) for level in (*reader.levels, model.n_blocks)]
    with Capture(model.structure, sites) as capture:
        capture.start(places)
        model.body(tokens[None], torch.ones(1, len(ids), dtype=torch.long))
        at = capture.take()
    found = torch.zeros(len(places), dtype=torch.float64)
    for rows, logits in reader.read(at, places.to(at[sites[-1]].device)):
        aims = tokens[1:][places][rows.cpu()].to(logits.device)
        each = cross_entropy(upcast(logits), aims, reduction="none")
        found[rows.cpu()] = each.double().cpu()
    return found


def _summed(found: Sequence[Tensor], window: int, stride: int, level: float | None) -> Perplexity:
    each = torch.cat(list(found))
    of = torch.cat([torch.full((len(some),), number) for number, some in enumerate(found)])
    mean, low, high = (float(part) for part in mean_interval(each.numpy(), of.numpy()))
    value, low, high = math.exp(mean), math.exp(low), math.exp(high)
    return Perplexity(value, low, high, mean, len(each), len(found), window, stride, level)
