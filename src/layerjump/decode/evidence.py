"""What levels say about positions of text, beside what the model says: the evidence that rules are chosen on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerjump.decode.gates import gate_features
from layerjump.decode.shortlist import Among
from layerjump.errors import TextTooShort
from layerjump.fit.jumps import Jumps
from layerjump.inputs.batches import Batch
from layerjump.inputs.corpus import Corpus, split
from layerjump.inputs.models import Model
from layerjump.inputs.states import states
from layerjump.lens.lens import Lens, rows_at_once

CANDIDATES = 10
"""Levels at which stopping is considered."""


@dataclass(frozen=True)
class Evidence:
    """Positions of some documents, read at some levels; tensors are (levels, positions) unless said."""

    levels: tuple[int, ...]
    right: Tensor
    """Whether the level's best token is the model's own."""
    gap: Tensor
    features: Tensor
    """(levels, positions, d + 3), what gates read."""
    document: Tensor
    """(positions,)."""
    tokens: Tensor | None = None
    """The shortlist that levels were read through; None: the whole vocabulary."""

    def __len__(self) -> int:
        return len(self.document)


def candidates(levels: Sequence[int]) -> tuple[int, ...]:
    """Those worth considering: all if they are few, else ten from first to last, closest where most is saved."""
    last = len(levels) - 1
    if last < CANDIDATES:
        return tuple(levels)
    steps = (step / (CANDIDATES - 3) for step in range(CANDIDATES - 2))
    places = {0, 1} | {round(2 * (last / 2) ** step) for step in steps}
    return tuple(levels[place] for place in sorted(places))


def unseen_documents(jumps: Jumps | None, corpus: Corpus) -> tuple[int, ...]:
    """Documents of a text that these jumps were not fitted on."""
    everything = tuple(range(len(corpus.documents)))
    if jumps is None or jumps.provenance.text_sha256 != corpus.sha256:
        return everything
    known = jumps.provenance
    seen = set(split(len(everything), known.split, seed=known.seed).fit)
    return tuple(document for document in everything if document not in seen)


def shares(documents: Sequence[int], seed: int) -> dict[str, list[int]]:
    """Deal documents out: to fit gates, to choose levels, to test thresholds, to show the outcome.

    Thresholds get most, since they may use one position of each: the more there are, the less the guarantee costs.
    """
    if len(documents) < 8:
        raise TextTooShort(
            f"{len(documents)} documents are left that the jumps have not seen, too few to calibrate on; give another "
            f"text"
        )
    first = split(len(documents), "30/60/10", seed=seed)
    some = 3 * len(first.fit) // 8
    dealt = {
        "gates": first.fit[some:],
        "select": first.fit[:some],
        "thresholds": first.select,
        "test": first.test,
    }
    return {name: [documents[place] for place in places] for name, places in dealt.items()}


@torch.no_grad()
def gather(
    model: Model,
    jumps: Jumps | None,
    batches: Iterable[Batch],
    levels: Sequence[int],
    among: Among | None = None,
) -> Evidence:
    """Read the batches' picks at levels."""
    lens, last = Lens(model if among is None else among.model(model), jumps), model.n_blocks
    tokens = None if among is None else among.tokens
    rows = rows_at_once(model)
    parts: list[tuple[Tensor, ...]] = []
    for batch in batches:
        at = next(iter(states(model, [batch], [*levels, last])))
        for start in range(0, batch.n_picks, rows):
            part = slice(start, start + rows)
            own = model.logits(at[last][part]).argmax(-1)
            seen = [_look(lens, level, at[level][part], own, tokens) for level in levels]
            place = batch.position[part].to(own.device)
            features = torch.stack([gate_features(at[level][part], place) for level in levels])
            right, gap = (torch.stack(column) for column in zip(*seen, strict=True))
            parts.append((right.cpu(), gap.cpu(), features.float().cpu(), batch.document[part]))
    columns = [list(column) for column in zip(*parts, strict=True)]
    right, gap, features = (torch.cat(column, 1) for column in columns[:3])
    return Evidence(tuple(levels), right, gap, features, torch.cat(columns[3]), tokens)


def _look(
    lens: Lens, level: int, state: Tensor, own: Tensor, tokens: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits = lens.logits(level, state)
    two = logits.topk(2)
    best = (two.values - logits.logsumexp(-1, keepdim=True)).exp()
    top = two.indices[:, 0] if tokens is None else tokens.to(own.device)[two.indices[:, 0]]
    return top == own, best[:, 0] - best[:, 1]
