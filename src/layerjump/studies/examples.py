"""`examples`: the five best tokens at chosen levels for a few sentences, identity beside the map."""

from __future__ import annotations

from contextlib import closing

import torch

from layerjump.inputs.batches import Batch
from layerjump.inputs.models import Model
from layerjump.inputs.positions import Positions
from layerjump.inputs.states import states
from layerjump.inputs.tokens import token_text
from layerjump.studies.result import Result, Row
from layerjump.studies.setup import Setup

SENTENCES = 4
LEVELS = 6
BEST = 5
_LONGEST = 512  # tokens of a sequence at most: so many a sentence are sure to hold enough of them
_CONTEXT = 70  # characters shown on each side of the position


@torch.no_grad()
def run(setup: Setup) -> Result:
    """Read one position of a few test documents at evenly spaced levels."""
    model = setup.model
    levels = [*spread(model.n_blocks), model.n_blocks]
    rows: list[Row] = []
    seen = 0
    batches = setup.batches(positions=Positions("one"), tokens=SENTENCES * _LONGEST)
    with closing(states(model, batches, levels)) as stream:
        for found in stream:
            for pick in range(min(found.batch.n_picks, SENTENCES - seen)):
                seen += 1
                state = {level: found[level][pick : pick + 1] for level in levels}
                rows += _read(setup, state, context(model, found.batch, pick))
            if seen == SENTENCES:
                break
    result = Result("examples", {"examples": rows})
    result.settings = {"sentences": seen, "levels": levels}
    return result


def spread(blocks: int) -> list[int]:
    """A few levels from 0 to just below the last, evenly spaced."""
    wanted = min(LEVELS, blocks)
    return sorted({round(index * (blocks - 1) / max(1, wanted - 1)) for index in range(wanted)})


def context(
    model: Model, batch: Batch, pick: int, *, characters: int = _CONTEXT, gap: str | None = None
) -> str:
    """The text around a pick: what a causal model has read, or both sides of a masked model's gap.

    The gap shows what stood there, unless told. Of an encoder–decoder: the end of what the encoder read, and what the
    decoder has.
    """
    tokenizer, position = model.tokens.tokenizer, int(batch.position[pick])
    length = int(batch.attention_mask[batch.row[pick]].sum())
    ids = batch.input_ids[batch.row[pick], :length].tolist()
    start = model.tokens.around[0]
    before = str(tokenizer.decode(ids[start : position + (0 if model.masked else 1)]))
    if batch.source_ids is not None:
        return f"{_source(model, batch, pick)[-characters:]} → {before[-characters:]}"
    if not model.masked:
        return before[-characters:]
    after = str(tokenizer.decode(ids[position + 1 : length - len(model.tokens.suffix)]))
    gap = gap or f"[{tokenizer.decode([int(batch.token[pick])])}]"
    return f"{before[-characters:]} {gap} {after[:characters]}"


def _source(model: Model, batch: Batch, pick: int) -> str:
    """What the encoder read."""
    assert batch.source_ids is not None
    assert batch.source_mask is not None
    row, tokens = batch.row[pick], model.tokens
    length = int(batch.source_mask[row].sum())
    inside = slice(len(tokens.prefix), length - len(tokens.suffix))
    return str(tokens.tokenizer.decode(batch.source_ids[row].tolist()[inside]))


def _read(setup: Setup, state: dict[int, torch.Tensor], where: str) -> list[Row]:
    tokenizer = setup.model.tokens.tokenizer
    rows: list[Row] = []
    for level, vector in state.items():
        row: Row = {"context": where, "level": level}
        for name, lens in setup.lenses().items():
            best = lens.logits(level, vector)[0].topk(BEST).indices.tolist()
            row[name] = [token_text(tokenizer, token) for token in best]
        rows.append(row)
    return rows
