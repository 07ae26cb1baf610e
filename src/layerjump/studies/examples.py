"""`examples`: the five best tokens at a few levels for a few sentences, by the identity and by the maps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Annotated

import torch

from layerjump.data.batches import Batch
from layerjump.data.positions import Positions
from layerjump.data.token_text import escape_token, token_text
from layerjump.models.model import Model, capture_states
from layerjump.studies.charts import Panel
from layerjump.studies.formatting import html_table, listed, mean, number, safe
from layerjump.studies.results import Column, Empty, Record, Result, Study
from layerjump.studies.setup import Setup

SENTENCES = 4
LEVELS = 6
BEST = 5
_MAX_TOKENS = 512  # of a sequence: enough tokens for all sentences
_CONTEXT = 70  # characters shown on each side of the position


class ExampleRow(Record):
    """The best tokens of every lens at one position and level."""

    context: str
    level: int
    tokens: Annotated[dict[str, list[str]], Column("{}")]
    """By lens, the most likely first."""


class Tables(Record):
    """The rows of all sentences, levels rising within each."""

    examples: list[ExampleRow]


@torch.no_grad()
def run(setup: Setup) -> Result[Tables, Empty]:
    """Predict the next token at one position of a few test documents from evenly spaced levels."""
    model, lenses = setup.model, setup.lenses()
    tokenizer = model.tokenization.tokenizer
    levels = [*spaced_levels(model.n_blocks), model.n_blocks]
    rows: list[ExampleRow] = []
    sentences = 0
    batches = setup.batches(positions=Positions("one"), tokens=SENTENCES * _MAX_TOKENS)
    readouts = {name: {level: lens.readout(level) for level in levels} for name, lens in lenses.items()}
    sources = {readout.site for by_level in readouts.values() for readout in by_level.values()}
    with closing(capture_states(model, batches, sorted(sources))) as stream:
        for states in stream:
            for pick in range(min(states.batch.n_picks, SENTENCES - sentences)):
                sentences += 1
                text = context(model, states.batch, pick)
                for level in levels:
                    best = {}
                    for name, by_level in readouts.items():
                        state = states[by_level[level].site][pick : pick + 1]
                        best[name] = by_level[level].logits(state)[0].topk(BEST).indices.tolist()
                    tokens = {name: [token_text(tokenizer, token) for token in ids] for name, ids in best.items()}
                    rows.append(ExampleRow(text, level, tokens))
            if sentences == SENTENCES:
                break
    facts = {"sentences": sentences, "levels": levels}
    return Result("examples", Tables(rows), Empty(), settings=facts)


def spaced_levels(n_blocks: int) -> list[int]:
    """Return a few evenly spaced levels from 0 to just below the last."""
    count = min(LEVELS, n_blocks)
    return sorted({round(index * (n_blocks - 1) / max(1, count - 1)) for index in range(count)})


def context(model: Model, batch: Batch, pick: int, *, characters: int = _CONTEXT, gap: str | None = None) -> str:
    """Return the text around a pick: what a causal model has read, or both sides of the gap of a masked model.

    The gap shows the masked token, unless `gap` replaces it. Of an encoder–decoder: the end of the encoder's text, and
    what the decoder has read.
    """
    tokenizer, position = model.tokenization.tokenizer, int(batch.position[pick])
    length = int(batch.attention_mask[batch.row[pick]].sum())
    ids = batch.input_ids[batch.row[pick], :length].tolist()
    start = model.tokenization.around[0]
    before = str(tokenizer.decode(ids[start : position + (0 if model.masked else 1)]))
    if batch.source_ids is not None:
        assert batch.source_mask is not None
        row, tokens = batch.row[pick], model.tokenization
        inside = slice(len(tokens.prefix), int(batch.source_mask[row].sum()) - len(tokens.suffix))
        encoder_text = str(tokenizer.decode(batch.source_ids[row].tolist()[inside]))
        return f"{encoder_text[-characters:]} → {before[-characters:]}"
    if not model.masked:
        return before[-characters:]
    after = str(tokenizer.decode(ids[position + 1 : length - len(model.tokenization.suffix)]))
    gap = gap or f"[{tokenizer.decode([int(batch.token[pick])])}]"
    return f"{before[-characters:]} {gap} {after[:characters]}"


def figures(result: Result[Tables, Empty]) -> list[Panel]:
    """Return one table a sentence: rows are levels, columns are lenses."""
    # A sentence ends where the level does not rise.
    sentences: list[list[ExampleRow]] = []
    for row in result.tables.examples:
        before = sentences[-1][-1] if sentences else None
        if before and before.context == row.context and before.level < row.level:
            sentences[-1].append(row)
        else:
            sentences.append([row])
    lenses = list(sentences[0][0].tokens)
    last = sentences[0][-1].level
    settled = [f"{number(mean(settled_level(rows, lens) for rows in sentences))} ({lens})" for lens in lenses]
    reading = (
        f"In these {len(sentences)} sentences the best token settles on the model's own at level {listed(settled)} of "
        f"{last}, on average over the levels shown."
    )
    legend = (
        '<p class="quiet">The most likely token is first; ␣ is a space, ↵ a new line. '
        '<span class="token own">Marked</span>: the token that the full model finds most likely.</p>'
    )
    html = legend + "".join(_sentence_table(rows, lenses) for rows in sentences)
    return [Panel("Best tokens at each level", reading, ("examples",), html=html)]


def settled_level(rows: Sequence[ExampleRow], lens: str) -> int:
    """Return the level from which on the best token of a lens is the model's."""
    final = rows[-1].tokens[lens][0]
    wrong = [index for index, row in enumerate(rows) if row.tokens[lens][0] != final]
    return rows[max(wrong, default=-1) + 1].level


def _sentence_table(rows: Sequence[ExampleRow], lenses: Sequence[str]) -> str:
    *earlier, last = rows
    final = last.tokens[lenses[0]]

    def cells(tokens: Sequence[str]) -> str:
        return " ".join(
            f'<span class="token{" own" if token == final[0] else ""}">{safe(escape_token(token))}</span>'
            for token in tokens
        )

    body = [[str(row.level), *[cells(row.tokens[lens]) for lens in lenses]] for row in earlier]
    itself = '<span class="quiet">the model itself</span>'
    body.append([str(last.level), cells(final), *[itself] * (len(lenses) - 1)])
    table = html_table(["level", *[safe(lens) for lens in lenses]], body)
    return f'<div class="sentence"><p class="context">… {safe(rows[0].context)}</p>{table}</div>'


STUDY: Study[Tables, Empty] = Study("examples", "which tokens does each level predict?", run, figures)
