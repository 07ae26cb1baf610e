"""One training run on packed rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainingArguments,
)

from layerjump.compress.training import quieten
from layerjump.errors import BadTraining
from layerjump.inputs.families import family_of
from layerjump.inputs.loading import quiet_transformers
from layerjump.train.packing import Rows
from layerjump.train.penalties import PENALTIES
from layerjump.train.recipe import Recipe
from layerjump.train.trainer import PenaltyTrainer


def arguments(
    recipe: Recipe,
    folder: Path,
    *,
    accumulate: int = 1,
    device: str | None = None,
    keep: bool = False,
) -> TrainingArguments:
    """A recipe as the Trainer takes it. Under `torchrun` or `accelerate launch` this joins the other processes."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    _check(device, recipe.batch, accumulate, processes)
    cpu = device == "cpu" or not torch.cuda.is_available()
    made = TrainingArguments(
        output_dir=str(folder),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch // (accumulate * processes),
        gradient_accumulation_steps=accumulate,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, recipe.steps // 20),
        weight_decay=0.1,
        adam_beta2=0.95,
        bf16=recipe.bf16,
        train_sampling_strategy="sequential",  # `Rows` has shuffled them
        save_steps=recipe.every,
        save_total_limit=None if keep else 2,
        # Of equal parts, so that a run that goes on from a checkpoint logs the same means.
        logging_steps=_part_of(recipe.every),
        report_to=[],
        use_cpu=cpu,
        ddp_backend="gloo" if cpu and processes > 1 else None,
        seed=recipe.seed,
        disable_tqdm=True,  # it would print to standard output
    )
    if not cpu:
        # Several GPUs in one process would run copies of the model, whose states no hook of ours sees.
        made._n_gpu = 1
    return made


def _check(device: str | None, batch: int, accumulate: int, processes: int) -> None:
    if device not in (None, "cpu", "cuda"):
        raise BadTraining(f"the device given is {device!r}; give cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise BadTraining("there is no GPU here to train on; leave --device out, or give cpu")
    if accumulate < 1 or batch % (accumulate * processes):
        raise BadTraining(
            f"a batch of {batch} rows cannot be cut into {accumulate} parts for {processes} processes each; "
            f"give a multiple of {max(1, accumulate) * processes}"
        )


def train(
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Tensor,
    recipe: Recipe,
    settings: TrainingArguments,
    *,
    track: TrainerCallback | None = None,
    before: str | None = None,
) -> list[dict[str, Any]]:
    """Train a model in place, going on from a checkpoint if one is given; returns what was logged."""
    masked = tokenizer if family_of(hf.config).task == "masked" else None
    data = Rows(rows, recipe.steps * recipe.batch, seed=recipe.seed, tokenizer=masked)
    trainer = PenaltyTrainer(
        hf,
        settings,
        train_dataset=data,
        processing_class=tokenizer,
        penalty=PENALTIES.get(recipe.penalty),
        strength=recipe.strength,
        levels=recipe.levels,
    )
    if track is not None:
        trainer.add_callback(track)
    quieten(trainer)
    with quiet_transformers():
        trainer.train(resume_from_checkpoint=before)
    hf.eval()
    return [row for row in trainer.state.log_history if "loss" in row]


def _part_of(every: int) -> int:
    """The largest divisor that is at most a fifth."""
    return next(n for n in range(max(1, every // 5), 0, -1) if every % n == 0)
