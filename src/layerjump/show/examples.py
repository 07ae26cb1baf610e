"""The table of `examples`: the best tokens at each level, as the paper prints them."""

from __future__ import annotations

from collections.abc import Sequence

from layerjump.lens.words import visible
from layerjump.show.look import number, safe
from layerjump.show.panel import Panel, Row, Study, listed, mean
from layerjump.show.tables import html_table


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
        f'<span class="token{" own" if token == own else ""}">{safe(visible(token))}</span>'
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
