"""What the studies of one run share: model, text, settings, and the fits and scores that are computed once.

Two kinds of maps are fitted. Jumps between levels are for prediction: they are fitted where predictions are made
(`Setup.jumps`). Maps that replace part of a running model are applied at every position, so position 0 and special
tokens are fitted on too (`Setup.all_position_jumps`). A masked model then sees its usual share of [MASK] tokens, but is
fitted on all positions of that text: its maps must carry the context as well.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from layerjump.data.batches import Batch, Batches, make_batches
from layerjump.data.corpus import Corpus, Splits, split_indices
from layerjump.data.positions import ALL_POSITIONS, MASKED_SHARE, PAPER, Positions
from layerjump.errors import BadEstimator, BadStudy, BadText, TextTooShort, argument
from layerjump.evaluation.tasks import load_items, require_lm_eval, select_tasks
from layerjump.jumps.collect_moments import RunPlan, plan_run, sample_positions
from layerjump.jumps.estimators.registry import find_estimator
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import Affine, to_affine
from layerjump.jumps.moments import Moments
from layerjump.jumps.moments_of_splits import SplitMoments
from layerjump.jumps.score_from_moments import R2, r2
from layerjump.lens.evaluate import LensScores, evaluate_lenses
from layerjump.lens.lens import Lens
from layerjump.models.model import Model
from layerjump.models.sites import PREDICTIONS, Pair
from layerjump.studies.results import Column, Outcome, Result, Study

Progress = Callable[[int, int], None]
"""Called with the tokens done and the tokens to do."""
FEW_POSITIONS = 200
"""Test positions for studies that evaluate many maps."""

Tables = TypeVar("Tables")
Headline = TypeVar("Headline")
Computed = TypeVar("Computed")


@dataclass(frozen=True)
class StudySettings:
    """The choices of a run; the same choices give the same numbers. Results files keep some under shorter keys."""

    tokens: int | None = None
    """Tokens of the text to run (None: all)."""
    positions: str | None = None
    """Positions to fit on (None: all for a causal model, 15 % for a masked one, a sample for all pairs)."""
    split: str = "80/10/10"
    seed: int = 0
    estimators: tuple[str, ...] = ("mat",)
    """The maps to compare; studies of one map use the first. `calibrated+final@-1` also reads an earlier state."""
    n_test_positions: Annotated[int, Column("score")] = 500
    """Test positions at which every lens predicts at every level."""
    rerun_tokens: Annotated[int, Column("budget")] = 2_000
    """Test tokens of the costly studies (`submodules`, `attention_heads`, `layer_skipping`)."""
    targets: tuple[float, ...] = (0.95,)
    """`early_exit`: agreements with the model at which the blocks saved are stated."""
    exit_position: int | None = None
    """`early_exit`: the position t of every example (the authors' BERT code has 3); None: its own position."""
    eval_tasks: Annotated[tuple[str, ...], Column("tasks")] = ()
    """`pruning`: benchmark tasks that every model is also scored on."""
    eval_data: Annotated[str | None, Column("task_data")] = None
    """`pruning`: the folder with the files of the tasks."""
    eval_limit: Annotated[int | None, Column("task_limit")] = None
    """`pruning`: items of each task (None: all)."""
    checkpoints: tuple[str, ...] = ()
    """`training_dynamics`: folders (or folders of `checkpoint-*`), or hub revisions of the model."""
    finetune_data: Annotated[str | None, Column("task")] = None
    """`finetuning`: the file of items to learn."""
    training_steps: Annotated[int | None, Column("steps")] = None
    """`finetuning`, `architecture`: optimiser steps of each training run."""
    training_runs: Annotated[int, Column("runs")] = 3
    """`finetuning`, `architecture`: training runs with different seeds."""
    paper: bool = False
    """Follow the protocol of the paper: one position a sentence, position 0 allowed, no bias, no regularisation."""


PAPER_SETTINGS = StudySettings(positions="one", split="9000/0/1000", paper=True, n_test_positions=10**9)
"""9,000 sentences to fit on and 1,000 to test on, one position each."""


def make_settings(
    protocol: str = "ours",
    *,
    tokens: int | None = None,
    positions: str | None = None,
    split: str | None = None,
    seed: int | None = None,
    estimators: tuple[str, ...] | None = None,
    n_test_positions: int | None = None,
    rerun_tokens: int | None = None,
    targets: tuple[float, ...] | None = None,
    exit_position: int | None = None,
    eval_tasks: tuple[str, ...] | None = None,
    eval_data: str | None = None,
    eval_limit: int | None = None,
    checkpoints: tuple[str, ...] | None = None,
    finetune_data: str | None = None,
    training_steps: int | None = None,
    training_runs: int | None = None,
) -> StudySettings:
    """Return the checked settings of a protocol, `ours` or `paper`; None keeps the value of the protocol."""
    keywords = {name: value for name, value in locals().items() if name != "protocol"}
    if protocol not in ("ours", "paper"):
        raise BadStudy(f"expected {argument('protocol', 'ours')} or {argument('protocol', 'paper')}, got {protocol!r}")
    base = PAPER_SETTINGS if protocol == "paper" else StudySettings()
    changes = {name: value for name, value in keywords.items() if value is not None}
    settings = replace(base, **changes)

    # Raise before a long run what would stop it in the middle.
    entries = [find_estimator(name.partition("+")[0], closed_form=True) for name in settings.estimators]
    if entries and entries[0].targets == "predictions":
        raise BadEstimator(
            f"calibrated maps lead to predictions only, but every study uses the first of "
            f"{argument('estimators')}; put another first, such as mat,calibrated"
        )
    if settings.estimators and "+" in settings.estimators[0]:
        raise BadEstimator(
            f"{settings.estimators[0]} reads earlier positions, but every study uses the first of "
            f"{argument('estimators')}; put another first, such as mat,{settings.estimators[0]}"
        )
    numbers = ("tokens", "n_test_positions", "rerun_tokens", "exit_position", "training_steps", "training_runs")
    for name in numbers:
        value, least = getattr(settings, name), 0 if name == "exit_position" else 1
        if value is not None and value < least:
            raise BadStudy(f"expected {argument(name)} of at least {least}, got {value}")
    if not all(0 < target <= 1 for target in settings.targets):
        raise BadStudy(f"expected {argument('targets')} above 0 and at most 1, got {settings.targets}")
    if settings.eval_tasks:
        if settings.eval_data is None:
            raise BadStudy(
                f"{argument('eval_tasks')} needs the folder with the files of the tasks; pass {argument('eval_data')}"
            )
        for task in select_tasks(settings.eval_tasks):
            load_items(task, settings.eval_data, settings.eval_limit)
        require_lm_eval()
    return settings


@dataclass
class Setup:
    """A run of studies: model, text and settings, and what was computed from them so far."""

    model: Model
    corpus: Corpus
    settings: StudySettings = field(default_factory=StudySettings)
    others: Sequence[Corpus] = ()
    """Further texts, for `text_transfer`."""
    level_pairs: str = "to-last"
    """The widest set of level pairs that any study of the run needs: one pass serves them all."""
    progress: Progress | None = None
    _cache: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    """What the studies of the run have computed so far."""

    def with_empty_cache(
        self,
        *,
        model: Model | None = None,
        corpus: Corpus | None = None,
        settings: StudySettings | None = None,
        others: Sequence[Corpus] | None = None,
    ) -> Setup:
        """Return the same run with other choices and nothing computed yet."""
        changes: dict[str, Any] = {"model": model, "corpus": corpus, "settings": settings, "others": others}
        return replace(self, _cache={}, **{name: value for name, value in changes.items() if value is not None})

    def _once(self, key: Hashable, compute: Callable[[], Computed]) -> Computed:
        """Return what an earlier call with this key computed, or compute it now."""
        if key not in self._cache:
            self._cache[key] = compute()
        return self._cache[key]

    # Documents and positions

    def splits(self, corpus: Corpus | None = None) -> Splits:
        """Return the documents of a text for fitting, validation and testing."""
        documents = (corpus or self.corpus).documents
        return split_indices(len(documents), self.settings.split, seed=self.settings.seed)

    def documents(self, part: str, corpus: Corpus | None = None) -> tuple[int, ...]:
        """Return the documents of `fit`, `validation` or `test`; raise `BadText` where there are none."""
        corpus = corpus or self.corpus
        documents: tuple[int, ...] = getattr(self.splits(corpus), part)
        if not documents:
            raise BadText(
                f"the split {self.settings.split} of {corpus.name} leaves no {part} documents; pass "
                f"{argument('split', '80/10/10')}"
            )
        return documents

    def fit_positions(self) -> Positions | str | None:
        """Return the positions to fit on, as `plan_run` takes them."""
        if self.settings.paper:
            return self.test_positions()
        return self.settings.positions or (MASKED_SHARE if self.model.masked else None)

    def test_positions(self) -> Positions:
        """Return where predictions are scored: the fitted positions of a masked model, else `one` or `all`."""
        positions = self.settings.positions
        if self.model.pooled is not None:
            return self.model.prediction_positions
        if self.settings.paper:
            # One position a sentence by default, the first and special ones included.
            return Positions.parse(positions or "one", skip_first=0, special=True)
        if self.model.masked:
            # With all positions picked none is masked, and a token that the model sees is not predicted.
            return Positions.parse(MASKED_SHARE if positions in (None, "all") else str(positions))
        return Positions.parse("one" if positions == "one" else "all")

    def batches(
        self,
        *,
        picks: int | None = None,
        tokens: int | None = None,
        positions: Positions | None = None,
        part: str = "test",
        corpus: Corpus | None = None,
        max_batch_tokens: int = 4096,
    ) -> Batches:
        """Return batches of one part's documents, with about `picks` positions of about `tokens` tokens (None: all).

        A shorter text gives all it has; every study states how much it scored. A batch has at most
        `max_batch_tokens` tokens, including padding, unless one sequence alone has more.
        """
        text = corpus or self.corpus
        documents = self.documents(part, text)
        positions = positions or self.test_positions()

        def cut(which: Positions, of: Sequence[int], limit: int | None = None) -> Batches:
            return make_batches(
                text,
                self.model.tokenization,
                which,
                documents=of,
                seed=self.settings.seed,
                tokens=limit,
                max_batch_tokens=max_batch_tokens,
            )

        try:
            batches = cut(positions, documents, tokens)
        except TextTooShort:
            batches = cut(positions, documents)
        if picks is None or batches.n_picks <= picks:
            return batches
        # Few positions of many documents tell more than all positions of few; but a masked model would mask them.
        if positions.kind == "all" and not self.model.masked:
            share = replace(positions, kind="share", amount=picks / batches.n_picks)
            batches = cut(share, tuple(dict.fromkeys(batches.sequences.document)))
        # Every sequence gives at least one position, so many short documents still give too many.
        enough = int(np.searchsorted(np.cumsum(batches.sequences.picks), picks)) + 1
        return cut(batches.positions, list(dict.fromkeys(batches.sequences.document[:enough])))

    def test_batches(self, corpus: Corpus | None = None) -> Batches:
        """Return the test positions of a text at which lenses are scored."""
        corpus = corpus or self.corpus
        tokens = self.settings.tokens
        if tokens is not None:
            # The test split's share of them, which a fit's test scores use too.
            splits = self.splits(corpus)
            validation = splits.validation if self._needs_validation() else ()
            n_documents = len(splits.fit) + len(validation) + len(splits.test)
            tokens = max(1, tokens * len(splits.test) // n_documents)
        return self.batches(picks=self.settings.n_test_positions, tokens=tokens, corpus=corpus)

    def few_test_batches(self) -> Batches:
        """Return fewer test positions, for studies that evaluate many maps."""
        # One position a document takes many tokens; the number of positions bounds it well enough.
        one = self.test_positions().one_per_document
        tokens = None if one else self.settings.rerun_tokens
        return self.batches(picks=min(self.settings.n_test_positions, FEW_POSITIONS), tokens=tokens)

    def _needs_validation(self) -> bool:
        """Return whether any estimator of the run is tuned on the validation split."""
        return any(find_estimator(name.partition("+")[0]).needs_validation() for name in self.settings.estimators)

    # Jumps between levels

    def plan(
        self, corpus: Corpus, pairs: str, *, positions: Positions | None = None, use_validation: bool | None = None
    ) -> RunPlan:
        """Plan a pass over a text with the settings of this run."""
        return plan_run(
            self.model,
            corpus,
            pairs=pairs,
            positions=positions or self.fit_positions(),
            tokens=self.settings.tokens,
            split=self.settings.split,
            seed=self.settings.seed,
            use_validation=self._needs_validation() if use_validation is None else use_validation,
            features="both" if pairs.startswith(PREDICTIONS) else "raw",
        )

    def collect_moments(self, corpus: Corpus, pairs: str, *, use_validation: bool | None = None) -> SplitMoments:
        """Collect the second moments of these pairs in one pass over a text."""
        return self.plan(corpus, pairs, use_validation=use_validation).run(progress=self.progress)

    def moments(self, pairs: str | None = None, *, use_validation: bool = False) -> SplitMoments:
        """Return the second moments of the run's text (default: of the run's level pairs), collected once.

        `use_validation` adds those of the validation split even where no estimator of the run needs them.
        """
        pairs, use_validation = pairs or self.level_pairs, use_validation or self._needs_validation()
        return self._once(
            ("moments", pairs, use_validation),
            lambda: self.level_plan(pairs, use_validation=use_validation).run(progress=self.progress),
        )

    def level_plan(self, pairs: str, *, use_validation: bool) -> RunPlan:
        """Return the plan of the pass of `moments`, made once."""
        return self._once(
            ("plan", pairs, use_validation), lambda: self.plan(self.corpus, pairs, use_validation=use_validation)
        )

    def jumps(self, estimator: str, pairs: str | None = None) -> Jumps:
        """Return every jump of the pairs, fitted once; calibrated ones lead to predictions only.

        Terms after the estimator join every source: `calibrated+final@-1` is a lens with memory.
        """
        name, plus, terms = estimator.partition("+")
        pairs = PREDICTIONS if find_estimator(name).targets == "predictions" else pairs or self.level_pairs
        pairs += plus + terms
        return self._once(("jumps", name, pairs), lambda: solve_jumps(self.moments(pairs), name, model=self.model))

    def lenses(self) -> dict[str, Lens]:
        """Return the identity and every estimator of the run as lenses, by name."""
        fitted = {name: Lens(self.model, self.jumps(name)) for name in self.settings.estimators}
        return {"identity": Lens(self.model), **fitted}

    def score_lenses(self, lenses: Mapping[str, Lens], batches: Batches) -> LensScores:
        """Score lenses at every level of some positions, with progress."""
        done = 0

        def report(batch: Batch) -> None:
            nonlocal done
            done += batch.n_tokens
            if self.progress:
                self.progress(done, batches.n_tokens)

        return evaluate_lenses(self.model, lenses, batches, progress=report)

    def lens_scores(self) -> LensScores:
        """Return the scores of every lens of the run at the test positions, computed once."""
        return self._once("lens scores", lambda: self.score_lenses(self.lenses(), self.test_batches()))

    # Maps that are applied at every position

    def all_position_moments(self, pairs: str) -> SplitMoments:
        """Return the second moments over every position (for all pairs: a sample of them), collected once."""
        key = "all-position moments", pairs
        return self._once(key, lambda: self._all_position_plan(pairs).run(progress=self.progress))

    def _all_position_plan(self, pairs: str) -> RunPlan:
        return self._once(("all-position plan", pairs), lambda: self.all_position_plan(pairs))

    def all_position_jumps(self, estimator: str, pairs: str) -> Jumps:
        """Return every map of the pairs, fitted on every position, once."""
        return self._once(
            ("all-position jumps", estimator, pairs),
            lambda: solve_jumps(self.all_position_moments(pairs), estimator, model=self.model),
        )

    def all_position_plan(self, pairs: str) -> RunPlan:
        """Plan the pass of `all_position_moments`."""
        # All pairs are for layer-skipping schedules, which are chosen on the validation split.
        use_validation = True if pairs == "all" else None
        masks = Positions.parse(MASKED_SHARE, skip_first=0, special=True)
        positions = masks if self.model.masked else ALL_POSITIONS
        if self.settings.paper:
            positions = PAPER
        elif self.settings.positions:
            positions = Positions.parse(self.settings.positions, skip_first=0, special=True)
        plan = self.plan(self.corpus, pairs, positions=positions, use_validation=use_validation)
        if not self.model.masked:
            if pairs == "all" and positions == ALL_POSITIONS:
                sample = self._sample(plan.batches["fit"])
                plan = self.plan(self.corpus, pairs, positions=sample, use_validation=use_validation)
            return plan
        fitted = ALL_POSITIONS
        if pairs == "all":
            fitted = self._sample(plan.batches["fit"].with_picks_at(ALL_POSITIONS))
        batches = {name: part.with_picks_at(fitted) for name, part in plan.batches.items()}
        info = replace(plan.info, positions=f"{fitted}, {positions} of them masked")
        return replace(plan, batches=batches, info=info)

    def _sample(self, batches: Batches) -> Positions:
        return sample_positions(batches.n_picks, self.model.d_model, everywhere=True)

    # Memory

    def estimate_bytes(self, all_position_pairs: Sequence[str]) -> int:
        """Return the memory that the sums and maps of a run take, which it holds to its end."""
        estimators = self.settings.estimators
        own = {PREDICTIONS for name in estimators if find_estimator(name).targets == "predictions"}
        plans = [
            self.level_plan(pairs, use_validation=self._needs_validation())
            for pairs in (self.level_pairs, *sorted(own))
        ]
        plans += [self._all_position_plan(pairs) for pairs in all_position_pairs]
        costs = [plan.cost for plan in plans]
        held = sum(cost.sums_bytes + len(estimators) * cost.jumps_bytes for cost in costs)
        return held + max(max(cost.batch_bytes, cost.solve_bytes) for cost in costs)

    # Results that later studies build on

    def add_outcome(self, outcome: Outcome) -> None:
        """Remember the outcome of a study."""
        self._cache["outcome", outcome.study] = outcome

    def result_of(self, study: Study[Tables, Headline]) -> Result[Tables, Headline] | None:
        """Return the result of a study that ran before in this run, or None."""
        outcome = self._cache.get(("outcome", study.name))
        return outcome if isinstance(outcome, Result) else None


def maps_of(jumps: Jumps) -> dict[Pair, Affine]:
    """Return the maps of a set of jumps in float64, the precision of second moments."""
    return {pair: to_affine(jumps[pair]).to(torch.float64) for pair in jumps}


def r2_of_maps(maps: Mapping[Pair, Affine], moments: Moments) -> list[R2]:
    """Return R² of each map on the text of some second moments, in the order of the maps."""
    return [r2(jump, moments.source(a), moments.target(a, b)) for (a, b), jump in maps.items()]


def mean_r2(scores: Sequence[R2]) -> R2:
    """Return the mean over levels of both kinds of R²."""
    n = len(scores)
    return R2(sum(s.uniform for s in scores) / n, sum(s.weighted for s in scores) / n)


def hits_below_last(scores: LensScores) -> Tensor:
    """Return the share of the levels below the last whose best token is the model's, (lenses, examples)."""
    return scores.hits(1)[:, :-1].double().mean(1)


PAPER_FAMILIES = ("gpt2", "bert")
PAPER_FIT_SENTENCES, PAPER_TEST_SENTENCES = 9_000, 3_000
PAPER_MAX_LENGTH = {"gpt2": 1024}
MAX_LENGTH = 512


def paper_deviations(setup: Setup) -> list[str]:
    """Return what a run with the paper's protocol does otherwise than its authors did, one sentence each."""
    settings, model = setup.settings, setup.model
    if not settings.paper:
        return []
    family, sentences = model.model_type, []
    if family not in PAPER_FAMILIES:
        sentences.append(f"The model is of the family {family}; the paper's are GPT-2 and BERT.")
    sentences.append(
        f"The text is {setup.corpus.name}; the paper's are Wikipedia (20220301.en, the last sentence of a paragraph) "
        f"and news of the Leipzig collection."
    )
    splits = setup.splits()
    if len(splits.fit) != PAPER_FIT_SENTENCES:
        sentences.append(f"Maps are fitted on {len(splits.fit):,} sentences; in the paper on 9,000.")
    if len(splits.test) != PAPER_TEST_SENTENCES:
        sentences.append(
            f"Maps are tested on {len(splits.test):,} sentences; in the paper on 3,000 (1,000 of the news)."
        )
    if settings.tokens is not None:
        sentences.append(f"Only {settings.tokens:,} tokens were run; the paper sets no limit.")
    if settings.positions != PAPER_SETTINGS.positions:
        sentences.append(f"Positions are {settings.positions}; in the paper one a sentence.")
    if settings.estimators != PAPER_SETTINGS.estimators:
        sentences.append(f"The maps are {', '.join(settings.estimators)}; the paper's is mat.")
    if not model.masked and model.tokenization.around[0]:
        sentences.append("A special token begins every text; the paper's GPT-2 sees none.")
    longest = PAPER_MAX_LENGTH.get(family, MAX_LENGTH)
    if longest > MAX_LENGTH:
        sentences.append(f"Sentences are cut at {MAX_LENGTH} tokens; in the paper at {longest:,}.")
    sentences.append("Splits and positions are drawn with our seed; the authors set none.")
    return sentences
