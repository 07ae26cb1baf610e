"""`examples`: the five best tokens at chosen levels for a few sentences, identity beside the map.

The table of `examples`: the best tokens at each level, as the paper prints them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import torch

from layerjump.data.batches import Batch
from layerjump.data.positions import Positions
from layerjump.data.tokenization import escape_token, token_text
from layerjump.models.activations import capture_states
from layerjump.models.model import Model
from layerjump.studies.charts import Panel, Study, listed, mean, number, safe
from layerjump.studies.results import Result, Row
from layerjump.studies.setup import Setup
from layerjump.studies.tables import html_table

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
    with closing(capture_states(model, batches, levels)) as stream:
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
    tokenizer, position = model.tokenization.tokenizer, int(batch.position[pick])
    length = int(batch.attention_mask[batch.row[pick]].sum())
    ids = batch.input_ids[batch.row[pick], :length].tolist()
    start = model.tokenization.around[0]
    before = str(tokenizer.decode(ids[start : position + (0 if model.masked else 1)]))
    if batch.source_ids is not None:
        return f"{_source(model, batch, pick)[-characters:]} → {before[-characters:]}"
    if not model.masked:
        return before[-characters:]
    after = str(tokenizer.decode(ids[position + 1 : length - len(model.tokenization.suffix)]))
    gap = gap or f"[{tokenizer.decode([int(batch.token[pick])])}]"
    return f"{before[-characters:]} {gap} {after[:characters]}"


def _source(model: Model, batch: Batch, pick: int) -> str:
    """What the encoder read."""
    assert batch.source_ids is not None
    assert batch.source_mask is not None
    row, tokens = batch.row[pick], model.tokenization
    length = int(batch.source_mask[row].sum())
    inside = slice(len(tokens.prefix), length - len(tokens.suffix))
    return str(tokens.tokenizer.decode(batch.source_ids[row].tolist()[inside]))


def _read(setup: Setup, state: dict[int, torch.Tensor], where: str) -> list[Row]:
    tokenizer = setup.model.tokenization.tokenizer
    rows: list[Row] = []
    for level, vector in state.items():
        row: Row = {"context": where, "level": level}
        for name, lens in setup.lenses().items():
            best = lens.logits(level, vector)[0].topk(BEST).indices.tolist()
            row[name] = [token_text(tokenizer, token) for token in best]
        rows.append(row)
    return rows


def examples(study: Study) -> list[Panel]:
    """One table a sentence: rows are levels, the identity's five best tokens beside the map's."""
    rows = study["tables"].get("examples")
    if not rows:
        return []
    sentences = by_sentence(rows)
    lenses = [name for name, value in rows[0].items() if isinstance(value, list)]
    intro = (
        '<p class="quiet">Tokens from left to right, the most likely first; ␣ is a space, ↵ a new line. '
        '<span class="token own">Marked</span>: the token that the whole model finds most likely.</p>'
    )
    html = intro + "".join(_sentence(sentence, lenses) for sentence in sentences)
    return [Panel("What the levels say", _reading(sentences, lenses), ("examples",), html=html)]


def by_sentence(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each example: levels only rise within one."""
    sentences: list[list[Row]] = []
    for row in rows:
        last = sentences[-1][-1] if sentences else None
        if last and last["context"] == row["context"] and last["level"] < row["level"]:
            sentences[-1].append(row)
        else:
            sentences.append([row])
    return sentences


def _sentence(rows: Sequence[Row], lenses: Sequence[str]) -> str:
    *earlier, last = rows
    own = last[lenses[0]][0]
    body = [[str(row["level"]), *[_tokens(row[lens], own) for lens in lenses]] for row in earlier]
    itself = '<span class="quiet">the model itself</span>'
    body.append([str(last["level"]), _tokens(last[lenses[0]], own), *[itself] * (len(lenses) - 1)])
    table = html_table(["level", *[safe(lens) for lens in lenses]], body)
    return f'<div class="sentence"><p class="context">… {safe(rows[0]["context"])}</p>{table}</div>'


def _tokens(tokens: Sequence[str], own: str) -> str:
    return " ".join(
        f'<span class="token{" own" if token == own else ""}">{safe(escape_token(token))}</span>'
        for token in tokens
    )


def first_right(rows: Sequence[Row], lens: str) -> int:
    """The level from which on the lens' best token is the model's own."""
    own = rows[-1][lens][0]
    found = rows[-1]["level"]
    for row in reversed(rows):
        if row[lens][0] != own:
            break
        found = row["level"]
    return found


def _reading(sentences: Sequence[Sequence[Row]], lenses: Sequence[str]) -> str:
    last = sentences[0][-1]["level"]
    parts = [
        f"{number(mean(first_right(rows, lens) for rows in sentences))} ({lens})" for lens in lenses
    ]
    return (
        f"In these {len(sentences)} sentences the best token settles on the model's own at level {listed(parts)} of "
        f"{last} on average, among the levels shown."
    )
