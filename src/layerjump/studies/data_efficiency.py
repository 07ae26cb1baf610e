"""Spoilt copies of a text, for asking what a fit needs: word order, variety, cleanness.

`data`: how much text a map needs, and of what kind.

One pass over the fit documents; at growing counts the sums so far are solved and scored, as if the text ended there.
Then the same documents spoilt: words shuffled, half of them twice, words replaced by random ones. The test text is
the same clean one throughout.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from layerjump.data.batches import Batches, make_batches
from layerjump.data.corpus import Corpus
from layerjump.jumps.collect import RunPlan, SplitMoments, product_dtype
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.scoring import R2
from layerjump.jumps.statistics import Moments
from layerjump.lens.lens import Lens
from layerjump.models.activations import capture_states
from layerjump.studies._untyped import Result, Row, mean_r2
from layerjump.studies.setup import Setup

NOISE = 0.15
"""The share of words that `noised` replaces."""
_BLANKS = re.compile(r"(\s+)")

Spoil = Callable[[list[str], int], list[str]]


def spoilt(corpus: Corpus, documents: Sequence[int], variant: str, *, seed: int) -> Corpus:
    """The corpus with some of its documents spoilt, the others as they were."""
    changed = list(corpus.documents)
    new = VARIANTS[variant]([changed[document] for document in documents], seed)
    for document, text in zip(documents, new, strict=True):
        changed[document] = text
    return Corpus(f"{corpus.name} ({variant})", tuple(changed), corpus.note)


def shuffled(documents: list[str], seed: int) -> list[str]:
    """The words of each document in random order; the blanks stay where they were."""
    draw = random.Random(seed)
    found = []
    for document in documents:
        parts = _BLANKS.split(document)
        # Sorted by random(): the only draw that Python promises to repeat in any version.
        parts[::2] = sorted(parts[::2], key=lambda _: draw.random())
        found.append("".join(parts))
    return found


def duplicated(documents: list[str], seed: int) -> list[str]:
    """The first half of the documents, and again."""
    half = (len(documents) + 1) // 2
    return [documents[place % half] for place in range(len(documents))]


def noised(documents: list[str], seed: int) -> list[str]:
    """Some words replaced by random words of the text, common ones more often."""
    draw = random.Random(seed)
    words = [word for document in documents for word in document.split()]

    def change(word: str) -> str:
        replaced = draw.random() < NOISE
        return words[int(draw.random() * len(words))] if replaced else word

    found = []
    for document in documents:
        parts = _BLANKS.split(document)
        parts[::2] = [change(word) for word in parts[::2]]
        found.append("".join(parts))
    return found


VARIANTS: dict[str, Spoil] = {
    "shuffled": shuffled,
    "duplicated": duplicated,
    "noised": noised,
}


COUNTS = 8
"""How many prefixes are solved."""
FEW = 5
"""Positions a coordinate below which a fit warns."""


def run(setup: Setup) -> Result:
    """Solve prefixes and spoilt copies of the fit text, and read the test text through all of them."""
    work = _Work(setup, setup.plan(setup.corpus, "to-last"), setup.settings.estimators[0])
    scored = setup.few_test_batches()
    fits = _read(setup, [*work.prefixes(), *map(work.variant, VARIANTS)], scored)
    prefixes, others = fits[: -len(VARIANTS)], fits[-len(VARIANTS) :]
    variants = {"clean": prefixes[-1], **dict(zip(VARIANTS, others, strict=True))}
    result = Result("data")
    result.tables = {
        "prefixes": [fit.row() | fit.means() for fit in prefixes],
        "prefix levels": [fit.row() | row for fit in prefixes for row in fit.levels()],
        "variants": [
            {"variant": name, "positions": fit.positions, **fit.means()}
            for name, fit in variants.items()
        ],
    }
    result.settings = {
        "estimator": work.estimator,
        "width": setup.model.d_model,
        "warning_below": FEW * setup.model.d_model,
        "n_test": work.held.test.n,
        "n_examples": scored.n_picks,
        "noise": NOISE,
    }
    result.headline = _headline(result)
    result.notes.append(
        f"Prefixes are whole documents in the fit's own order. Below {FEW} positions a coordinate (n < {FEW} d) least "
        f"squares inflates held-out errors by 1 + d/(n − d − 1) or more; near n = d it is at its worst. "
        f"`duplicated` is half the documents twice: with all positions fitted, exactly the map of that half."
    )
    return result


@dataclass(frozen=True)
class _Fit:
    jumps: Jumps
    positions: int
    tokens: int
    hits: tuple[float, ...] = ()
    """P@1 at each level below the last."""

    @property
    def scores(self) -> list[R2]:
        return [R2(*info.r2) for info in self.jumps.info.values() if info.r2]

    def row(self) -> Row:
        width = self.jumps.provenance.width
        return {
            "positions": self.positions,
            "per d": self.positions / width,
            "tokens": self.tokens,
            "few": self.positions < FEW * width,
        }

    def means(self) -> Row:
        """Scores averaged over the levels."""
        return {**mean_r2(self.scores), "p@1": sum(self.hits) / len(self.hits)}

    def levels(self) -> list[Row]:
        """Scores of each level."""
        return [
            {"level": level, "r2": score.uniform, "r2 weighted": score.weighted, "p@1": hit}
            for level, (score, hit) in enumerate(zip(self.scores, self.hits, strict=True))
        ]


class _Work:
    """The passes: test (and select) once, the fit documents once, each spoilt copy once."""

    def __init__(self, setup: Setup, chosen: RunPlan, estimator: str) -> None:
        self.setup, self.plan, self.estimator = setup, chosen, estimator
        others = {name: part for name, part in chosen.batches.items() if name != "fit"}
        self.held = replace(chosen, batches=others).run(progress=setup.progress)
        self.documents = list(picks_by_document(chosen.batches["fit"]))

    def prefixes(self) -> list[_Fit]:
        """The fit after each segment of the documents."""
        fit = self.plan.batches["fit"]
        sums, tokens, found = self._empty(), 0, []
        for documents in segments(fit, self.setup.model.d_model):
            tokens += self._add(sums, self.setup.corpus, documents, (tokens, fit.n_tokens))
            found.append(self._solved(sums, tokens))
        return found

    def variant(self, name: str) -> _Fit:
        """The fit on a spoilt copy of the same documents."""
        corpus = spoilt(self.setup.corpus, self.documents, name, seed=self.setup.settings.seed)
        sums = self._empty()
        tokens = self._add(sums, corpus, self.documents, (0, self.plan.batches["fit"].n_tokens))
        return self._solved(sums, tokens)

    def _empty(self) -> Moments:
        pairs = self.plan.moments["fit"].pairs
        return Moments(pairs, reservoir=0, products=product_dtype(self.setup.model))

    def _add(
        self, sums: Moments, corpus: Corpus, documents: Sequence[int], progress: tuple[int, int]
    ) -> int:
        """Fold documents in; returns how many tokens that took."""
        found = make_batches(
            corpus,
            self.setup.model.tokenization,
            self.plan.batches["fit"].positions,
            documents=documents,
            seed=self.setup.settings.seed,
            max_length=self.plan.about["max_length"],
        )
        done, total = progress
        for batch in capture_states(self.setup.model, found, sums.sites):
            sums.add(batch.at)
            done += batch.batch.n_tokens
            if self.setup.progress:
                self.setup.progress(min(done, total), total)
        return found.n_tokens

    def _solved(self, sums: Moments, tokens: int) -> _Fit:
        splits = {**self.held.splits, "fit": sums}
        about = self.plan.about | {"tokens": tokens}
        jumps = solve_jumps(SplitMoments(splits, about), self.estimator, model=self.setup.model)
        return _Fit(jumps, sums.n, tokens)


def picks_by_document(fit: Batches) -> dict[int, int]:
    """How many positions of each document are fitted, in the order of the fit."""
    found: dict[int, int] = {}
    for document, picks in zip(fit.sequences.document, fit.sequences.picks, strict=True):
        found[document] = found.get(document, 0) + picks
    return found


def segments(fit: Batches, width: int) -> list[list[int]]:
    """The documents, cut so that the positions up to each cut grow by about the same factor."""
    picks = picks_by_document(fit)
    so_far = np.cumsum(list(picks.values()))
    total = int(so_far[-1])
    # From where there is hardly enough to solve (or a thousandth, of a long text).
    least = max(total / 1000, min(width / 2, total / COUNTS))
    ends = np.searchsorted(so_far, np.geomspace(least, total, COUNTS)[:-1]) + 1
    documents = np.array(list(picks))
    cuts = sorted(set(ends.tolist()) - {len(documents)})
    return [part.tolist() for part in np.split(documents, cuts)]


def _read(setup: Setup, fits: list[_Fit], scored: Batches) -> list[_Fit]:
    """The fits with what each of them predicts: one pass for all."""
    lenses = {str(place): Lens(setup.model, fit.jumps) for place, fit in enumerate(fits)}
    hits = setup.score_lenses(lenses, scored).hits(1)[:, :-1].double().mean(-1)
    return [replace(fit, hits=tuple(mine)) for fit, mine in zip(fits, hits.tolist(), strict=True)]


def _headline(result: Result) -> Row:
    prefixes = result.tables["prefixes"]
    whole = prefixes[-1]
    half = min(prefixes, key=lambda row: abs(row["positions"] - whole["positions"] / 2))
    found = {
        "positions_per_d": whole["per d"],
        "r2": whole["r2"],
        "p@1": whole["p@1"],
        "p@1_gained_since_about_half": whole["p@1"] - half["p@1"],
    }
    for row in result.tables["variants"][1:]:
        found[f"p@1_lost_{row['variant']}"] = whole["p@1"] - row["p@1"]
        found[f"r2_lost_{row['variant']}"] = whole["r2"] - row["r2"]
    return found
