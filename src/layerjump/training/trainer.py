"""Hugging Face Trainers that survive a kill, and one that adds a penalty on the hidden states of all levels.

A run stores checkpoints in its training folder, next to a description of the run. The same run resumes from the last
complete checkpoint; a different run refuses to.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainingArguments,
)
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.trainer_utils import get_last_checkpoint

from layerjump.errors import BadArtifact, BadTraining, Diverged, argument
from layerjump.io import read_json, write_json, writing
from layerjump.models.discovery import discover
from layerjump.models.hooks import Capture
from layerjump.models.hugging_face_config import task_of, vocabulary_size
from layerjump.models.sites import Site
from layerjump.training.packed_rows import IGNORE_INDEX, PackedRows
from layerjump.training.regularizers import Penalty

RUN_FILE = "run.json"
COMPLETE_MARK = "whole"
"""Empty file that marks a completely written checkpoint."""
DIVERGED_FACTOR = 2.0
"""A loss is bad above this multiple of the loss of uniform guessing, ln(vocab_size)."""
DIVERGED_BATCHES = 10
"""Number of consecutive batches with a bad loss that end a run."""


class ResumableTrainer(Trainer):
    """A Trainer that can be killed at any moment: a mark tells complete checkpoints from truncated ones."""

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        with writing(folder):
            super()._save_checkpoint(model, trial)
            if self.args.should_save:
                (folder / COMPLETE_MARK).touch()


class _StderrProgress(ProgressCallback):
    """A progress bar on standard error that prints no losses: these are in the Trainer's state."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        pass


def silence_trainer(trainer: Trainer) -> None:
    """Keep a Trainer off standard output; show a progress bar if standard error is a terminal."""
    trainer.remove_callback(PrinterCallback)
    if sys.stderr.isatty():
        trainer.add_callback(_StderrProgress())


def find_checkpoint(training_folder: Path, run: Mapping[str, object]) -> str | None:
    """Return the last complete checkpoint of the same run, or None; record the run in the folder.

    `run` holds everything that the result of the training depends on. Truncated checkpoints are removed.
    """
    path = training_folder / RUN_FILE
    with writing(path):
        training_folder.mkdir(parents=True, exist_ok=True)
        for folder in training_folder.glob("checkpoint-*"):
            if not (folder / COMPLETE_MARK).exists():
                shutil.rmtree(folder)
    checkpoint: str | None = get_last_checkpoint(str(training_folder))
    # Without a checkpoint there is nothing to resume, so another run may use the folder.
    if checkpoint and (recorded := read_json(path)) != run:
        changed = [name for name in run if recorded.get(name) != run[name]]
        raise BadArtifact(
            f"{training_folder} holds a training with other settings ({', '.join(changed)}); pass the same, or remove "
            f"the folder"
        )
    write_json(path, dict(run))
    return checkpoint


def remove_training_folder(training_folder: Path) -> None:
    """Remove a finished training; a kill half-way leaves no checkpoint that looks complete."""
    for mark in training_folder.glob(f"checkpoint-*/{COMPLETE_MARK}"):
        mark.unlink()
    shutil.rmtree(training_folder)


class LevelStates(Capture):
    """Hooks that hold the hidden states of levels 0 to L of the last forward pass, complete and differentiable.

    Level L is the state before the final norm. For a model wrapped in `DistributedDataParallel` pass the inner model.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        structure = discover(hf)
        sites = [Site(level) for level in range(structure.n_blocks + 1)]
        super().__init__(structure, sites, entries=(hf, hf.base_model))

    @property
    def states(self) -> list[Tensor]:
        """Hidden states of levels 0 to L in the last forward pass, each (batch, positions, d)."""
        if len(self._states) < len(self.sites):
            raise BadTraining(
                f"expected the states of {len(self.sites)} levels, got {len(self._states)}; run the model inside "
                "`with LevelStates(model)`, and without gradient checkpointing"
            )
        return [self._states[site] for site in self.sites]

    def clear(self) -> None:
        """Release the states and their autograd graph."""
        self._states.clear()


class PenaltyTrainer(ResumableTrainer):
    """Minimises loss + penalty_weight × penalty of the hidden states, and stops a run that diverges.

    The result does not depend on how a batch is split into micro-batches or over processes. All rows must have the
    same number of tokens (text is packed), so that the penalty of a batch is the mean over its micro-batches.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        *,
        train_dataset: PackedRows,
        processing_class: PreTrainedTokenizerBase,
        penalty: Penalty | None = None,
        penalty_weight: float = 0.0,
        levels: Sequence[int] | None = None,
    ) -> None:
        is_masked = task_of(model) == "masked"
        compute = ForMaskedLMLoss if is_masked else ForCausalLMLoss

        def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
            # The model's own loss as a mean over all tokens of a batch; BERT's forward pass takes it of a micro-batch.
            logits = outputs["logits"]
            return compute(logits, labels, logits.shape[-1], num_items_in_batch=num_items_in_batch)

        super().__init__(
            model, args, compute_loss_func=loss, train_dataset=train_dataset, processing_class=processing_class
        )
        self._loss = loss
        self._penalty = penalty if penalty_weight else None
        self._penalty_weight, self._penalised_levels = penalty_weight, levels
        self._level_states = LevelStates(model) if self._penalty else None
        self._loss_limit = DIVERGED_FACTOR * math.log(vocabulary_size(model))
        self._n_bad_batches = 0
        self._last_inputs: dict[str, Any] = {}
        self._logged_sums = torch.zeros(3, dtype=torch.float64)
        """Sums of loss, penalty and number of batches since the last log."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return the loss of one micro-batch, with the penalty."""
        self._last_inputs, mask = dict(inputs), inputs.get("attention_mask")
        with self._level_states or nullcontext():
            loss: Any = super().compute_loss(model, inputs, *args, **kwargs)
        n_parts = self.current_gradient_accumulation_steps
        loss_value = float(loss.detach()) * n_parts
        self._logged_sums += torch.tensor([loss_value, 0, 1], dtype=torch.float64)
        self._n_bad_batches = self._n_bad_batches + 1 if loss_value > self._loss_limit else 0
        if not math.isfinite(loss_value) or self._n_bad_batches >= DIVERGED_BATCHES:
            self._stop_diverged(f"the loss is {loss_value:.3g}")
        if self._penalty is None or self._level_states is None:
            return loss
        penalty = self._penalty_weight * self._penalty(self._level_states.states, mask, self._penalised_levels)
        self._level_states.clear()
        penalty_value = float(penalty.detach())
        self._logged_sums[1] += penalty_value
        if not math.isfinite(penalty_value):
            self._stop_diverged(f"the penalty is {penalty_value:.3g}")
        # The Trainer divides its own loss by all tokens of the batch, but not what is added to it.
        return loss + penalty / n_parts

    def _stop_diverged(self, reason: str) -> None:
        last = get_last_checkpoint(str(self.args.output_dir))
        saved = f"the last good checkpoint is {Path(last)}" if last else "no checkpoint is saved"
        raise Diverged(
            f"training diverged: {reason} at step {self.state.global_step}; {saved}; pass a "
            f"{argument('learning_rate')} below {self.args.learning_rate:g}, or a smaller "
            f"{argument('penalty_weight')}, and another output folder"
        )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # The logged losses belong to earlier weights, so the current weights are tested before they are saved.
        inputs, hf = dict(self._last_inputs), cast(nn.Module, self.model)
        labels = inputs.pop("labels")
        # A row of a masked model may have no mask in it.
        n_labels = labels.ne(IGNORE_INDEX).sum().clamp(min=1)
        with torch.no_grad():
            loss = float(self._loss(hf(**inputs), labels, num_items_in_batch=n_labels))
        is_last = self.state.global_step >= self.state.max_steps
        if not math.isfinite(loss) or (is_last and loss > self._loss_limit):
            self._stop_diverged(f"the loss is {loss:.3g}")
        if not self._n_bad_batches and loss <= self._loss_limit:
            super()._save_checkpoint(model, trial)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the Trainer does, with the language modelling loss and the penalty in separate columns."""
        if "loss" in logs and self._logged_sums[2]:
            loss, penalty, n_batches = self._logged_sums.tolist()
            logs = logs | {"lm_loss": loss / n_batches, "penalty": penalty / n_batches}
            self._logged_sums.zero_()
        super().log(logs, *args, **kwargs)
