"""Run tasks through lm-eval.

Our tasks as lm-eval's: its requests, metrics and aggregation, over items that are already in memory.

Score a model on tasks, through lm-eval, from a folder of local files.

found = evaluate(lj.load("smollm2"), "copa,piqa", "eval-data", limit=100)
found.scores        # one row a metric: value, standard error, 95 % interval
"""

from __future__ import annotations

import importlib.util
import io
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from lm_eval.api.task import ConfigurableTask
from numpy.typing import ArrayLike

from layerjump.errors import BadEvaluation
from layerjump.evaluation.early_exit import require_causal
from layerjump.evaluation.tasks import Item, Task, load_items, select_tasks
from layerjump.generation.rules import Rule
from layerjump.jumps.jumps import Jumps
from layerjump.metrics.bootstrap import mean_interval, statistic_interval
from layerjump.models.loading import quiet_transformers
from layerjump.models.model import Model

_FIELDS = {
    "choice": {"doc_to_text": "context", "doc_to_choice": "choices", "doc_to_target": "gold"},
    # A number where lm-eval expects a prompt means: the choices are the prompts, and this is the right one.
    "contexts": {"doc_to_text": "gold", "doc_to_choice": "choices", "doc_to_target": "target"},
    "cloze": {"doc_to_text": "context", "doc_to_target": "target"},
}


class LocalTask(ConfigurableTask):
    """A task of lm-eval that takes its items from memory: no hub, no cache."""

    def __init__(self, task: Task, items: Sequence[Item]) -> None:
        self._items = list(items)
        config: dict[str, Any] = {
            "task": task.name,
            "output_type": "loglikelihood" if task.kind == "cloze" else "multiple_choice",
            "test_split": "test",
            "num_fewshot": 0,
            "metric_list": [_metric(name) for name in task.metrics],
            **_FIELDS[task.kind],
        }
        super().__init__(config=config)

    def download(self, *_: Any, **__: Any) -> None:
        """Where lm-eval would ask the hub."""
        self.dataset = {"test": datasets.Dataset.from_list(self._items)}

    def build_all_requests(self, **settings: Any) -> None:
        """As lm-eval does, without the bar that it draws for these milliseconds."""
        with redirect_stderr(io.StringIO()):
            super().build_all_requests(**settings)


def _metric(name: str) -> dict[str, Any]:
    aggregation: Any = {"perplexity": "perplexity", "f1": macro_f1}.get(name, "mean")
    return {"metric": name, "aggregation": aggregation, "higher_is_better": name != "perplexity"}


def macro_f1(pairs: Sequence[tuple[int, int]], weights: ArrayLike | None = None) -> float:
    """F1 of each of the three answers of CB, and their mean; (right, chosen) pairs, which may have weights."""
    right, chosen = np.asarray(pairs).T
    weight = np.ones(len(right)) if weights is None else np.asarray(weights)
    scores = []
    for answer in range(3):
        both = float(weight @ ((right == answer) & (chosen == answer)))
        either = float(weight @ (right == answer) + weight @ (chosen == answer))
        scores.append(2 * both / either if either else 0.0)
    return sum(scores) / 3


Progress = Callable[[int, int], None]
"""Called with the requests answered and the requests there are."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """What a model scored, and each item that it was scored on."""

    scores: list[Row]
    """task, metric, value, stderr, low, high, items."""
    items: dict[str, list[Row]]
    """For each task, the log-likelihoods of every item's continuations, and which one is right."""
    truncated: int
    """Requests that were longer than the model's context, and lost their beginning."""
    mean_level: float | None
    """The level at which scored positions were read, on average; None where there is no exit rule."""


def require_lm_eval() -> None:
    """Raise `BadEvaluation` if lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise BadEvaluation(
            "tasks are scored through lm-eval, which is not installed; pip install 'layerjump[eval]'"
        )


def evaluate(
    model: Model,
    tasks: str | Sequence[str],
    data: str | Path,
    *,
    limit: int | None = None,
    jumps: str | Path | Jumps | None = None,
    exit: str | Rule | None = None,
    parts: str | None = None,
    blocks: str | None = None,
    batch_size: int = 1,
    progress: Progress | None = None,
) -> Evaluation:
    """Score tasks whose files are in the folder `data`; `limit` takes the first items of each alone.

    With jumps, an exit rule says where each position is read, or `parts` and `blocks` what the maps stand in for.
    """
    asked = select_tasks(tasks)
    items = {task.name: load_items(task, data, limit) for task in asked}
    require_causal(model)
    require_lm_eval()
    if batch_size < 1:
        raise BadEvaluation(f"the batch size given is {batch_size}; give 1 or more")
    from lm_eval.evaluator import evaluate as run

    pass
    from layerjump.evaluation.lm_eval_model import LayerjumpLM

    with _quiet_harness(), quiet_transformers():
        made = {task.name: LocalTask(task, items[task.name]) for task in asked}
        given: dict[str, Any] = {"jumps": jumps, "exit": exit, "parts": parts, "blocks": blocks}
        with closing(LayerjumpLM(model, **given, batch_size=batch_size)) as lm:
            requests = sum(len(one.get("choices", [0])) for some in items.values() for one in some)
            lm.silent = True
            lm.set_cache_hook(_Counter(progress, requests))
            # Their bootstrap is not needed: intervals are ours.
            found = run(lm, made, bootstrap_iters=0, log_samples=True)
    samples = found["samples"]
    return Evaluation(
        [row for task in asked for row in _scores(task, samples[task.name])],
        {task.name: [_item(sample) for sample in samples[task.name]] for task in asked},
        lm.truncated,
        lm.reader.mean_level if lm.reader.levels else None,
    )


class _Counter:
    """lm-eval tells its cache of every answer; here somebody else listens."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def add_partial(self, *_: Any) -> None:
        self._done += 1
        if self._progress:
            self._progress(self._done, self._total)


@contextmanager
def _quiet_harness() -> Iterator[None]:
    """lm-eval warns that a model in memory was given, and of every request that it truncates: we count these."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _item(sample: Mapping[str, Any]) -> Row:
    doc = sample["doc"]
    likelihoods, greedy = zip(*sample["filtered_resps"], strict=True)
    return {
        "id": sample["doc_id"],
        "loglikelihoods": list(likelihoods),
        "greedy": list(greedy),
        "gold": doc.get("gold", 0),
    }


def _scores(task: Task, samples: Sequence[Mapping[str, Any]]) -> list[Row]:
    return [
        {"task": task.name, "metric": name}
        | _measured(name, [sample[name] for sample in samples])
        | {"items": len(samples)}
        for name in task.metrics
    ]


def _measured(metric: str, values: Sequence[Any]) -> Row:
    """A metric's value over items, its 95 % interval, and for an accuracy the standard error as lm-eval has it."""
    each = np.arange(len(values))
    if metric == "f1":
        pass

        low, high = statistic_interval(lambda weights: macro_f1(values, weights), each)
        return {"value": macro_f1(values), "stderr": None, "low": low, "high": high}
    if metric == "perplexity":
        mean, low, high = (float(number) for number in mean_interval(values, each))
        value, low, high = math.exp(-mean), math.exp(-high), math.exp(-low)
        return {"value": value, "stderr": None, "low": low, "high": high}
    n, share = len(values), float(np.mean(values))
    stderr = math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else None
    low, high = wilson(share, n)
    return {"value": share, "stderr": stderr, "low": low, "high": high}


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share: unlike a resampled one it has a width where all items are right, or none."""
    z = 1.959964
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)
