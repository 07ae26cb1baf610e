"""`survey`: what every level reads over the test documents, by class of token and by document.

The table of `lj.survey` in the form of a report: when predictions are decided, how sure each level is, which tokens
each level reads most, which documents are decided early and late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import plotly.graph_objects as go

from layerjump.data.corpus import Corpus
from layerjump.data.token_text import escape_token
from layerjump.lens.survey import ALL, Survey, survey
from layerjump.studies.charts import BLUE, CYCLE, ORANGE, Panel, line_chart
from layerjump.studies.formatting import html_table, number, percent, safe, unique
from layerjump.studies.results import Finding, Record, Result, Study
from layerjump.studies.setup import Setup

_MOST_READ = 8  # tokens that a page shows for each level
_FEW_POSITIONS = 30
"""Classes with fewer positions are in the table, but their lines would be noise."""
_DOCUMENTS = 5  # shown from each end


class LevelRow(Record):
    """Means of one class of tokens at one level."""

    token_class: str
    level: int
    positions: int
    agreement: float
    decided: float
    entropy: float
    kl: float
    probability: float
    surprisal: float


class TokenRow(Record):
    """A token that a level reads often: the share of positions at which it is the top token."""

    level: int
    token: str
    share: float


class DocumentRow(Record):
    """One document: the mean level at which its predictions are decided, and the model's entropy and surprisal."""

    document: int
    positions: int
    decided_level: float
    entropy: float
    surprisal: float


class Tables(Record):
    """All classes at all levels, the tokens that are read most, and all documents."""

    levels: list[LevelRow]
    tokens: list[TokenRow]
    documents: list[DocumentRow]


class Headline(Record):
    """The mean level at which a prediction is decided, and the first level by which half of them are."""

    mean_decided_level: float
    half_decided_from_level: int


def run(setup: Setup) -> Result[Tables, Headline]:
    """Survey about `rerun_tokens` tokens of the test documents through the first estimator of the run."""
    corpus, documents = setup.corpus, setup.documents("test")
    test = Corpus(corpus.name, tuple(corpus.documents[index] for index in documents), corpus.note)
    settings = setup.settings
    jumps = setup.jumps(settings.estimators[0])
    result = summarize(survey(setup.model, jumps, test, tokens=settings.rerun_tokens, seed=settings.seed))
    rows = [
        DocumentRow(documents[row.document], row.positions, row.decided_level, row.entropy, row.surprisal)
        for row in result.tables.documents
    ]
    result.tables = Tables(result.tables.levels, result.tables.tokens, rows)
    return result


def summarize(surveyed: Survey) -> Result[Tables, Headline]:
    """Return a survey as the result of a study."""
    by_level = surveyed.by_level().drop(columns="targets")
    levels = [LevelRow(**row) for row in by_level.to_dict("records")]
    documents = [DocumentRow(**row) for row in surveyed.by_document().to_dict("records")]
    together = [row for row in levels if row.token_class == ALL]
    tokens = [
        TokenRow(row.level, token, share)
        for row in together
        for token, share in surveyed.most_read(row.level, n=_MOST_READ)
    ]
    n_positions = together[0].positions
    half = next(row.level for row in together if row.decided >= 0.5)
    headline = Headline(mean_decided_level=_mean_decided(together), half_decided_from_level=half)
    facts = {"lens": surveyed.info.lens, "positions": n_positions, "documents": len(documents)}
    notes = ["The first position of a sequence is an attention sink, at which jumps are not fitted."]
    return Result("survey", Tables(levels, tokens, documents), headline, notes, facts)


def _mean_decided(rows: Sequence[LevelRow]) -> float:
    """The mean level at which predictions are decided, from the shares that are at each level or before."""
    before = [0.0, *(row.decided for row in rows[:-1])]
    return sum(row.level * (row.decided - share) for row, share in zip(rows, before, strict=True))


def figures(result: Result[Tables, Headline]) -> list[Panel]:
    """Return when predictions are decided, how sure levels are, what they read, and the documents."""
    rows, last = result.tables.levels, max(row.level for row in result.tables.levels)
    drawn = [row for row in rows if row.token_class == ALL or row.positions >= _FEW_POSITIONS]
    classes = unique(row.token_class for row in drawn)
    paint = {ALL: ORANGE, **dict(zip(classes[1:], (BLUE, *CYCLE[1:], "#882255", "#8C6D31"), strict=False))}

    def chart(title: str, scale: Literal["unit", "zero"], value: Callable[[LevelRow], float]) -> go.Figure:
        lines = {name: [(row.level, value(row)) for row in drawn if row.token_class == name] for name in classes}
        return line_chart(title, lines, x="level", scale=scale, whole_x=True, dashed=[ALL], paint=paint)

    # Jumps are not fitted at the first position, so what they read there says little.
    mean_level = {name: _mean_decided([row for row in drawn if row.token_class == name]) for name in classes}
    by_class = sorted((name for name in classes if name not in (ALL, "first")), key=lambda name: mean_level[name])
    extremes = (
        f" Predictions after {_plural(by_class[0])} are decided earliest (mean {number(mean_level[by_class[0]])}), "
        f"those after {_plural(by_class[-1])} latest ({number(mean_level[by_class[-1]])})."
        if len(by_class) > 1
        else ""
    )
    decided = Panel(
        "When predictions are decided",
        f"Half of all predictions are decided at level {result.headline.half_decided_from_level} of {last} or before: "
        f"from there on the top token stays the model's. The mean is level "
        f"{number(result.headline.mean_decided_level)}.{extremes}",
        ("levels",),
        [
            chart("share of predictions decided", "unit", lambda row: row.decided),
            chart("agreement with the model", "unit", lambda row: row.agreement),
        ],
    )
    first, end = rows[0], next(row for row in rows if row.token_class == ALL and row.level == last)
    surprisal = (
        f" The surprisal of the token in the text goes from {number(first.surprisal)} to {number(end.surprisal)} nats."
        if end.surprisal == end.surprisal
        else ""
    )
    sure = Panel(
        "How sure each level is",
        f"From level {first.level} to level {last} the entropy of the prediction goes from {number(first.entropy)} to "
        f"{number(end.entropy)} nats.{surprisal}",
        ("levels",),
        [
            chart("entropy, nats", "zero", lambda row: row.entropy),
            chart("surprisal of the text, nats", "zero", lambda row: row.surprisal),
        ],
    )
    return [decided, sure, _token_panel(result.tables.tokens), _document_panel(result.tables.documents, last)]


def _plural(token_class: str) -> str:
    """The tokens of a class in words."""
    names = {"first": "first tokens", "special": "special tokens", "other": "parts of characters"}
    mass = ("punctuation", "whitespace")
    return names.get(token_class, token_class if token_class in mass else f"{token_class}s")


def _token_panel(tokens: Sequence[TokenRow]) -> Panel:
    levels = unique(row.level for row in tokens)
    by_level = {level: [row for row in tokens if row.level == level] for level in levels}
    model_tokens = {row.token for row in by_level[levels[-1]]}

    def cell(row: TokenRow) -> str:
        style = "token own" if row.token in model_tokens else "token"
        return f'<span class="{style}">{safe(escape_token(row.token))}</span> {safe(percent(row.share))}'

    body = [[str(level), " ".join(map(cell, by_level[level]))] for level in reversed(levels)]
    top, middle = by_level[levels[-1]][0], by_level[levels[len(levels) // 2]][0]
    return Panel(
        "What each level reads most",
        f"The model's most frequent prediction is {escape_token(top.token)} ({percent(top.share)} of positions); that "
        f"of level {middle.level} is {escape_token(middle.token)} ({percent(middle.share)}).",
        ("tokens",),
        html='<p class="quiet">The share of positions at which a token is the top token. <span class="token own">Marked'
        f"</span>: also among the model's {_MOST_READ} most frequent.</p>"
        + html_table(["level", "tokens"], body, numeric=[0]),
    )


def _document_panel(documents: Sequence[DocumentRow], last: int) -> Panel:
    order = sorted(documents, key=lambda row: row.decided_level)
    shown = order if len(order) <= 2 * _DOCUMENTS else [*order[:_DOCUMENTS], *order[-_DOCUMENTS:]]
    body = [
        [str(row.document), *map(number, (row.positions, row.decided_level, row.entropy, row.surprisal))]
        for row in shown
    ]
    head = ["document", "positions", "mean decided level", "entropy, nats", "surprisal, nats"]
    return Panel(
        "Which documents are decided early and late",
        f"The mean level at which a document's predictions are decided ranges from {number(order[0].decided_level)} "
        f"(document {order[0].document}) to {number(order[-1].decided_level)} (document {order[-1].document}) of "
        f"{last}.",
        ("documents",),
        html=f'<p class="quiet">The {_DOCUMENTS} earliest and the {_DOCUMENTS} latest; the CSV file has all. Entropy '
        "and surprisal are the model's own.</p>" + html_table(head, body, numeric=range(5)),
    )


def finding(result: Result[Tables, Headline]) -> Finding:
    """Return the level by which half of the predictions are decided."""
    last = max(row.level for row in result.tables.levels)
    return Finding(
        "Half of the predictions are decided by",
        f"level {result.headline.half_decided_from_level} of {last}",
        f"through {result.settings.get('lens', 'the lens')}; the mean is level "
        f"{number(result.headline.mean_decided_level)}.",
    )


STUDY = Study("survey", "what do the levels read over a whole text?", run, figures, finding)
