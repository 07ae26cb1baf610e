"""`finetuning`: does fine-tuning on a task make blocks more linear?

Protocol, after Table 1 of "Your Transformer is Secretly Linear": a copy of the model learns to continue each prompt
with the right answer. Runs differ in the seed and in the items held out; there are as many folds as runs, so every item
is tested once. Linearity is measured on the text of the study before and after, at the same positions. The paper does
not say how it fine-tuned and on what text it measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated

import numpy as np
import plotly.graph_objects as go

from layerjump.errors import BadStudy, argument
from layerjump.studies.charts import Panel, line_chart
from layerjump.studies.formatting import number
from layerjump.studies.results import Column, Record, Result, Study
from layerjump.studies.setup import Setup
from layerjump.studies.training_dynamics import ProfileRow
from layerjump.training.finetune_on_task import BATCH_SIZE, LEARNING_RATE, ChoiceItem, accuracy, finetune, load_task
from layerjump.training.linearity_profile import Profile, measure_profile

DEFAULT_STEPS = 150
MAX_SCORED = 200
"""Held-out items to score in a run, at most."""


SCORES = ("with_residual", "without_residual", "with_residual_held_out", "without_residual_held_out")
"""Linearity scores that rows and headline compare."""


class Change(Record):
    """A number before and after fine-tuning."""

    before: Annotated[float, Column(" before")]
    after: Annotated[float, Column(" after")]
    change: Annotated[float, Column(" change")]

    @classmethod
    def of(cls, before: float, after: float) -> Change:
        return cls(before, after, after - before)


class MeanChange(Record):
    """A number before fine-tuning and its mean after it, with the standard deviation over runs."""

    mean: Annotated[Change, Column("{}")]
    deviation: Annotated[float | None, Column(" sd")]
    """None for a single run."""


class RunRow(Record):
    """One fine-tuning run."""

    run: int
    items_learnt: Annotated[int, Column("items learnt")]
    items_scored: Annotated[int, Column("items scored")]
    accuracy_before: Annotated[float, Column("accuracy before")]
    accuracy_after: Annotated[float, Column("accuracy after")]
    perplexity: Annotated[Change, Column("perplexity{}")]
    with_residual: Annotated[Change, Column("with residual{}")]
    without_residual: Annotated[Change, Column("without residual{}")]
    with_residual_held_out: Annotated[Change, Column("with residual held out{}")]
    without_residual_held_out: Annotated[Change, Column("without residual held out{}")]


class BlockRow(Record):
    """One block, over all runs."""

    block: int
    with_residual: Annotated[MeanChange, Column("with residual{}")]
    without_residual: Annotated[MeanChange, Column("without residual{}")]
    with_residual_held_out: Annotated[MeanChange, Column("with residual held out{}")]
    without_residual_held_out: Annotated[MeanChange, Column("without residual held out{}")]


class Tables(Record):
    """Rows by run and by block."""

    runs: list[RunRow]
    blocks: list[BlockRow]


class RunMean(Record):
    """A mean over runs with its standard deviation, which a single run does not have."""

    mean: Annotated[float, Column("")]
    deviation: Annotated[float | None, Column("_sd", optional=True)] = None

    @classmethod
    def of(cls, values: Sequence[float]) -> RunMean:
        return cls(mean(values), stdev(values) if len(values) > 1 else None)


class Headline(Record):
    """Means over runs."""

    with_residual: Annotated[RunMean, Column("with_residual_change{}")]
    without_residual: Annotated[RunMean, Column("without_residual_change{}")]
    with_residual_held_out: Annotated[RunMean, Column("with_residual_held_out_change{}")]
    without_residual_held_out: Annotated[RunMean, Column("without_residual_held_out_change{}")]
    accuracy_before: Annotated[RunMean, Column("accuracy_before{}")]
    accuracy_after: Annotated[RunMean, Column("accuracy_after{}")]


def cannot_run(setup: Setup) -> str | None:
    """Return why this model cannot be fine-tuned, or None."""
    if setup.model.task != "causal":
        return "it continues prompts with answers, and this model is not causal"
    if not setup.model.no_predictions and not setup.settings.finetune_data:
        return f"it needs a task to learn; pass {argument('finetune_data')}"
    return setup.model.no_predictions


def run(setup: Setup) -> Result[Tables, Headline]:
    """Fine-tune once a run; measure before and after."""
    settings, model = setup.settings, setup.model
    n_runs, steps = settings.training_runs, settings.training_steps or DEFAULT_STEPS
    items = load_task(str(settings.finetune_data))
    if len(items) < max(2, n_runs):
        raise BadStudy(
            f"expected at least {max(2, n_runs)} items for {n_runs} runs, got {len(items)} in "
            f"{settings.finetune_data}; add items or lower {argument('training_runs')}"
        )
    before = measure_profile(model, setup.corpus, seed=settings.seed)
    after: list[Profile] = []
    tables = Tables([], [])
    for index, (learnt, held_out) in enumerate(folds(items, n_runs, settings.seed)):
        tuned = finetune(model, learnt, steps=steps, seed=settings.seed + index)
        after.append(measure_profile(tuned, setup.corpus, seed=settings.seed))
        scored, old, new = held_out[:MAX_SCORED], ProfileRow.of(before), ProfileRow.of(after[-1])
        tables.runs.append(
            RunRow(
                index + 1,
                items_learnt=len(learnt),
                items_scored=len(scored),
                accuracy_before=accuracy(model, scored),
                accuracy_after=accuracy(tuned, scored),
                perplexity=Change.of(old.perplexity, new.perplexity),
                **{name: Change.of(getattr(old.linearity, name), getattr(new.linearity, name)) for name in SCORES},
            )
        )
    for index, block in enumerate(before.blocks):
        changes = {}
        for name in SCORES:
            values = RunMean.of([getattr(profile.blocks[index], name) for profile in after])
            changes[name] = MeanChange(Change.of(getattr(block, name), values.mean), values.deviation)
        tables.blocks.append(BlockRow(block.block, **changes))
    headline = Headline(
        **{name: RunMean.of([getattr(row, name).change for row in tables.runs]) for name in SCORES},
        accuracy_before=RunMean.of([row.accuracy_before for row in tables.runs]),
        accuracy_after=RunMean.of([row.accuracy_after for row in tables.runs]),
    )
    facts = {
        "task": Path(str(settings.finetune_data)).name,
        "items": len(items),
        "steps": steps,
        "batch": BATCH_SIZE,
        "learning_rate": LEARNING_RATE,
        "runs": n_runs,
    }
    notes = [
        "± is the standard deviation over runs, which differ in the seed and in the items held out. Perplexity and "
        "linearity are measured on the text of the study (not of the task), at all positions but the first; accuracy "
        "counts the answer with the highest likelihood per token, on items not learnt."
    ]
    return Result("finetuning", tables, headline, notes, facts)


def folds(items: Sequence[ChoiceItem], n_runs: int, seed: int) -> list[tuple[list[ChoiceItem], list[ChoiceItem]]]:
    """Return (items to learn, items held out) for each run: n-fold cross-validation; one run holds out a fifth."""
    bits = np.random.PCG64(seed).random_raw(len(items))
    order = np.argsort(bits, kind="stable").tolist()
    n_folds = n_runs if n_runs > 1 else 5
    parts = [order[start::n_folds] for start in range(n_folds)]
    return [
        ([items[i] for other in range(n_folds) if other != fold for i in parts[other]], [items[i] for i in parts[fold]])
        for fold in range(n_runs)
    ]


def figures(result: Result[Tables, Headline]) -> list[Panel]:
    """Return held-out linearity of each block before and after, with and without the residual stream."""
    rows, runs, head = result.tables.blocks, result.tables.runs, result.headline

    def chart(title: str, score: Callable[[BlockRow], MeanChange]) -> go.Figure:
        lines = {
            "before": [(row.block, score(row).mean.before) for row in rows],
            "after, mean over runs": [(row.block, score(row).mean.after) for row in rows],
        }
        return line_chart(title, lines, x="block", y="R², weighted by variance", whole_x=True, dashed=("before",))

    charts = [
        chart("with residual, held out", lambda row: row.with_residual_held_out),
        chart("without residual, held out", lambda row: row.without_residual_held_out),
    ]
    change, spread = head.without_residual, " in one run"
    if change.deviation is not None:
        spread = f" ± {number(change.deviation)} over {len(runs)} runs"
    reading = (
        f"Fine-tuning on {result.settings.get('task', 'the task')} changes linearity without the residual stream by "
        f"{number(change.mean)}{spread} (mean over blocks, in sample, as in the paper); accuracy on items not learnt "
        f"goes from {number(head.accuracy_before.mean)} to {number(head.accuracy_after.mean)}."
    )
    return [Panel("Before and after fine-tuning", reading, ("blocks", "runs"), charts)]


STUDY = Study("finetuning", "does fine-tuning on a task make blocks more linear?", run, figures, cannot_run=cannot_run)
