"""What the studies of one run share: model, text, settings, and fits made once.

What the studies of one run share: the model, the text, and fits that are made once and kept.

Fits for maps that are applied at every position: position 0 and special tokens are fitted on too.

A masked model sees the same share of [MASK]s as it is asked about, but is fitted on all positions of that text, not
on the masks alone: its maps must carry the context as well.

Scores that several studies give to a set of jumps to the last level.

What a run with `--protocol paper` does otherwise than the authors did, so that a report can say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layerjump.data.batches import Batch, Batches, make_batches
from layerjump.data.corpus import Corpus, Splits, split_documents
from layerjump.data.positions import MASKED_SHARE, PAPER, Positions
from layerjump.errors import BadEstimator, BadStudy, BadText, TextTooShort
from layerjump.evaluation.lm_eval import require_lm_eval
from layerjump.evaluation.tasks import load_items, select_tasks
from layerjump.jumps.collect import RunPlan, SplitMoments, plan_run, sample_positions
from layerjump.jumps.fit import NAMES, TO_PREDICTIONS, selects, solve_jumps
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import Affine, to_affine
from layerjump.jumps.pairs import PREDICTIONS, Pair
from layerjump.jumps.scoring import R2, r2
from layerjump.jumps.statistics import Moments
from layerjump.lens.evaluate import LensScores, evaluate_lenses
from layerjump.lens.lens import Lens
from layerjump.models.model import Model
from layerjump.studies.results import Row

Progress = Callable[[int, int], None]
"""Called with the tokens done and the tokens to do."""
FEW = 200
"""Test positions for studies that read through many maps."""


@dataclass(frozen=True)
class Settings:
    """The choices of a run; the same choices give the same numbers."""

    tokens: int | None = None
    """Tokens of the text to run (None: all)."""
    positions: str | None = None
    """Positions to fit on (None: all for a causal model, 15 % for a masked one, a sample for all pairs)."""
    split: str = "80/10/10"
    seed: int = 0
    estimators: tuple[str, ...] = ("mat",)
    score: int = 500
    """Test positions that are read through the vocabulary at every level."""
    budget: int = 2_000
    """Test tokens for the costly studies (submodules, alternation)."""
    targets: tuple[float, ...] = (0.95,)
    """Agreements at which `exits` states the layers saved."""
    exit_position: int | None = None
    """`exits`: the t of every example (the authors' BERT code has 3); None: its own position."""
    tasks: tuple[str, ...] = ()
    """`pruning`: benchmark tasks that every model is scored on too."""
    task_data: str | None = None
    """The folder with their files."""
    task_limit: int | None = None
    """Items of each task (None: all)."""
    checkpoints: tuple[str, ...] = ()
    """`dynamics`: folders (or folders of `checkpoint-*`), or hub revisions of the model."""
    task: str | None = None
    """`finetune`: the file of items to learn."""
    steps: int | None = None
    """`finetune`, `architecture`: optimiser steps of each training."""
    runs: int = 3
    """`finetune`, `architecture`: trainings with different seeds."""
    paper: bool = False
    """The authors' protocol: one position a sentence, position 0 allowed, no bias, no penalty."""


_LEAST = {"tokens": 1, "score": 1, "budget": 1, "exit_position": 0, "steps": 1, "runs": 1}
PAPER_SETTINGS = Settings(positions="one", split="9000/0/1000", paper=True, score=10**9)
"""9,000 sentences to fit on and 1,000 to test on, one position each."""


def settings_of(protocol: str, **given: Any) -> Settings:
    """The settings of a protocol (`ours` or `paper`) with those given put in their place; None means not given."""
    if protocol not in ("ours", "paper"):
        raise BadStudy(f"the protocol given is {protocol!r}; give ours or paper")
    base = PAPER_SETTINGS if protocol == "paper" else Settings()
    settings = replace(base, **{name: value for name, value in given.items() if value is not None})
    unknown = [name for name in settings.estimators if name not in NAMES]
    if unknown:
        raise BadEstimator(f"there is no estimator {unknown[0]!r}; known are {', '.join(NAMES)}")
    if settings.estimators[:1] == (TO_PREDICTIONS,):
        raise BadEstimator(
            "calibrated maps lead to predictions alone, and the first estimator given is the one that all studies use; "
            "give another first, such as mat,calibrated"
        )
    for name, least in _LEAST.items():
        value = getattr(settings, name)
        if value is not None and value < least:
            raise BadStudy(f"{name} given is {value}; give {least} or more")
    if not all(0 < target <= 1 for target in settings.targets):
        raise BadStudy(
            f"targets given are {settings.targets}; give agreements above 0 and at most 1"
        )
    _check_tasks(settings)
    return settings


def _check_tasks(settings: Settings) -> None:
    """Errors about tasks come before a long run, not in the midst of it."""
    if not settings.tasks:
        return
    if settings.task_data is None:
        raise BadStudy("tasks were given, but not where their files are; give that folder too")
    for task in select_tasks(settings.tasks):
        load_items(task, settings.task_data, settings.task_limit)
    require_lm_eval()


@dataclass
class Setup:
    """A run of studies: what is asked, and what has been made so far."""

    model: Model
    corpus: Corpus
    settings: Settings = field(default_factory=Settings)
    others: Sequence[Corpus] = ()
    """Further texts, for `transfer`."""
    level_pairs: str = "to-last"
    """The widest set of level pairs that any study of the run needs: one pass serves them all."""
    progress: Progress | None = None
    _kept: dict[str, Any] = field(default_factory=dict, repr=False)

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """What was made under this name before, or is made now."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def made(self, name: str) -> Any:
        """What was made under this name before; None if nothing was."""
        return self._kept.get(name)

    def parts(self, corpus: Corpus | None = None) -> Splits:
        """The documents of a text to fit, select and test on."""
        documents = (corpus or self.corpus).documents
        return split_documents(len(documents), self.settings.split, seed=self.settings.seed)

    def documents(self, part: str, corpus: Corpus | None = None) -> tuple[int, ...]:
        """The documents of one part of the split; an error where it has none."""
        corpus = corpus or self.corpus
        documents: tuple[int, ...] = getattr(self.parts(corpus), part)
        if not documents:
            raise BadText(
                f"the split {self.settings.split} of {corpus.name} leaves no {part} documents; give it some"
            )
        return documents

    def positions(self) -> Positions | str | None:
        """The positions to fit on, as `plan` takes them."""
        if self.settings.paper:
            return self._as_in_the_paper()
        return self.settings.positions or (MASKED_SHARE if self.model.masked else None)

    def test_positions(self) -> Positions:
        """Where predictions are scored: one a sentence or where a masked model is fitted, else all but position 0."""
        chosen = self.settings.positions
        if self.settings.paper:
            return self._as_in_the_paper()
        if self.model.masked:
            # Where all positions are picked none is masked, and a token that is seen is no prediction.
            return Positions.parse(MASKED_SHARE if chosen in (None, "all") else str(chosen))
        return Positions.parse("one" if chosen == "one" else "all")

    def _as_in_the_paper(self) -> Positions:
        """One a sentence unless told, and any: the first and special ones too."""
        return Positions.parse(self.settings.positions or "one", skip_first=0, special=True)

    def collected(self, pairs: str | None = None) -> SplitMoments:
        """Sums for these pairs (the run's level pairs unless told), from one pass kept for all studies."""
        pairs = pairs or self.level_pairs
        return self.keep(f"collected {pairs}", lambda: self.collect(self.corpus, pairs))

    def plan(self, corpus: Corpus, pairs: str, **changes: Any) -> RunPlan:
        """A pass over a text with this run's settings, decided on but not started."""
        features = "both" if pairs == PREDICTIONS else "raw"
        return plan_run(
            self.model,
            corpus,
            **{
                "pairs": pairs,
                "positions": self.positions(),
                "tokens": self.settings.tokens,
                "split": self.settings.split,
                "seed": self.settings.seed,
                "select": any(selects(name) for name in self.settings.estimators),
                "features": features,
            }
            | changes,
        )

    def collect(self, corpus: Corpus, pairs: str, **changes: Any) -> SplitMoments:
        """A pass over a text with this run's settings."""
        return self.plan(corpus, pairs, **changes).run(progress=self.progress)

    def jumps(self, estimator: str, pairs: str | None = None) -> Jumps:
        """Every jump of the pairs, solved once; calibrated ones lead to predictions alone."""
        pairs = PREDICTIONS if estimator == TO_PREDICTIONS else pairs or self.level_pairs
        return self.keep(
            f"jumps {estimator} {pairs}",
            lambda: solve_jumps(self.collected(pairs), estimator, model=self.model),
        )

    def lenses(self) -> dict[str, Lens]:
        """Identity and every estimator of the run, by name."""
        fitted = {name: Lens(self.model, self.jumps(name)) for name in self.settings.estimators}
        return {"identity": Lens(self.model), **fitted}

    def batches(
        self,
        *,
        picks: int | None = None,
        tokens: int | None = None,
        positions: Positions | None = None,
        part: str = "test",
        corpus: Corpus | None = None,
        cells: int = 4096,
    ) -> Batches:
        """Batches of a split's documents: about `picks` positions, of about `tokens` tokens (None: all there are).

        A text that has fewer gives all it has: the number that was scored is always stated. A batch has at most
        `cells` tokens and padding together, unless one sequence alone has more.
        """
        text = corpus or self.corpus
        documents = self.documents(part, text)
        positions = positions or self.test_positions()

        def cut(chosen: Positions, of: Sequence[int], wanted: int | None = None) -> Batches:
            return make_batches(
                text,
                self.model.tokenization,
                chosen,
                documents=of,
                seed=self.settings.seed,
                tokens_wanted=wanted,
                budget=cells,
            )

        try:
            found = cut(positions, documents, tokens)
        except TextTooShort:
            found = cut(positions, documents)
        if picks is None or found.n_picks <= picks:
            return found
        # Fewer positions of the same documents tell more than all of a few; but a masked model would mask them.
        if positions.kind == "all" and not self.model.masked:
            share = replace(positions, kind="share", amount=picks / found.n_picks)
            found = cut(share, tuple(dict.fromkeys(found.sequences.document)))
        # A sequence gives one position at least, so many short documents still have too many.
        return cut(found.positions, _first_documents(found, picks))

    def scored(self, corpus: Corpus | None = None) -> Batches:
        """The test positions of a text that are read through the vocabulary."""
        corpus = corpus or self.corpus
        return self.batches(
            picks=self.settings.score, tokens=self._test_tokens(corpus), corpus=corpus
        )

    def few(self) -> Batches:
        """A few of them, for studies that read through many maps."""
        # One position a document is dear in tokens, and needs no other bound than the picks.
        one = self.test_positions().kind == "one"
        tokens = None if one else self.settings.budget
        return self.batches(picks=min(self.settings.score, FEW), tokens=tokens)

    def read(self, lenses: Mapping[str, Lens], scored: Batches) -> LensScores:
        """What lenses read at every level of some positions, with progress."""
        done = 0

        def tick(batch: Batch) -> None:
            nonlocal done
            done += batch.n_tokens
            if self.progress:
                self.progress(done, scored.n_tokens)

        return evaluate_lenses(self.model, lenses, scored, progress=tick)

    def readings(self) -> LensScores:
        """What every lens of the run reads at the test positions, kept for all studies."""
        return self.keep("readings", lambda: self.read(self.lenses(), self.scored()))

    def _test_tokens(self, corpus: Corpus) -> int | None:
        """As large a share of `tokens` as the test split is of the documents: what a fit's test scores use too."""
        if self.settings.tokens is None:
            return None
        parts = self.parts(corpus)
        chosen = parts.select if any(map(selects, self.settings.estimators)) else ()
        documents = len(parts.fit) + len(chosen) + len(parts.test)
        return max(1, self.settings.tokens * len(parts.test) // documents)

    def without_kept(self, **changes: Any) -> Setup:
        """The same run with other choices, and nothing made yet."""
        return replace(self, _kept={}, **changes)


def _first_documents(whole: Batches, picks: int) -> list[int]:
    """As many documents as it takes for so many picks."""
    enough = int(np.searchsorted(np.cumsum(whole.sequences.picks), picks)) + 1
    return list(dict.fromkeys(whole.sequences.document[:enough]))


EVERY = Positions("all", skip_first=0, special=True)


def collect_all_positions(setup: Setup, pairs: str) -> SplitMoments:
    """Sums over every position (all pairs: over a sample of them), kept for all studies of a run."""

    def make() -> SplitMoments:
        return _plan(setup, pairs).run(progress=setup.progress)

    return setup.keep(f"everywhere {pairs}", make)


def fit_all_positions(setup: Setup, estimator: str, pairs: str) -> Jumps:
    """Every map of the pairs, solved once."""
    return setup.keep(
        f"everywhere {estimator} {pairs}",
        lambda: solve_jumps(collect_all_positions(setup, pairs), estimator, model=setup.model),
    )


def _plan(setup: Setup, pairs: str) -> RunPlan:
    # All pairs are for schedules, which are chosen on the select split.
    settings: dict[str, Any] = {"select": True} if pairs == "all" else {}
    if not setup.model.masked:
        positions = _asked(setup) or EVERY
        if pairs == "all" and positions == EVERY:
            every = setup.plan(setup.corpus, pairs, positions=EVERY, **settings)
            positions = sample_positions(
                every.batches["fit"].n_picks, setup.model.d_model, everywhere=True
            )
        return setup.plan(setup.corpus, pairs, positions=positions, **settings)
    masks = _asked(setup) or _parse(MASKED_SHARE)
    made = setup.plan(setup.corpus, pairs, positions=masks, **settings)
    look = EVERY
    if pairs == "all":
        every_fit = made.batches["fit"].look_at(EVERY)
        look = sample_positions(every_fit.n_picks, setup.model.d_model, everywhere=True)
    looking = {name: batches.look_at(look) for name, batches in made.batches.items()}
    about = made.about | {"positions": f"{look}, {masks} of them masked"}
    return replace(made, batches=looking, about=about)


def _asked(setup: Setup) -> Positions | None:
    """The positions the run was told to take, position 0 among them."""
    if setup.settings.paper:
        return PAPER
    return _parse(setup.settings.positions) if setup.settings.positions else None


def _parse(text: str) -> Positions:
    return Positions.parse(text, skip_first=0, special=True)


def maps_of(jumps: Jumps) -> dict[Pair, Affine]:
    """The maps of a set of jumps, in float64 as sums are."""
    return {pair: to_affine(jumps[pair]).to(torch.float64) for pair in jumps}


def r2_on(maps: Mapping[Pair, Affine], sums: Moments) -> list[R2]:
    """R² of each map on the text of some sums, in the order of the maps."""
    return [r2(jump, sums.source(a), sums.target(a, b)) for (a, b), jump in maps.items()]


def mean_r2(scores: Sequence[R2]) -> Row:
    """Both averages of R², each averaged over the levels."""
    return {
        "r2": sum(score.uniform for score in scores) / len(scores),
        "r2 weighted": sum(score.weighted for score in scores) / len(scores),
    }


def hits_below_last(readings: LensScores) -> Tensor:
    """The share of the levels below the last that give the model's token, (lenses, examples)."""
    return readings.hits(1)[:, :-1].double().mean(1)


FAMILIES = ("gpt2", "bert")
FIT_SENTENCES, TEST_SENTENCES = 9_000, 3_000
MAX_LENGTH = {"gpt2": 1024}
OURS = 512


def differences(setup: Setup) -> list[str]:
    """Sentences, one a difference; none for a run that does not follow the paper."""
    settings, model = setup.settings, setup.model
    if not settings.paper:
        return []
    family, said = model.hf.config.model_type, []
    if family not in FAMILIES:
        said.append(f"The model is of the family {family}; the paper's are GPT-2 and BERT.")
    said.append(
        f"The text is {setup.corpus.name}; the paper's are Wikipedia (20220301.en, a paragraph's last sentence) and "
        f"news of the Leipzig collection."
    )
    parts = setup.parts()
    if len(parts.fit) != FIT_SENTENCES:
        said.append(f"{len(parts.fit):,} sentences were for fitting; in the paper 9,000.")
    if len(parts.test) != TEST_SENTENCES:
        said.append(
            f"{len(parts.test):,} sentences were for testing; in the paper 3,000 (1,000 of the news)."
        )
    if settings.tokens is not None:
        said.append(f"Only {settings.tokens:,} tokens were run; the paper sets no such bound.")
    if settings.positions != PAPER_SETTINGS.positions:
        said.append(f"Positions are {settings.positions}; in the paper one a sentence.")
    if settings.estimators != PAPER_SETTINGS.estimators:
        said.append(f"Maps are {', '.join(settings.estimators)}; the paper's is mat.")
    if not model.masked and model.tokenization.around[0]:
        said.append("A special token begins every text; the paper's GPT-2 sees none.")
    longest = MAX_LENGTH.get(family, OURS)
    if longest > OURS:
        said.append(f"Sentences are cut at {OURS} tokens; in the paper at {longest:,}.")
    said.append("Splits and positions are drawn with a seed of ours; the authors set none.")
    return said
