"""`pruning`: what is lost when blocks are dropped?

Protocol: blocks are selected once, greedily by the loss on validation documents with a linear map in place of each
dropped run of blocks. Every replacement method is fitted on the same cuts and measured on test documents, next to the
whole model on the same tokens. Time is that of a forward pass over one batch, whole and pruned model alternating. A row
is on the Pareto front if no other is at least as good in parameters, time and loss and better in one of them. With
`eval_tasks`, every model is also scored on these tasks through lm-eval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from functools import partial
from typing import Annotated

import torch

from layerjump.errors import TextTooShort
from layerjump.evaluation.tasks import evaluate
from layerjump.metrics.timing import ratio, time_alternately
from layerjump.metrics.token_loss import token_losses
from layerjump.models.model import Model
from layerjump.pruning.drop_blocks import cannot_drop, count_parameters
from layerjump.pruning.output_weights import cannot_fold
from layerjump.pruning.prune import CalibrationData, Pruned, drop_and_replace, prepare_calibration
from layerjump.pruning.rotate_stream import cannot_rotate
from layerjump.pruning.select import BlockSelector, contiguous_spans, required_blocks
from layerjump.studies.charts import Panel, colours, empty_figure, line_chart
from layerjump.studies.formatting import mean, number, safe, unique
from layerjump.studies.layer_skipping import with_validation_documents
from layerjump.studies.results import Column, Interval, Record, Result, Study
from layerjump.studies.setup import Setup

MAX_TOKENS = 16_000
"""Tokens to run, at most."""
SHARES = (0.1, 0.2, 0.3)
"""Shares of the blocks to drop, next to one block alone."""
TIME_REPEATS = 3
WHOLE = "whole model"


class PrunedRow(Record):
    """The whole model, or one method with some blocks dropped."""

    method: str
    n_dropped: Annotated[int, Column("dropped")]
    dropped: Annotated[str, Column("blocks dropped")]
    loss: float
    """In nats per token."""
    perplexity: float
    ratio: Annotated[Interval, Column("ratio{}")]
    """Perplexity relative to the whole model."""
    parameters: int
    time: float
    """Time of a forward pass relative to the whole model."""
    is_on_front: Annotated[bool, Column("front")] = False

    def beats(self, other: PrunedRow) -> bool:
        """Whether it is at least as good as another row in parameters, time and loss, and better in one."""
        ours, theirs = ((row.parameters, row.time, row.loss) for row in (self, other))
        return ours != theirs and all(a <= b for a, b in zip(ours, theirs, strict=True))


class TaskRow(Record):
    """One metric of one task for one model."""

    method: str
    n_dropped: Annotated[int, Column("dropped")]
    task: str
    metric: str
    score: Annotated[Interval, Column("score{}")]
    items: int


class Tables(Record):
    """Rows by model, and by model and task where tasks were given."""

    pruned: list[PrunedRow]
    tasks: Annotated[list[TaskRow] | None, Column(optional=True)] = None


class Headline(Record):
    """Perplexity of each method relative to the whole model, with the most blocks dropped."""

    dropped: Annotated[int | None, Column(optional=True)] = None
    best_method: Annotated[str | None, Column(optional=True)] = None
    ratio: Annotated[dict[str, float], Column("ratio_{}")] = field(default_factory=dict)


def cannot_run(setup: Setup) -> str | None:
    """Return why this model cannot be pruned, or None."""
    return setup.model.no_predictions or cannot_drop(setup.model)


def run(setup: Setup) -> Result[Tables, Headline]:
    """Drop blocks with every method, and measure each model."""
    setup, note = with_validation_documents(setup)
    model, settings = setup.model, setup.settings
    prepare = partial(prepare_calibration, model, setup.corpus, split=settings.split, seed=settings.seed)
    try:
        calibration = prepare(tokens=min(MAX_TOKENS, settings.tokens or MAX_TOKENS))
    except TextTooShort:
        calibration = prepare(tokens=settings.tokens)
    required = required_blocks(model, calibration.fit)
    selector = BlockSelector(model, calibration.fit, calibration.validation, required)
    counts = drop_counts(len(selector.candidates), model.n_blocks)
    order = selector.order_by_loss(max(counts)) if counts else []
    before = token_losses(model, calibration.test)
    whole = PrunedRow(
        WHOLE, 0, "", before.mean, before.perplexity, Interval(1.0, 1.0, 1.0), count_parameters(model.hf), time=1.0
    )
    rows, tasks = [whole], _score_tasks(setup, model, WHOLE, 0)
    for count in counts:
        for method in methods_of(model):
            pruned = drop_and_replace(model, contiguous_spans(order[:count]), method, calibration)
            after = token_losses(pruned.model, calibration.test)
            rows.append(
                PrunedRow(
                    method,
                    n_dropped=len(pruned.dropped),
                    dropped=", ".join(map(str, pruned.dropped)),
                    loss=after.mean,
                    perplexity=after.perplexity,
                    ratio=Interval(*after.over(before)),
                    parameters=pruned.parameters[1],
                    time=_relative_time(pruned, calibration),
                )
            )
            tasks += _score_tasks(setup, pruned.model, method, count)
    rows = [replace(row, is_on_front=not any(r.beats(row) for r in rows)) for row in rows]
    facts = {
        "tokens": calibration.info.tokens,
        "chosen": "loss",
        "order": order,
        "blocks": model.n_blocks,
        "stay": {str(block): reason for block, reason in required.items()},
    }
    notes = [note] if note else []
    if settings.eval_tasks and not tasks:
        notes.append(f"The tasks score the next token, so a {model.task} model has no scores.")
    if not counts:
        notes.append("No block can be dropped: every block is required.")
    headline = Headline()
    if counts:
        ratios = {row.method: row.ratio.mean for row in rows if row.n_dropped == max(counts)}
        headline = Headline(max(counts), min(ratios, key=ratios.__getitem__), ratios)
    return Result("pruning", Tables(rows, tasks or None), headline, notes, facts)


def methods_of(model: Model) -> list[str]:
    """Return the replacement methods that this model allows."""
    methods = ["remove", "linear"]
    if not cannot_fold(model):
        methods += ["replaceme", "fold"]
    return methods if cannot_rotate(model) else [*methods, "rotation"]


def drop_counts(n_candidates: int, n_blocks: int) -> list[int]:
    """Return how many blocks to drop: one, and some shares of all."""
    counts = {1, *(round(share * n_blocks) for share in SHARES)}
    return sorted(count for count in counts if 0 < count <= n_candidates)


def _score_tasks(setup: Setup, model: Model, method: str, n_dropped: int) -> list[TaskRow]:
    settings = setup.settings
    if not settings.eval_tasks or settings.eval_data is None or model.task != "causal":
        return []
    result = evaluate(model, settings.eval_tasks, settings.eval_data, limit=settings.eval_limit)
    return [
        TaskRow(method, n_dropped, row.task, row.metric, Interval(row.value, row.low, row.high), row.items)
        for row in result.scores
    ]


@torch.no_grad()
def _relative_time(pruned: Pruned, calibration: CalibrationData) -> float:
    """Return the time of a forward pass over one validation batch, relative to the whole model."""
    batch = calibration.validation[0]

    def forward(model: Model) -> None:
        mask = batch.attention_mask.to(model.device)
        model.hf(batch.input_ids.to(model.device), attention_mask=mask)

    runs = {"whole": lambda: forward(pruned.original), "pruned": lambda: forward(pruned.model)}
    seconds = time_alternately(runs, repeats=TIME_REPEATS)
    return ratio(seconds["pruned"], seconds["whole"])


def figures(result: Result[Tables, Headline]) -> list[Panel]:
    """Return perplexity against blocks dropped, loss against time, and the scores of the tasks."""
    panels = []
    if len(result.tables.pruned) > 1:
        panels.append(_loss_panel(result.tables.pruned))
    if result.tables.tasks:
        panels.append(_task_panel(result.tables.tasks))
    return panels


def _loss_panel(rows: Sequence[PrunedRow]) -> Panel:
    methods = [name for name in unique(row.method for row in rows) if name != WHOLE]
    lines = {name: [(row.n_dropped, row.ratio) for row in rows if row.method in (WHOLE, name)] for name in methods}
    paint = colours([*methods, WHOLE])
    title, largest = "perplexity relative to the whole model", max(row.ratio.mean for row in rows)
    ratios = line_chart(title, lines, x="blocks dropped", whole_x=True, paint=paint)
    if largest > 4:
        ratios.update_yaxes(type="log")
    most = max(row.n_dropped for row in rows)
    last = {row.method: row for row in rows if row.n_dropped == most}
    best = min(last.values(), key=lambda row: row.ratio.mean)
    reading = (
        f"With {_blocks(most)} dropped, the best method is {best.method}: perplexity is {number(best.ratio.mean)} "
        f"times that of the whole model"
    )
    if "remove" in last and best.method != "remove":
        reading += f" ({number(last['remove'].ratio.mean)} times without a replacement)"
    reading += f", and a forward pass takes {number(best.time)} of its time."
    front = empty_figure(
        "loss and time (filled: Pareto front)",
        x="time of a forward pass relative to the whole model",
        y="loss, nats per token",
    )
    for name in unique(row.method for row in rows):
        group = [row for row in rows if row.method == name]
        symbols = ["circle" if row.is_on_front else "circle-open" for row in group]
        front.add_scatter(
            x=[row.time for row in group],
            y=[row.loss for row in group],
            mode="markers",
            name=safe(name),
            legendgroup=safe(name),
            line={"color": paint[name]},
            marker={"color": paint[name], "size": 9, "symbol": symbols},
            customdata=[[row.n_dropped, row.parameters] for row in group],
            hovertemplate=f"<b>{safe(name)}</b><br>%{{customdata[0]}} blocks dropped, %{{customdata[1]:,}} parameters"
            "<br>time %{x:.2f}, loss %{y:.3f}<extra></extra>",
        )
    return Panel("Fewer blocks", reading, ("pruned",), [ratios, front])


def _blocks(count: int) -> str:
    return f"{count} block{'s' if count > 1 else ''}"


def _task_panel(rows: Sequence[TaskRow]) -> Panel:
    """Draw the first metric of each task against blocks dropped."""
    charts = []
    for task in unique(row.task for row in rows):
        metric = next(row.metric for row in rows if row.task == task)
        group = [row for row in rows if (row.task, row.metric) == (task, metric)]
        lines = {
            name: [(r.n_dropped, r.score.mean) for r in group if r.method in (WHOLE, name)]
            for name in unique(row.method for row in group)
            if name != WHOLE
        }
        title = f"{task}: {metric} of {group[0].items:,} items"
        charts.append(line_chart(title, lines, x="blocks dropped", whole_x=True))
    accuracy = [row for row in rows if row.metric == "acc"]
    most = max(row.n_dropped for row in accuracy)
    full_model = mean(row.score.mean for row in accuracy if row.method == WHOLE)
    reading = f"The whole model is right in {number(full_model)} of items, mean over tasks"
    if most:
        last = [row for row in accuracy if row.n_dropped == most]
        means = {
            name: mean(row.score.mean for row in last if row.method == name)
            for name in unique(row.method for row in last)
        }
        best = max(means, key=means.__getitem__)
        reading += f"; with {_blocks(most)} dropped, {best} keeps {number(means[best])}"
    return Panel("Tasks", f"{reading}.", ("tasks",), charts)


STUDY = Study("pruning", "what is lost when blocks are dropped?", run, figures, cannot_run=cannot_run)
