"""`finetune`: linearity before and after fine-tuning on a task, as in Table 1 of "Your Transformer is Secretly Linear".

A copy of the model learns to write the right answer behind each prompt. Runs differ in their seed and in the items held
out: as many folds as runs, so that every item is tested once. Linearity is measured on the run's text before and after,
at the same positions. How the paper fine-tuned, and on what text it measured, is not known.

Figures of `finetune`: linearity of each block before and after.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import plotly.graph_objects as go

from layerjump.errors import BadStudy, argument
from layerjump.studies._untyped import (
    BLUE,
    GREY,
    Panel,
    Result,
    Row,
    Study,
    add_line,
    empty_figure,
    level_axis,
    number,
)
from layerjump.studies._untyped import (
    mean as mean_of,
)
from layerjump.studies.setup import Setup
from layerjump.training.finetune import (
    BATCH_SIZE,
    LEARNING_RATE,
    ChoiceItem,
    accuracy,
    finetune,
    load_task,
)
from layerjump.training.monitor import Profile, measure_profile

STEPS = 150
SCORED = 200
"""Held-out items of a run that are scored, at most."""
_MEASURED = (
    "with residual",
    "without residual",
    "with residual held out",
    "without residual held out",
)


def unable(setup: Setup) -> str | None:
    """Why this model cannot be fine-tuned here, if it cannot."""
    if setup.model.task != "causal":
        return "it writes answers behind prompts, and this model is not causal"
    if setup.model.no_predictions:
        return setup.model.no_predictions
    return (
        None
        if setup.settings.finetune_task
        else f"it needs a task to learn; give {argument('finetune_task')}"
    )


def run(setup: Setup) -> Result:
    """Fine-tune once a run; measure before and after."""
    settings, model = setup.settings, setup.model
    items = load_task(str(settings.finetune_task))
    if len(items) < max(2, settings.finetune_runs):
        raise BadStudy(
            f"the task {settings.finetune_task} has {len(items)} items, too few for {settings.finetune_runs} runs; "
            f"give more, or fewer {argument('finetune_runs')}"
        )
    steps = settings.train_steps or STEPS
    before = measure_profile(model, setup.corpus, seed=settings.seed)
    result = Result("finetune", {"runs": [], "blocks": []})
    after: list[Profile] = []
    for turn, (learnt, held) in enumerate(folds(items, settings.finetune_runs, settings.seed)):
        tuned = finetune(model, learnt, steps=steps, seed=settings.seed + turn)
        after.append(measure_profile(tuned, setup.corpus, seed=settings.seed))
        scored = held[:SCORED]
        row: Row = {"run": turn + 1, "items learnt": len(learnt), "items scored": len(scored)}
        row |= {
            "accuracy before": accuracy(model, scored),
            "accuracy after": accuracy(tuned, scored),
        }
        row |= _change("perplexity", before.perplexity, after[-1].perplexity)
        for name in _MEASURED:
            row |= _change(name, before.mean(name), after[-1].mean(name))
        result.tables["runs"].append(row)
    result.tables["blocks"] = [_block(place, before, after) for place in range(model.n_blocks)]
    result.settings = {
        "task": Path(str(settings.finetune_task)).name,
        "items": len(items),
        "steps": steps,
        "batch": BATCH_SIZE,
        "learning_rate": LEARNING_RATE,
        "runs": settings.finetune_runs,
    }
    result.headline = _headline(result.tables["runs"])
    result.notes.append(
        "± is the standard deviation over runs, which differ in seed and in the items held out. Perplexity and "
        "linearity are of the run's text (not the task's), all positions but the first; accuracy is of the answer with "
        "the highest likelihood a token, on items not learnt."
    )
    return result


def folds(
    items: list[ChoiceItem], count: int, seed: int
) -> list[tuple[list[ChoiceItem], list[ChoiceItem]]]:
    """Cross-validation: (items to learn, items held out), as many as runs; a single run holds a fifth out."""
    bits = np.random.PCG64(seed).random_raw(len(items))
    order = np.argsort(bits, kind="stable").tolist()
    parts = count if count > 1 else 5
    dealt = [order[start::parts] for start in range(parts)]
    return [
        (
            [items[i] for other in range(parts) if other != part for i in dealt[other]],
            [items[i] for i in dealt[part]],
        )
        for part in range(count)
    ]


def _change(name: str, before: float, after: float) -> Row:
    return {f"{name} before": before, f"{name} after": after, f"{name} change": after - before}


def _block(place: int, before: Profile, after: list[Profile]) -> Row:
    row: Row = {"block": place + 1}
    for name in _MEASURED:
        then = [one.block_rows()[place][name] for one in after]
        row |= _change(name, before.block_rows()[place][name], mean(then))
        row[f"{name} sd"] = stdev(then) if len(then) > 1 else None
    return row


def _headline(rows: list[Row]) -> Row:
    found: Row = {}
    for name in (*(f"{name} change" for name in _MEASURED), "accuracy before", "accuracy after"):
        values = [row[name] for row in rows]
        found[name.replace(" ", "_")] = mean(values)
        if len(values) > 1:
            found[f"{name.replace(' ', '_')}_sd"] = stdev(values)
    return found


def blocks(study: Study) -> list[Panel]:
    """With and without the residual stream, on unseen text; after is the mean over runs."""
    rows, runs = (study["tables"].get(name) for name in ("blocks", "runs"))
    if not rows or not runs:
        return []
    figures = [_scores(rows, stream) for stream in ("with residual", "without residual")]
    change = [row["without residual change"] for row in runs]
    spread = study["headline"].get("without_residual_change_sd")
    beside = f" ± {number(spread)} over {len(runs)} runs" if spread is not None else " in one run"
    reading = (
        f"Fine-tuning on {study['settings']['task']} changes linearity without the residual stream by "
        f"{number(mean_of(change))}{beside} (mean over blocks, in sample, as in the paper); accuracy on items not "
        f"learnt goes from {number(mean_of(row['accuracy before'] for row in runs))} to "
        f"{number(mean_of(row['accuracy after'] for row in runs))}."
    )
    return [Panel("Before and after fine-tuning", reading, ("blocks", "runs"), figures)]


def _scores(rows: Sequence[Row], stream: str) -> go.Figure:
    figure = empty_figure(f"{stream}, held out", x="block", y="R², weighted by variance")
    column = f"{stream} held out"
    add_line(figure, rows, "block", f"{column} before", name="before", colour=GREY, dash="dash")
    add_line(figure, rows, "block", f"{column} after", name="after", colour=BLUE)
    return level_axis(figure, rows, "block")
