"""`data_requirements`: how much text does a map need, and of what kind?

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
from typing import Annotated, NamedTuple

import numpy as np

from layerjump.data.batches import Batches, make_batches
from layerjump.data.corpus import Corpus
from layerjump.jumps.collect_moments import RunPlan, product_dtype
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.moments import Moments
from layerjump.jumps.score_from_moments import R2
from layerjump.lens.lens import Lens
from layerjump.models.model import capture_states
from layerjump.studies.charts import GREY, Panel, draw_bars, draw_heat_map, empty_figure, line_chart, unit_axis
from layerjump.studies.formatting import listed, number
from layerjump.studies.results import Column, Record, Result, Study
from layerjump.studies.setup import Setup, mean_r2

PREFIXES = 8
"""Prefixes of the text to solve, at most."""
FEW_PER_COORDINATE = 5
"""Positions for each coordinate of the hidden state below which a fit warns."""
NOISE = 0.15
"""Share of words that `noised` replaces."""
CLEAN = "clean"


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
    tables, n_prefixes, d_model = Tables([], [], []), len(fits) - len(CORRUPTIONS), setup.model.d_model
    for index, (fit, p1) in enumerate(zip(fits, hits, strict=True)):
        r2 = [R2(*info.r2) for info in fit.jumps.info.values() if info.r2]
        means = *mean_r2(r2), sum(p1) / len(p1)
        is_few = fit.positions < FEW_PER_COORDINATE * d_model
        prefix = fit.positions, fit.positions / d_model, fit.tokens, is_few
        if index < n_prefixes:
            tables.prefixes.append(PrefixRow(*prefix, *means))
            tables.prefix_levels.extend(
                PrefixLevelRow(*prefix, level, *score, precision)
                for level, (score, precision) in enumerate(zip(r2, p1, strict=True))
            )
        if index >= n_prefixes - 1:
            variant = [CLEAN, *CORRUPTIONS][index - n_prefixes + 1]
            tables.variants.append(VariantRow(variant, fit.positions, *means))
    full = tables.prefixes[-1]
    half = min(tables.prefixes, key=lambda row: abs(row.positions - full.positions / 2))
    headline = Headline(
        per_coordinate=full.per_coordinate,
        r2=full.r2,
        p1=full.p1,
        p1_gained_since_half=full.p1 - half.p1,
        p1_lost={row.variant: full.p1 - row.p1 for row in tables.variants[1:]},
        r2_lost={row.variant: full.r2 - row.r2 for row in tables.variants[1:]},
    )
    facts = {
        "estimator": fitter.estimator,
        "width": d_model,
        "warning_below": FEW_PER_COORDINATE * d_model,
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
    return Result("data_requirements", tables, headline, notes, facts)


class _Fit(NamedTuple):
    """Maps to the last level, and on how much they were fitted."""

    jumps: Jumps
    positions: int
    tokens: int


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


def _change_words(document: str, change: Callable[[list[str]], list[str]]) -> str:
    """Return a document with its words changed and its whitespace in place."""
    parts = re.split(r"(\s+)", document)
    parts[::2] = change(parts[::2])
    return "".join(parts)


def shuffle_words(documents: list[str], seed: int) -> list[str]:
    """Return each document with its words in random order and its whitespace in place."""
    generator = random.Random(seed)

    def shuffle(words: list[str]) -> list[str]:
        # Sorting by random() is the one shuffle that Python promises to repeat in every version.
        return sorted(words, key=lambda _: generator.random())

    return [_change_words(document, shuffle) for document in documents]


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

    return [_change_words(document, lambda words: [draw(word) for word in words]) for document in documents]


CORRUPTIONS: dict[str, Callable[[list[str], int], list[str]]] = {
    "shuffled": shuffle_words,
    "duplicated": duplicate_half,
    "noised": replace_words,
}


def figures(result: Result[Tables, Headline]) -> list[Panel]:
    """Return scores against the amount of text, by level, and for corrupted text."""
    prefixes, rows, head = result.tables.prefixes, result.tables.prefix_levels, result.headline
    variants = result.tables.variants
    p1, r2 = "precision@1, mean over levels", "R², mean over levels"

    scores = {
        p1: [(row.per_coordinate, row.p1) for row in prefixes],
        r2: [(row.per_coordinate, row.r2) for row in prefixes],
    }
    charts = [
        line_chart(title, {title: points}, x="fitted positions per coordinate") for title, points in scores.items()
    ]
    for chart in charts:
        chart.add_vline(x=FEW_PER_COORDINATE, line={"color": GREY, "dash": "dot"})
        chart.update_xaxes(type="log", dtick=1)
    unit_axis(charts[0])
    unit_axis(charts[1], [row.r2 for row in prefixes], -1)
    reading = (
        f"With {number(head.per_coordinate)} positions for each coordinate, precision@1 is {number(head.p1)} and R² "
        f"{number(head.r2)}; the second half of the text adds {number(head.p1_gained_since_half)} to precision@1. "
        f"Left of the dotted line a fit warns that it has too little text."
    )
    panels = [Panel("Scores against the amount of text", reading, ("prefixes",), charts)]

    most = max(row.positions for row in rows)
    full = {row.level: row.p1 for row in rows if row.positions == most}
    tenth = min({row.positions for row in rows}, key=lambda count: abs(count - most / 10))
    lost = {row.level: full[row.level] - row.p1 for row in rows if row.positions == tenth}
    worst = max(lost, key=lost.__getitem__)
    reading = (
        f"With {number(tenth)} of the {number(most)} positions, precision@1 suffers most at level {worst}, where it "
        f"falls from {number(full[worst])} to {number(full[worst] - lost[worst])}."
    )
    by_level = {
        "precision@1": {(number(row.positions), str(row.level)): row.p1 for row in rows},
        "R²": {(number(row.positions), str(row.level)): row.r2 for row in rows},
    }
    charts = [
        draw_heat_map(cells, title=title, x="fitted positions", y="level", span=(0.0, 1.0), upwards=True)
        for title, cells in by_level.items()
    ]
    panels.append(Panel("The amount of text at every level", reading, ("prefix levels",), charts))

    charts = []
    for title, bars in ((p1, [row.p1 for row in variants]), (r2, [row.r2 for row in variants])):
        figure = empty_figure(title, height=230)
        draw_bars(figure, [row.variant for row in variants], bars, name=title)
        figure.update_traces(showlegend=False)
        charts.append(figure.update_yaxes(autorange="reversed", showgrid=False))
    clean = next(row for row in variants if row.variant == CLEAN)
    losses = [f"{number(clean.p1 - r.p1)} if the text is {r.variant}" for r in variants if r is not clean]
    reading = f"Maps fitted on the clean text reach a precision@1 of {number(clean.p1)}; they lose {listed(losses)}."
    return [*panels, Panel("Clean and corrupted text", reading, ("variants",), charts)]


STUDY = Study("data_requirements", "how much text does a map need, and of what kind?", run, figures)
