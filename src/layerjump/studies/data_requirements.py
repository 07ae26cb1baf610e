"""`data`: how much text does a map need, and of what kind?

Protocol: one pass over the fit documents. At growing counts of positions the maps to the last level are solved from the
second moments collected so far, as if the text ended there. Then the same documents are corrupted and fitted again:
words shuffled, half of the documents twice, some words replaced by random ones. All maps are scored on the same clean
test text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import Annotated

import numpy as np
import plotly.graph_objects as go

from layerjump.data.batches import Batches, make_batches
from layerjump.data.corpus import Corpus
from layerjump.jumps.collect_moments import RunPlan, product_dtype
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.moments import Moments
from layerjump.jumps.scoring import R2
from layerjump.lens.lens import Lens
from layerjump.models.model import capture_states
from layerjump.studies.display import (
    BLUE,
    GREY,
    Panel,
    Value,
    draw_bars,
    draw_heat_map,
    empty_figure,
    line_chart,
    listed,
    number,
    unit_axis,
)
from layerjump.studies.results import Column, Record, Result, Study
from layerjump.studies.setup import Setup, mean_r2

PREFIXES = 8
"""Prefixes of the text to solve, at most."""
FEW_PER_COORDINATE = 5
"""Positions for each coordinate of the hidden state below which a fit warns."""
NOISE = 0.15
"""Share of words that `noised` replaces."""
CLEAN = "clean"
_WHITESPACE = re.compile(r"(\s+)")


class PrefixRow(Record):
    """Maps fitted on the first documents, averaged over the levels below the last."""

    positions: int
    per_coordinate: Annotated[float, Column("per d")]
    tokens: int
    is_few: Annotated[bool, Column("few")]
    r2: float
    r2_weighted: Annotated[float, Column("r2 weighted")]
    p1: Annotated[float, Column("p@1")]


class PrefixLevelRow(Record):
    """Maps fitted on the first documents, at one level."""

    positions: int
    per_coordinate: Annotated[float, Column("per d")]
    tokens: int
    is_few: Annotated[bool, Column("few")]
    level: int
    r2: float
    r2_weighted: Annotated[float, Column("r2 weighted")]
    p1: Annotated[float, Column("p@1")]


class VariantRow(Record):
    """Maps fitted on the clean text or on a corrupted copy, averaged over the levels below the last."""

    variant: str
    positions: int
    r2: float
    r2_weighted: Annotated[float, Column("r2 weighted")]
    p1: Annotated[float, Column("p@1")]


class Tables(Record):
    """Rows by amount and by kind of text."""

    prefixes: list[PrefixRow]
    prefix_levels: Annotated[list[PrefixLevelRow], Column("prefix levels")]
    variants: list[VariantRow]


class Headline(Record):
    """Scores of the fit on all the text, and what less or corrupted text costs."""

    per_coordinate: Annotated[float, Column("positions_per_d")]
    r2: float
    p1: Annotated[float, Column("p@1")]
    p1_gained_since_half: Annotated[float, Column("p@1_gained_since_about_half")]
    p1_lost: Annotated[dict[str, float], Column("p@1_lost_{}")] = field(default_factory=dict)
    r2_lost: Annotated[dict[str, float], Column("r2_lost_{}")] = field(default_factory=dict)


def run(setup: Setup) -> Result[Tables, Headline]:
    """Fit prefixes and corrupted copies of the fit text, and score all maps on the test text."""
    fitter = _Fitter(setup)
    batches = setup.few_test_batches()
    fits = [*fitter.fit_prefixes(), *map(fitter.fit_corrupted, CORRUPTIONS)]
    lenses = {str(index): Lens(setup.model, fit.jumps) for index, fit in enumerate(fits)}
    hits = setup.score_lenses(lenses, batches).hits(1)[:, :-1].double().mean(-1).tolist()
    scored = [replace(fit, p1=tuple(levels)) for fit, levels in zip(fits, hits, strict=True)]
    prefixes, corrupted = scored[: -len(CORRUPTIONS)], scored[-len(CORRUPTIONS) :]
    variants = {CLEAN: prefixes[-1], **dict(zip(CORRUPTIONS, corrupted, strict=True))}
    tables = Tables(
        [fit.row() for fit in prefixes],
        [row for fit in prefixes for row in fit.level_rows()],
        [fit.variant_row(name) for name, fit in variants.items()],
    )
    facts = {
        "estimator": fitter.estimator,
        "width": setup.model.d_model,
        "warning_below": FEW_PER_COORDINATE * setup.model.d_model,
        "n_test": fitter.test.test.n,
        "n_examples": batches.n_picks,
        "noise": NOISE,
    }
    notes = [
        f"Prefixes are whole documents in the order of the fit. Below {FEW_PER_COORDINATE} positions for each of the d "
        f"coordinates, least squares inflates held-out errors by 1 + d/(n − d − 1) or more; near n = d the errors are "
        f"largest. `duplicated` has half of the documents twice: with all positions fitted, it gives the map of that "
        f"half."
    ]
    return Result("data", tables, _headline(tables), notes, facts)


class _Fit(Record):
    """Maps to the last level, and how they were fitted."""

    jumps: Jumps
    positions: int
    tokens: int
    p1: tuple[float, ...] = ()
    """Precision@1 at each level below the last."""

    @property
    def r2(self) -> list[R2]:
        return [R2(*info.r2) for info in self.jumps.info.values() if info.r2]

    @property
    def per_coordinate(self) -> float:
        return self.positions / self.jumps.provenance.width

    @property
    def is_few(self) -> bool:
        return self.positions < FEW_PER_COORDINATE * self.jumps.provenance.width

    def row(self) -> PrefixRow:
        r2, p1 = mean_r2(self.r2), sum(self.p1) / len(self.p1)
        about = self.positions, self.per_coordinate, self.tokens, self.is_few
        return PrefixRow(*about, r2.uniform, r2.weighted, p1)

    def level_rows(self) -> list[PrefixLevelRow]:
        about = self.positions, self.per_coordinate, self.tokens, self.is_few
        return [
            PrefixLevelRow(*about, level, r2.uniform, r2.weighted, p1)
            for level, (r2, p1) in enumerate(zip(self.r2, self.p1, strict=True))
        ]

    def variant_row(self, name: str) -> VariantRow:
        row = self.row()
        return VariantRow(name, row.positions, row.r2, row.r2_weighted, row.p1)


class _Fitter:
    """Runs the test documents once, the fit documents once, and each corrupted copy once."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.estimator = setup, setup.settings.estimators[0]
        self.plan: RunPlan = setup.plan(setup.corpus, "to-last")
        held_out = {name: part for name, part in self.plan.batches.items() if name != "fit"}
        self.test = replace(self.plan, batches=held_out).run(progress=setup.progress)
        self.fit_batches = self.plan.batches["fit"]
        self.documents = list(picks_by_document(self.fit_batches))

    def fit_prefixes(self) -> list[_Fit]:
        """Return the fit after each segment of the documents."""
        moments, tokens, fits = self._empty_moments(), 0, []
        for documents in segments(self.fit_batches, self.setup.model.d_model):
            tokens += self._add(moments, self.setup.corpus, documents, done=tokens)
            fits.append(self._solve(moments, tokens))
        return fits

    def fit_corrupted(self, name: str) -> _Fit:
        """Return the fit on a corrupted copy of the same documents."""
        corpus = corrupt(self.setup.corpus, self.documents, name, seed=self.setup.settings.seed)
        moments = self._empty_moments()
        return self._solve(moments, self._add(moments, corpus, self.documents, done=0))

    def _empty_moments(self) -> Moments:
        pairs = self.plan.moments["fit"].pairs
        return Moments(pairs, reservoir=0, products=product_dtype(self.setup.model))

    def _add(self, moments: Moments, corpus: Corpus, documents: Sequence[int], *, done: int) -> int:
        """Add documents to the moments, and return how many tokens they have."""
        batches = make_batches(
            corpus,
            self.setup.model.tokenization,
            self.fit_batches.positions,
            documents=documents,
            seed=self.setup.settings.seed,
            max_length=self.plan.max_length,
        )
        total = self.fit_batches.n_tokens
        for states in capture_states(self.setup.model, batches, moments.sites):
            moments.add(states.at)
            done += states.batch.n_tokens
            if self.setup.progress:
                self.setup.progress(min(done, total), total)
        return batches.n_tokens

    def _solve(self, moments: Moments, tokens: int) -> _Fit:
        info = replace(self.plan.info, tokens=tokens)
        splits = replace(self.test, fit=moments, info=info)
        jumps = solve_jumps(splits, self.estimator, model=self.setup.model)
        return _Fit(jumps, moments.n, tokens)


def picks_by_document(batches: Batches) -> dict[int, int]:
    """Return how many positions of each document are fitted, in the order of the fit."""
    picks: dict[int, int] = {}
    for document, count in zip(batches.sequences.document, batches.sequences.picks, strict=True):
        picks[document] = picks.get(document, 0) + count
    return picks


def segments(batches: Batches, d_model: int) -> list[list[int]]:
    """Cut the documents so that the number of positions up to each cut grows by about the same factor."""
    picks = picks_by_document(batches)
    cumulative = np.cumsum(list(picks.values()))
    total = int(cumulative[-1])
    # The first prefix has hardly enough positions to solve (of a long text: a thousandth).
    first = max(total / 1000, min(d_model / 2, total / PREFIXES))
    ends = np.searchsorted(cumulative, np.geomspace(first, total, PREFIXES)[:-1]) + 1
    documents = np.array(list(picks))
    cuts = sorted(set(ends.tolist()) - {len(documents)})
    return [part.tolist() for part in np.split(documents, cuts)]


def corrupt(corpus: Corpus, documents: Sequence[int], name: str, *, seed: int) -> Corpus:
    """Return the corpus with some of its documents corrupted and the others unchanged."""
    texts = list(corpus.documents)
    corrupted = CORRUPTIONS[name]([texts[document] for document in documents], seed)
    for document, text in zip(documents, corrupted, strict=True):
        texts[document] = text
    return Corpus(f"{corpus.name} ({name})", tuple(texts), corpus.note)


def shuffle_words(documents: list[str], seed: int) -> list[str]:
    """Return each document with its words in random order and its whitespace in place."""
    generator = random.Random(seed)
    shuffled = []
    for document in documents:
        parts = _WHITESPACE.split(document)
        # Sorting by random() is the one shuffle that Python promises to repeat in every version.
        parts[::2] = sorted(parts[::2], key=lambda _: generator.random())
        shuffled.append("".join(parts))
    return shuffled


def duplicate_half(documents: list[str], seed: int) -> list[str]:
    """Return the first half of the documents twice."""
    half = (len(documents) + 1) // 2
    return [documents[index % half] for index in range(len(documents))]


def replace_words(documents: list[str], seed: int) -> list[str]:
    """Return the documents with some words replaced by random words of the text, common ones more often."""
    generator = random.Random(seed)
    words = [word for document in documents for word in document.split()]

    def draw(word: str) -> str:
        is_replaced = generator.random() < NOISE
        return words[int(generator.random() * len(words))] if is_replaced else word

    noised = []
    for document in documents:
        parts = _WHITESPACE.split(document)
        parts[::2] = [draw(word) for word in parts[::2]]
        noised.append("".join(parts))
    return noised


CORRUPTIONS: dict[str, Callable[[list[str], int], list[str]]] = {
    "shuffled": shuffle_words,
    "duplicated": duplicate_half,
    "noised": replace_words,
}


def _headline(tables: Tables) -> Headline:
    full = tables.prefixes[-1]
    half = min(tables.prefixes, key=lambda row: abs(row.positions - full.positions / 2))
    corrupted = [row for row in tables.variants if row.variant != CLEAN]
    return Headline(
        per_coordinate=full.per_coordinate,
        r2=full.r2,
        p1=full.p1,
        p1_gained_since_half=full.p1 - half.p1,
        p1_lost={row.variant: full.p1 - row.p1 for row in corrupted},
        r2_lost={row.variant: full.r2 - row.r2 for row in corrupted},
    )


def figures(result: Result[Tables, Headline]) -> list[Panel]:
    """Return scores against the amount of text, by level, and for corrupted text."""
    tables = result.tables
    return [
        _prefix_panel(tables.prefixes, result.headline),
        _level_panel(tables.prefix_levels),
        _variant_panel(tables.variants),
    ]


def _prefix_panel(rows: Sequence[PrefixRow], head: Headline) -> Panel:
    def chart(title: str, score: Callable[[PrefixRow], Value]) -> go.Figure:
        lines = {title: [(row.per_coordinate, score(row)) for row in rows]}
        figure = line_chart(title, lines, x="fitted positions per coordinate")
        figure.update_traces(showlegend=False)
        figure.add_vline(x=FEW_PER_COORDINATE, line={"color": GREY, "dash": "dot"})
        return figure.update_xaxes(type="log", dtick=1)

    charts = [
        unit_axis(chart("precision@1, mean over levels", lambda row: row.p1)),
        unit_axis(chart("R², mean over levels", lambda row: row.r2), [row.r2 for row in rows], -1),
    ]
    reading = (
        f"With {number(head.per_coordinate)} positions for each coordinate, precision@1 is {number(head.p1)} and R² "
        f"{number(head.r2)}; the second half of the text adds {number(head.p1_gained_since_half)} to precision@1. "
        f"Left of the dotted line a fit warns that it has too little text."
    )
    return Panel("Scores against the amount of text", reading, ("prefixes",), charts)


def _level_panel(rows: Sequence[PrefixLevelRow]) -> Panel:
    def chart(title: str, score: Callable[[PrefixLevelRow], float]) -> go.Figure:
        cells = {(number(row.positions), str(row.level)): score(row) for row in rows}
        figure = draw_heat_map(cells, title=title, x="fitted positions", y="level", span=(0.0, 1.0))
        # Positions are names here: as numbers they would be spaced by their size.
        return figure.update_xaxes(type="category").update_yaxes(type="category", autorange=True)

    most = max(row.positions for row in rows)
    full = {row.level: row.p1 for row in rows if row.positions == most}
    tenth = min({row.positions for row in rows}, key=lambda count: abs(count - most / 10))
    lost = {row.level: full[row.level] - row.p1 for row in rows if row.positions == tenth}
    worst = max(lost, key=lost.__getitem__)
    reading = (
        f"With {number(tenth)} of the {number(most)} positions, precision@1 suffers most at level {worst}, where it "
        f"falls from {number(full[worst])} to {number(full[worst] - lost[worst])}."
    )
    charts = [chart("precision@1", lambda row: row.p1), chart("R²", lambda row: row.r2)]
    return Panel("The amount of text at every level", reading, ("prefix levels",), charts)


def _variant_panel(rows: Sequence[VariantRow]) -> Panel:
    charts = []
    for title, scores in (
        ("precision@1, mean over levels", [row.p1 for row in rows]),
        ("R², mean over levels", [row.r2 for row in rows]),
    ):
        figure = empty_figure(title, height=230)
        draw_bars(figure, [row.variant for row in rows], scores, name=title, colour=BLUE)
        figure.update_traces(showlegend=False)
        charts.append(figure.update_yaxes(autorange="reversed", showgrid=False))
    clean = next(row for row in rows if row.variant == CLEAN)
    losses = [f"{number(clean.p1 - r.p1)} if the text is {r.variant}" for r in rows if r is not clean]
    reading = f"Maps fitted on the clean text reach a precision@1 of {number(clean.p1)}; they lose {listed(losses)}."
    return Panel("Clean and corrupted text", reading, ("variants",), charts)


STUDY = Study("data", "how much text does a map need, and of what kind?", run, figures)
