"""Our tasks as lm-eval's: its requests, metrics and aggregation, over items that are already in memory."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stderr
from typing import Any

import datasets
import numpy as np
from lm_eval.api.task import ConfigurableTask
from numpy.typing import ArrayLike

from layerjump.evaluate.tasks import Item, Task

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
