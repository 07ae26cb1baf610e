"""A text as a lens reads it: its ids, the positions that are read, and batches of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerjump.errors import BadModel, BadText
from layerjump.inputs.batches import Batch
from layerjump.inputs.models import Model

CELLS = 4096
"""Cells of a batch, padding included, unless one text alone has more."""
_SHOWN = 20


@dataclass(frozen=True)
class Prompt:
    """One text, special tokens and all, and where it is read."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    targets: Tensor
    """(positions,) the token that really comes next; −1 where none does."""


def prompts(model: Model, texts: Sequence[str], last: int | None = None) -> list[Prompt]:
    """Tokenize texts. A causal model is read everywhere, a masked one at its masks, or everywhere if there is none.

    `last` asks for no more than so many positions, the last ones; the model sees the whole text all the same.
    """
    if model.task not in ("causal", "masked"):
        raise BadModel(
            f"{model.name} is an encoder–decoder, and one text does not say what each of the two reads; read its "
            f"levels with `lens.readings.read_levels` and batches that hold both"
        )
    tokens = model.tokens
    rows = [tuple(tokens.wrap(ids)) for ids in tokens.encode(list(texts))]
    for text, ids in zip(texts, rows, strict=True):
        _check(text, len(ids), tokens.max_length)
    mask = tokens.mask if model.masked else None
    return [_prompt(ids, mask, model.causal, last) for ids in rows]


def _prompt(ids: tuple[int, ...], mask: int | None, causal: bool, last: int | None) -> Prompt:
    masked = tuple(place for place, token in enumerate(ids) if token == mask)
    following = [*ids[1:], -1] if causal else [-1] * len(ids)
    positions = masked or tuple(range(len(ids)))
    positions = positions if last is None else positions[-last:]
    return Prompt(ids, positions, torch.tensor(following)[list(positions)])


def _check(text: str, length: int, longest: int) -> None:
    said = repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")
    if length > longest:
        raise BadText(
            f"the text {said} has {length:,} tokens, but the model reads at most {longest:,}; shorten it"
        )
    if length == 0:
        raise BadText(f"the text {said} has no tokens; give at least one word")


def grouped(
    found: Sequence[Prompt], padding: int, cells: int = CELLS
) -> Iterator[tuple[list[int], Batch]]:
    """Batches of prompts of like length, each with the prompts' indices; picks are the positions read."""
    order = sorted(range(len(found)), key=lambda index: len(found[index].ids))
    group: list[int] = []
    for index in order:
        if group and (len(group) + 1) * len(found[index].ids) > cells:
            yield group, _batch([found[each] for each in group], padding)
            group = []
        group.append(index)
    if group:
        yield group, _batch([found[each] for each in group], padding)


def _batch(found: Sequence[Prompt], padding: int) -> Batch:
    longest = max(len(prompt.ids) for prompt in found)
    ids = torch.full((len(found), longest), padding)
    attention = torch.zeros_like(ids)
    for place, prompt in enumerate(found):
        ids[place, : len(prompt.ids)] = torch.tensor(prompt.ids)
        attention[place, : len(prompt.ids)] = 1
    position = torch.tensor([place for prompt in found for place in prompt.positions])
    counts = torch.tensor([len(prompt.positions) for prompt in found])
    row = torch.arange(len(found)).repeat_interleave(counts)
    return Batch(ids, attention, row, position, row, ids[row, position])
