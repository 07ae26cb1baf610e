"""evaluate(): score a model on benchmark tasks through lm-eval, from local files.

    evaluation = lj.evaluate(lj.load("smollm2"), "copa,piqa", "eval-data", limit=100)
    evaluation.scores                             # value, standard error and 95 % interval of each metric

A task file has one JSON object a line. Multiple-choice sets have `query`, `choices` and `gold`, Winograd has
`context_options`, `continuation` and `gold`, LAMBADA has `text`; CB and RTE are SuperGLUE's own files. Prompts are
those of the named task of lm-eval, down to the spaces, so that numbers can be compared with published ones.

This module does not import lm-eval, which is an optional dependency.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from layerjump.data.corpus import json_rows, shorten
from layerjump.errors import BadEvaluation, argument
from layerjump.evaluation.model_variants import ModelVariant, require_causal
from layerjump.metrics.bootstrap import mean_interval, statistic_interval
from layerjump.models.model import Model

Progress = Callable[[int, int], None]
"""Called with the number of requests answered and the number in all."""


@dataclass(frozen=True)
class TaskItem:
    """A question: a context and its choices, choices of a context for a target, or a context and its target."""

    context: str | None = None
    choices: tuple[str, ...] | None = None
    target: str | None = None
    gold: int | None = None
    """Index of the right choice."""

    def __post_init__(self) -> None:
        if self.choices is not None:
            if len(self.choices) < 2 or not all(isinstance(text, str) for text in self.choices):
                raise ValueError(f"expected two texts or more as choices, got {shorten(list(self.choices))}")
            if self.gold is not None and not 0 <= self.gold < len(self.choices):
                raise ValueError(f"`gold` is {self.gold}, but there are {len(self.choices)} choices")
        predicted = self.choices or () if self.target is None else (self.target,)
        if not all(text.strip() for text in predicted) or self.context == "":
            raise ValueError("expected a text to predict and a context to predict it from, got an empty one")


@dataclass(frozen=True)
class Task:
    """A benchmark task."""

    name: str
    file: str
    lm_eval_name: str
    """Name of the same task in lm-eval."""
    columns: Mapping[str, type]
    parse: Callable[[Mapping[str, Any]], TaskItem]
    metrics: tuple[str, ...] = ("acc",)
    """Names of metrics; figures show the first."""
    kind: Literal["choice", "contexts", "cloze"] = "choice"
    """What the model predicts: one of several continuations, one after several contexts, or a target by itself."""


@dataclass(frozen=True)
class TaskScore:
    """One metric of a model on a task, with its 95 % interval."""

    task: str
    metric: str
    value: float
    stderr: float | None
    """Standard error of an accuracy, as lm-eval computes it."""
    low: float
    high: float
    items: int
    """Number of items."""


@dataclass(frozen=True)
class ItemScore:
    """Log-likelihoods of the continuations of one item, and which are greedy; `gold` is the right one."""

    id: int
    loglikelihoods: list[float]
    greedy: list[bool]
    gold: int


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model on tasks."""

    scores: list[TaskScore]
    items: dict[str, list[ItemScore]]
    """Task → scores of its items."""
    truncated: int
    """Number of requests that were longer than the model's context and lost their beginning."""
    mean_level: float | None
    """Mean exit level of the scored positions; None without early exit."""


def require_lm_eval() -> None:
    """Raise `BadEvaluation` if lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise BadEvaluation("tasks are scored through lm-eval, which is not installed; pip install 'layerjump[eval]'")


def evaluate(
    model: Model,
    tasks: str | Sequence[str],
    data: str | Path,
    *,
    limit: int | None = None,
    variant: ModelVariant | None = None,
    batch_size: int = 1,
    progress: Progress | None = None,
) -> Evaluation:
    """Score a causal language model on tasks.

    Args:
        model: The model.
        tasks: Names of tasks, such as "copa,piqa", or "all".
        data: Folder with the tasks' files.
        limit: Number of items of each task to use, from its start; by default all.
        variant: Early exit, or parts replaced by maps; by default the whole model.
        batch_size: Number of requests in a batch.
        progress: Function that is called with the number of requests answered and the number in all.
    """
    selected = select_tasks(tasks)
    items = [load_items(task, data, limit) for task in selected]
    require_causal(model)
    require_lm_eval()
    if batch_size < 1:
        raise BadEvaluation(f"expected {argument('batch_size')} of 1 or more, got {batch_size}")
    from layerjump.evaluation.lm_eval import run_tasks

    samples, lm = run_tasks(model, selected, items, variant, batch_size, progress)
    scores: list[TaskScore] = []
    item_scores: dict[str, list[ItemScore]] = {}
    for task in selected:
        results = samples[task.name]
        scores += [_score(task.name, metric, [sample[metric] for sample in results]) for metric in task.metrics]
        item_scores[task.name] = []
        for sample in results:
            loglikelihoods, greedy = map(list, zip(*sample["filtered_resps"], strict=True))
            gold = sample["doc"].get("gold", 0)
            item_scores[task.name].append(ItemScore(sample["doc_id"], loglikelihoods, greedy, gold))
    return Evaluation(scores, item_scores, lm.n_truncated, lm.reader.mean_level)


def _score(task: str, metric: str, values: Sequence[Any]) -> TaskScore:
    n, stderr, documents = len(values), None, np.arange(len(values))
    if metric == "f1":
        value = macro_f1(values)
        low, high = statistic_interval(lambda weights: macro_f1(values, weights), documents)
    elif metric == "perplexity":
        bounds = (float(number) for number in mean_interval(values, documents))
        value, high, low = (math.exp(-number) for number in bounds)
    else:
        value = float(np.mean(values))
        stderr = math.sqrt(value * (1 - value) / (n - 1)) if n > 1 else None
        low, high = wilson_interval(value, n)
    return TaskScore(task, metric, value, stderr, low, high, n)


def macro_f1(pairs: Sequence[tuple[int, int]], weights: ArrayLike | None = None) -> float:
    """Return the mean F1 of the three answers of CB, from (gold, predicted) pairs, which may have weights."""
    gold, predicted = np.asarray(pairs).T
    weight = np.ones(len(gold)) if weights is None else np.asarray(weights)
    scores = []
    for answer in range(3):
        both = float(weight @ ((gold == answer) & (predicted == answer)))
        either = float(weight @ (gold == answer) + weight @ (predicted == answer))
        scores.append(2 * both / either if either else 0.0)
    return sum(scores) / 3


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share: unlike a bootstrap, it has a width if all items are right, or none."""
    z = 1.959964
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def select_tasks(names: str | Sequence[str]) -> list[Task]:
    """Return the tasks of a list such as "copa,piqa", in this order; "all" is every task."""
    requested = names.split(",") if isinstance(names, str) else list(names)
    requested = list(TASKS) if requested == ["all"] else [name.strip() for name in requested]
    for name in requested:
        if name not in TASKS:
            raise BadEvaluation(f"expected {argument('tasks')} among {', '.join(TASKS)}, or all, got {name!r}")
    return [TASKS[name] for name in dict.fromkeys(requested)]


def load_items(task: Task, data: str | Path, limit: int | None = None) -> list[TaskItem]:
    """Load the first items of a task's file, and check each."""
    if limit is not None and limit < 1:
        raise BadEvaluation(f"expected {argument('limit')} of 1 item or more, got {limit}")
    path = Path(data).expanduser() / task.file
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadEvaluation(
            f"{path} does not exist; pass the folder that holds {task.file}, or leave {task.name} out"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadEvaluation(f"{path} cannot be read ({shorten(error)}); correct the file") from error
    rows = list(json_rows(str(path), text))[:limit]
    if not rows:
        raise BadEvaluation(f"{path} holds no items; write one JSON object a line")
    items = []
    for number, row in enumerate(rows, start=1):
        try:
            for column, expected in task.columns.items():
                if type(row.get(column)) is not expected:
                    name = {str: "a text", list: "a list", int: "a number"}[expected]
                    value = shorten(row[column]) if column in row else "nothing"
                    raise ValueError(f"expected {name} in `{column}`, got {value}")
            items.append(task.parse(row))
        except ValueError as error:
            raise BadEvaluation(
                f"item {number} of {path} is not one of {task.name}: {error}; correct the file"
            ) from None
    return items


_CHOICE_COLUMNS = {"query": str, "choices": list, "gold": int}
_ANSWER = "\nAnswer:"


def _choice_task(name: str, make_context: Callable[[str], str], metrics: tuple[str, ...] = ("acc",)) -> Task:
    def parse(row: Mapping[str, Any]) -> TaskItem:
        return TaskItem(make_context(row["query"]), tuple(row["choices"]), gold=row["gold"])

    return Task(name, f"{name}.jsonl", name, _CHOICE_COLUMNS, parse, metrics)


def _parse_entailment(row: Mapping[str, Any], answers: Mapping[str, str], question: str) -> TaskItem:
    """Parse a labelled row; `answers` has the model's answer for each label."""
    labels = list(answers)
    if row["label"] not in answers:
        raise ValueError(f"expected `label` {' or '.join(labels)}, got {row['label'][:40]!r}")
    context = f"{row['premise']}\nQuestion: {row['hypothesis']}{question}{_ANSWER}"
    return TaskItem(context, tuple(answers.values()), gold=labels.index(row["label"]))


def _parse_copa(row: Mapping[str, Any]) -> TaskItem:
    # lm-eval has no comma before the conjunction, and two spaces before a choice.
    premise, _, conjunction = row["query"].rpartition(", ")
    choices = tuple(f" {choice}" for choice in row["choices"])
    return TaskItem(f"{premise} {conjunction}", choices, gold=row["gold"])


def _parse_winograd(row: Mapping[str, Any]) -> TaskItem:
    rest = row["continuation"]
    # lm-eval splits after the pronoun and adds a space: two before a word, one before a full stop.
    target = f" {rest}" if rest[:1].isalnum() else rest
    return TaskItem(choices=tuple(row["context_options"]), target=target, gold=row["gold"])


def _parse_lambada(row: Mapping[str, Any]) -> TaskItem:
    context, space, word = row["text"].rpartition(" ")
    return TaskItem(context, target=space + word)


_CB_ANSWERS = {"entailment": "True", "contradiction": "False", "neutral": "Neither"}
_RTE_ANSWERS = {"entailment": "True", "not_entailment": "False"}
_parse_cb = partial(_parse_entailment, answers=_CB_ANSWERS, question=". True, False, or Neither?")
_parse_rte = partial(_parse_entailment, answers=_RTE_ANSWERS, question=" True or False?")
_ENTAILMENT_COLUMNS = {"premise": str, "hypothesis": str, "label": str}
_WINOGRAD_COLUMNS = {"context_options": list, "continuation": str, "gold": int}
_TASKS = (
    _choice_task("arc_easy", lambda query: query + _ANSWER, ("acc", "acc_norm")),
    _choice_task("boolq", lambda query: query.removeprefix("Passage: ") + _ANSWER),
    Task("cb", "superglue/CB/val.jsonl", "cb", _ENTAILMENT_COLUMNS, _parse_cb, ("acc", "f1")),
    Task("copa", "copa.jsonl", "copa", _CHOICE_COLUMNS, _parse_copa),
    Task(
        "lambada", "lambada_test.jsonl", "lambada_openai", {"text": str}, _parse_lambada, ("acc", "perplexity"), "cloze"
    ),
    _choice_task("piqa", lambda query: query.removesuffix("\n") + _ANSWER, ("acc", "acc_norm")),
    Task("rte", "superglue/RTE/val.jsonl", "sglue_rte", _ENTAILMENT_COLUMNS, _parse_rte),
    Task("winograd", "winograd_wsc.jsonl", "wsc273", _WINOGRAD_COLUMNS, _parse_winograd, kind="contexts"),
)
TASKS: dict[str, Task] = {task.name: task for task in _TASKS}
