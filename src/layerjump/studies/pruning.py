"""`pruning`: what is lost when blocks are dropped, by how many go and by what stands in for them.

Blocks are chosen once, greedily by the loss on select documents with a full map in place; every method is then fitted
on the same cuts and measured on test documents, beside the whole model on the same tokens. Time is of a forward pass
over one batch, whole and pruned models in turn. A row is on the front if no other is at least as good in parameters,
time and loss, and better in one of them. Where tasks are given, every model is scored on them through lm-eval.

Figures of `pruning`: what dropping blocks costs, in loss and in tasks, and what it buys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
import torch

from layerjump.errors import TextTooShort
from layerjump.evaluation.tasks import evaluate
from layerjump.metrics.timing import ratio, time_alternately
from layerjump.metrics.token_loss import TokenLosses, token_losses
from layerjump.models.model import Model
from layerjump.pruning.edit_model import cannot_drop, cannot_fold, cannot_rotate, count_parameters
from layerjump.pruning.prune import (
    CalibrationData,
    LossComparison,
    Pruned,
    drop_and_replace,
    prepare_calibration,
)
from layerjump.pruning.select import (
    BlockSelector,
    contiguous_spans,
    required_blocks,
)
from layerjump.studies._untyped import (
    Panel,
    Result,
    Row,
    Study,
    add_line,
    colours,
    empty_figure,
    level_axis,
    mean,
    number,
    safe,
    unique,
    where,
)
from layerjump.studies.layer_skipping import with_select_documents
from layerjump.studies.setup import Setup

TOKENS = 16_000
"""At most so many tokens are run."""
SHARES = (0.1, 0.2, 0.3)
"""How much of the model goes, beside one block alone."""
TURNS = 3


def unable(setup: Setup) -> str | None:
    """Why this model cannot be pruned, if it cannot."""
    return setup.model.no_predictions or cannot_drop(setup.model)


def methods_of(model: Model) -> list[str]:
    """What can stand in for blocks of this model."""
    found = ["remove", "linear"]
    if not cannot_fold(model):
        found += ["replaceme", "fold"]
    return found if cannot_rotate(model) else [*found, "rotation"]


def counts(free: int, blocks: int) -> list[int]:
    """How many blocks are dropped: one, and some shares of all."""
    return sorted({n for n in (1, *(round(share * blocks) for share in SHARES)) if 0 < n <= free})


def run(setup: Setup) -> Result:
    """Prune in every way, and measure each."""
    setup, note = with_select_documents(setup)
    model, calibration = setup.model, _calibration(setup)
    stay = required_blocks(model, calibration.fit)
    given = BlockSelector(model, calibration.fit, calibration.validation, stay)
    many = counts(len(given.candidates), model.n_blocks)
    order = given.order_by_loss(max(many)) if many else []
    before = token_losses(model, calibration.test)
    rows, tasks = [_whole(model, before)], _scored(setup, model, "whole model", 0)
    for count in many:
        for method in methods_of(model):
            pruned = drop_and_replace(model, contiguous_spans(order[:count]), method, calibration)
            rows.append(_row(pruned, before, calibration))
            tasks += _scored(setup, pruned.model, method, count)
    _mark_front(rows)
    result = Result("pruning", {"pruned": rows} | ({"tasks": tasks} if tasks else {}))
    result.settings = {
        "tokens": calibration.about["tokens"],
        "chosen": "loss",
        "order": order,
        "blocks": model.n_blocks,
        "stay": {str(block): why for block, why in stay.items()},
    }
    result.headline = _headline(rows)
    result.notes += [note] if note else []
    if setup.settings.eval_tasks and not tasks:
        result.notes.append(
            f"The tasks score the next token, so a {model.task} model has no scores."
        )
    if not many:
        result.notes.append("No block may go: there is none between those that must stay.")
    return result


def _calibration(setup: Setup) -> CalibrationData:
    """Batches of this run's documents; a text that has fewer tokens than the bound gives all it has."""
    settings = setup.settings
    given: dict[str, Any] = {"split": settings.split, "seed": settings.seed}
    try:
        wanted = min(TOKENS, settings.tokens or TOKENS)
        return prepare_calibration(setup.model, setup.corpus, tokens=wanted, **given)
    except TextTooShort:
        return prepare_calibration(setup.model, setup.corpus, tokens=settings.tokens, **given)


def _whole(model: Model, before: TokenLosses) -> Row:
    return {
        "method": "whole model",
        "dropped": 0,
        "blocks dropped": "",
        "loss": before.mean,
        "perplexity": before.perplexity,
        "ratio": 1.0,
        "ratio low": 1.0,
        "ratio high": 1.0,
        "parameters": count_parameters(model.hf),
        "time": 1.0,
    }


def _row(pruned: Pruned, before: TokenLosses, calibration: CalibrationData) -> Row:
    found = LossComparison.of(before, token_losses(pruned.model, calibration.test))
    return {
        "method": pruned.method,
        "dropped": len(pruned.dropped),
        "blocks dropped": ", ".join(map(str, pruned.dropped)),
        "loss": found.loss_after,
        "perplexity": found.perplexity_after,
        "ratio": found.ratio,
        "ratio low": found.low,
        "ratio high": found.high,
        "parameters": pruned.parameters[1],
        "time": _time(pruned, calibration),
    }


def _scored(setup: Setup, model: Model, method: str, dropped: int) -> list[Row]:
    """What a model scores on the tasks of this run, if it has any."""
    settings = setup.settings
    if not settings.eval_tasks or settings.eval_data is None or model.task != "causal":
        return []
    found = evaluate(model, settings.eval_tasks, settings.eval_data, limit=settings.eval_limit)
    return [
        {
            "method": method,
            "dropped": dropped,
            "task": row.task,
            "metric": row.metric,
            "score": row.value,
            "score low": row.low,
            "score high": row.high,
            "items": row.items,
        }
        for row in found.scores
    ]


@torch.no_grad()
def _time(pruned: Pruned, calibration: CalibrationData) -> float:
    """The pruned model's time over the whole one's, on a batch of select documents."""
    batch = calibration.validation[0]

    def runs(model: Model) -> None:
        model.hf(
            batch.input_ids.to(model.device), attention_mask=batch.attention_mask.to(model.device)
        )

    rivals = {"whole": lambda: runs(pruned.original), "pruned": lambda: runs(pruned.model)}
    seconds = time_alternately(rivals, repeats=TURNS)
    return ratio(seconds["pruned"], seconds["whole"])


def _mark_front(rows: list[Row]) -> None:
    axes = ("parameters", "time", "loss")
    for row in rows:
        row["front"] = not any(
            all(other[axis] <= row[axis] for axis in axes)
            and any(other[axis] < row[axis] for axis in axes)
            for other in rows
        )


def _headline(rows: list[Row]) -> dict[str, object]:
    """The ratio of each method at the most blocks dropped, and the best of them."""
    most = max(row["dropped"] for row in rows)
    last = {row["method"]: row["ratio"] for row in rows if row["dropped"] == most and most}
    if not last:
        return {}
    return {"dropped": most, "best_method": min(last, key=lambda name: last[name])} | {
        f"ratio_{method}": value for method, value in last.items()
    }


def pruned(study: Study) -> list[Panel]:
    """Perplexity over the whole model's against blocks dropped, and the front over parameters and time."""
    rows = study["tables"].get("pruned")
    if not rows or len(rows) < 2:
        return []
    methods = [name for name in unique(row["method"] for row in rows) if name != "whole model"]
    figures = [_ratios(rows, methods), _front(rows, methods)]
    return [Panel("Fewer blocks", _reading(rows, methods), ("pruned",), figures)]


def tasks(study: Study) -> list[Panel]:
    """Each task's score against blocks dropped."""
    rows = study["tables"].get("tasks")
    if not rows:
        return []
    figures = []
    for task in unique(row["task"] for row in rows):
        mine = where(rows, task=task)
        figures.append(_task(where(mine, metric=mine[0]["metric"])))
    return [Panel("Tasks", _task_reading(rows), ("tasks",), figures)]


def _task(rows: Sequence[Row]) -> go.Figure:
    title = f"{rows[0]['task']}: {rows[0]['metric']} of {rows[0]['items']:,} items"
    figure = empty_figure(title, x="blocks dropped", height=300)
    methods = [name for name in unique(row["method"] for row in rows) if name != "whole model"]
    paint, whole = colours(methods), where(rows, method="whole model")
    for name in methods:
        mine = whole + where(rows, method=name)
        add_line(figure, mine, "dropped", "score", name=name, colour=paint[name], band=False)
    return level_axis(figure, rows, "dropped")


def _task_reading(rows: Sequence[Row]) -> str:
    """The mean accuracy over tasks of the whole model, and of the best method with the most blocks out."""
    first = [row for row in rows if row["metric"] == "acc"]
    most = max(row["dropped"] for row in first)
    means = {
        name: mean(row["score"] for row in where(first, method=name, dropped=most))
        for name in unique(row["method"] for row in first if row["dropped"] == most)
    }
    whole = mean(row["score"] for row in where(first, method="whole model"))
    if not most:
        return f"The whole model is right in {number(whole)} of items, on average over tasks."
    best = max(means, key=lambda name: means[name])
    return (
        f"The whole model is right in {number(whole)} of items, on average over tasks; with {most} blocks dropped "
        f"{best} keeps {number(means[best])}."
    )


def _ratios(rows: Sequence[Row], methods: Sequence[str]) -> go.Figure:
    figure = empty_figure("perplexity over the whole model's", x="blocks dropped", height=360)
    paint = colours(methods)
    whole = where(rows, method="whole model")
    for name in methods:
        mine = whole + where(rows, method=name)
        add_line(figure, mine, "dropped", "ratio", name=name, colour=paint[name])
    worst = max(row["ratio"] for row in rows)
    if worst > 4:
        figure.update_yaxes(type="log")
    return level_axis(figure, rows, "dropped")


def _front(rows: Sequence[Row], methods: Sequence[str]) -> go.Figure:
    figure = empty_figure(
        "loss against time; full marks: no other is better in parameters, time and loss",
        x="time of a forward pass over the whole model's",
        y="loss, nats a token",
        height=360,
    )
    names = ["whole model", *methods]
    paint = colours(names)
    for name in names:
        mine = where(rows, method=name)
        figure.add_scatter(
            x=[row["time"] for row in mine],
            y=[row["loss"] for row in mine],
            mode="markers",
            name=safe(name),
            marker={
                "color": paint[name],
                "size": 9,
                "symbol": ["circle" if row["front"] else "circle-open" for row in mine],
            },
            customdata=[[row["dropped"], row["parameters"]] for row in mine],
            hovertemplate=f"<b>{safe(name)}</b><br>%{{customdata[0]}} blocks dropped, %{{customdata[1]:,}} parameters"
            "<br>time %{x:.2f}, loss %{y:.3f}<extra></extra>",
        )
    return figure


def _reading(rows: Sequence[Row], methods: Sequence[str]) -> str:
    most = max(row["dropped"] for row in rows)
    last = [row for row in rows if row["dropped"] == most and row["method"] in methods]
    best, removed = min(last, key=lambda row: row["ratio"]), where(last, method="remove")
    beside = (
        f" against {number(removed[0]['ratio'])} with nothing in their place" if removed else ""
    )
    return (
        f"With {most} blocks dropped, perplexity is {number(best['ratio'])} times the whole model's through "
        f"{best['method']}{beside}; a forward pass takes {number(best['time'])} of the time."
    )
