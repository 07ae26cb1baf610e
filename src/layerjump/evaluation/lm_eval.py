"""Adapters for lm-eval: tasks whose items are in memory, and the model `layerjump`.

    python -m layerjump.evaluation run --model layerjump --model_args pretrained=smollm2 jumps=jumps exit=gap:0.9

Importing this module registers the model. Requests, tokens, batches and caches are lm-eval's. With early exit, logits
of the scored positions are replaced by those of their exit level; a position without early exit keeps the model's own.
"""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Sequence
from contextlib import ExitStack, closing, redirect_stderr
from dataclasses import asdict
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import torch
from lm_eval.api.registry import register_model
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate as run_lm_eval
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from layerjump.errors import BadEvaluation
from layerjump.evaluation.model_variants import EarlyExitModel, ModelVariant, make_variant
from layerjump.evaluation.tasks import Progress, Task, TaskItem, macro_f1
from layerjump.generation.exit_rules import ExitConfig, Rule
from layerjump.generation.generate import early_exit
from layerjump.jumps.jumps import Jumps
from layerjump.models.hooks import Capture
from layerjump.models.loading import load, quiet_transformers
from layerjump.models.model import Model
from layerjump.models.sites import Site

_FIELDS = {
    "choice": {"doc_to_text": "context", "doc_to_choice": "choices", "doc_to_target": "gold"},
    # lm-eval reads a number in the place of a prompt as: the choices are the prompts, and this is the right one.
    "contexts": {"doc_to_text": "gold", "doc_to_choice": "choices", "doc_to_target": "target"},
    "cloze": {"doc_to_text": "context", "doc_to_target": "target"},
}
_AGGREGATIONS: dict[str, Any] = {"perplexity": "perplexity", "f1": macro_f1}


class LocalTask(ConfigurableTask):
    """An lm-eval task whose items are in memory: no hub, no cache."""

    def __init__(self, task: Task, items: Sequence[TaskItem]) -> None:
        self._docs = [{name: value for name, value in asdict(item).items() if value is not None} for item in items]
        metrics = [
            {"metric": name, "aggregation": _AGGREGATIONS.get(name, "mean"), "higher_is_better": name != "perplexity"}
            for name in task.metrics
        ]
        config: dict[str, Any] = {
            "task": task.name,
            "output_type": "loglikelihood" if task.kind == "cloze" else "multiple_choice",
            "test_split": "test",
            "num_fewshot": 0,
            "metric_list": metrics,
            **_FIELDS[task.kind],
        }
        super().__init__(config=config)

    def download(self, *_: Any, **__: Any) -> None:
        """Take the items from memory, where lm-eval would ask the hub."""
        self.dataset = {"test": datasets.Dataset.from_list(self._docs)}

    def build_all_requests(self, **kwargs: Any) -> None:
        """Build requests without lm-eval's progress bar."""
        with redirect_stderr(io.StringIO()):
            super().build_all_requests(**kwargs)


@register_model("layerjump")
class LayerjumpLM(HFLM):
    """A model, or a variant of it, for lm-eval.

    `pretrained` is a model or a source for `lj.load`; jumps, exit, level, parts and blocks are those of `make_variant`,
    in place of which Python code passes `variant`.
    """

    def __init__(
        self,
        pretrained: str | Path | Model,
        jumps: str | Path | Jumps | None = None,
        exit: str | ExitConfig | Rule | None = None,
        level: int | None = None,
        parts: str | None = None,
        blocks: str | None = None,
        variant: ModelVariant | None = None,
        revision: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        device_map: str | None = None,
        quantization: str | None = None,
        trust_remote_code: bool = False,
        **hflm_settings: Any,
    ) -> None:
        if not isinstance(pretrained, Model):
            pretrained = load(
                pretrained,
                revision=revision,
                device=device,
                dtype=dtype,
                device_map=device_map,
                quantization=quantization,
                trust_remote_code=trust_remote_code,
            )
        if variant is None:
            variant = make_variant(pretrained, jumps=jumps, exit=exit, level=level, parts=parts, blocks=blocks)
        self.reader = variant.make_reader(pretrained)
        self.n_truncated = 0
        """Number of requests that were longer than the model's context and lost their beginning."""
        self.show_progress = True
        self._structure = pretrained.structure
        self._generation = early_exit(variant.jumps, variant.exit) if isinstance(variant, EarlyExitModel) else None
        self._n_scored: dict[tuple[int, ...], int] = {}
        """Input ids → number of scored tokens at their end."""
        # lm-eval may add a padding token to the tokenizer, so it gets a copy.
        tokenizer = copy.deepcopy(pretrained.tokenization.tokenizer)
        super().__init__(pretrained.hf, tokenizer=tokenizer, **hflm_settings)
        self._changes = ExitStack()
        self._changes.enter_context(variant.applied_to(pretrained))

    def close(self) -> None:
        """Restore the model's own parts."""
        self._changes.close()

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or not self.show_progress)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        # How many tokens of an input are scored: lm-eval does not pass it on when it calls the model.
        for texts, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise BadEvaluation(
                    f"the continuation {str(texts and texts[1])[:40]!r} has {len(continuation)} tokens, but this model "
                    f"scores 1 to {self.max_length}; leave the item out"
                )
            ids = context + continuation
            self.n_truncated += len(ids) > self.max_length + 1
            inputs = tuple(ids[-(self.max_length + 1) :][:-1])
            self._n_scored[inputs] = max(len(continuation), self._n_scored.get(inputs, 0))
        try:
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        finally:
            self._n_scored.clear()

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        if not self.reader.levels:
            return super()._model_call(inps, attn_mask, labels)
        scored: set[int] = set()  # indices into the flattened (rows · tokens) logits
        for row_index, ids in enumerate(inps.tolist()):
            # Inputs are padded with zeros on the right; the noted requests tell where an input ends.
            for end in range(len(ids), 0, -1):
                n_scored = self._n_scored.get(tuple(ids[:end]), 0)
                scored.update(row_index * len(ids) + position for position in range(end - n_scored, end))
                if ids[end - 1]:
                    break
        flat = torch.tensor(sorted(scored), dtype=torch.long)
        sites = [Site(level) for level in self.reader.levels]
        with Capture(self._structure, sites) as capture:
            capture.start(flat)
            logits = super()._model_call(inps, attn_mask, labels)
            states = capture.take()
        flat = flat.to(logits.device)
        row, position = flat // inps.shape[1], flat % inps.shape[1]
        for some, exit_logits in self.reader.read(states, position):
            logits[row[some], position[some]] = exit_logits.to(logits.dtype)
        return logits

    def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
        if self.reader.levels:
            kwargs["custom_generate"] = self._generation
        return super()._model_generate(*args, **kwargs)


def run_tasks(
    model: Model,
    tasks: Sequence[Task],
    items: Sequence[Sequence[TaskItem]],
    variant: ModelVariant | None,
    batch_size: int,
    progress: Progress | None,
) -> tuple[dict[str, list[dict[str, Any]]], LayerjumpLM]:
    """Run the items of tasks; return lm-eval's samples by task, and the model with its counters."""
    logger = logging.getLogger("lm_eval")
    with ExitStack() as stack:
        # Silences warnings of a model in memory and of every truncated request (we count those).
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        stack.enter_context(quiet_transformers())
        local = {task.name: LocalTask(task, part) for task, part in zip(tasks, items, strict=True)}
        lm = stack.enter_context(closing(LayerjumpLM(model, variant=variant, batch_size=batch_size)))
        lm.show_progress = False
        if progress:
            n_requests = sum(len(item.choices or [item.target]) for part in items for item in part)
            answered = count(1)
            # lm-eval calls its cache hook with every answer.
            hook = SimpleNamespace(add_partial=lambda *_: progress(next(answered), n_requests))
            lm.set_cache_hook(hook)
        # Without lm-eval's bootstrap: we compute our own intervals.
        results = run_lm_eval(lm, local, bootstrap_iters=0, log_samples=True)
    return results["samples"], lm
