"""Shared Hugging Face Trainer callbacks: resume after a stop, progress bar."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PrinterCallback, ProgressCallback, Trainer
from transformers.trainer_utils import get_last_checkpoint

from layerjump.errors import BadArtifact
from layerjump.io import read_json, write_json, writing

RUN_FILE = "run.json"
COMPLETE_MARK = "whole"
"""A file that stands in a checkpoint once all of it is written."""


class ResumableTrainer(Trainer):
    """A Trainer that may be killed at any moment: a checkpoint cut short is told from a whole one."""

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        place = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        with writing(place):
            super()._save_checkpoint(model, trial)
            if self.args.should_save:
                (place / COMPLETE_MARK).touch()


class Bar(ProgressCallback):
    """A progress bar on standard error, and nothing on standard output."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        """The losses are in the Trainer's own state."""


def silence_trainer(trainer: Trainer) -> None:
    """Nothing on standard output; a bar on standard error where that is a terminal."""
    trainer.remove_callback(PrinterCallback)
    if sys.stderr.isatty():
        trainer.add_callback(Bar())


def find_checkpoint(folder: Path, run: dict[str, Any]) -> str | None:
    """The last whole checkpoint of the same training; None where there is none yet.

    `run` is all that the training's end depends on. Checkpoints that a kill cut short are removed.
    """
    path = folder / RUN_FILE
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        for place in folder.glob("checkpoint-*"):
            if not (place / COMPLETE_MARK).exists():
                shutil.rmtree(place)
    found: str | None = get_last_checkpoint(str(folder))
    # A run that came to no checkpoint stands in nobody's way.
    if found and (before := read_json(path)) != run:
        changed = [name for name in run if before.get(name) != run[name]]
        raise BadArtifact(
            f"{folder} holds a training with other settings ({', '.join(changed)}); give the same, or remove it"
        )
    write_json(path, run)
    return found


def remove_training_folder(folder: Path) -> None:
    """Remove a training that came to its end; a kill half way leaves no checkpoint that looks whole."""
    for mark in folder.glob(f"checkpoint-*/{COMPLETE_MARK}"):
        mark.unlink()
    shutil.rmtree(folder)
