"""Train on packed rows with a penalty on hidden states.

The states of every level of a training forward pass, with their gradients.

The Hugging Face Trainer with a penalty on the states, and an end to runs that diverge.

One training run on packed rows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainingArguments,
)
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.trainer_utils import get_last_checkpoint

from layerjump.errors import BadTraining, Diverged, argument
from layerjump.models.families import family_of
from layerjump.models.hooks import Capture
from layerjump.models.loading import quiet_transformers
from layerjump.models.structure import Site, Structure
from layerjump.training.data import IGNORE_INDEX, PackedRows
from layerjump.training.hf_trainer import ResumableTrainer, silence_trainer
from layerjump.training.model import ARCHITECTURES, Architecture, ModelShape
from layerjump.training.regularizers import PENALTIES, Penalty

NONE = "none"


@dataclass(frozen=True)
class Recipe:
    """A run's settings; the same settings and text give the same model."""

    arch: str = "llama"
    shape: ModelShape = field(default_factory=ModelShape)
    vocab_size: int = 2048
    length: int = 128
    """Tokens in a row."""
    penalty: str = NONE
    penalty_weight: float = 0.5
    levels: tuple[int, ...] | None = None
    """The levels that are penalised (None: 1 to L)."""
    steps: int = 1000
    batch_size: int = 32
    """Rows in a step, over all processes and parts."""
    learning_rate: float = 1e-3
    seed: int = 0
    eval_every: int = 100
    """Steps between measurements, and between checkpoints."""
    bf16: bool = False

    def __post_init__(self) -> None:
        if self.arch not in ARCHITECTURES:
            raise BadTraining(
                f"there is no architecture {self.arch!r} to train; give one of {', '.join(ARCHITECTURES)}"
            )
        if self.penalty not in (NONE, *PENALTIES):
            raise BadTraining(
                f"there is no penalty {self.penalty!r}; give one of {NONE}, {', '.join(PENALTIES)}"
            )
        for name in ("steps", "batch_size", "eval_every", "length"):
            if getattr(self, name) < 1:
                raise BadTraining(f"{name} given is {getattr(self, name)}; give 1 or more")
        if self.seed < 0:
            raise BadTraining(f"the seed given is {self.seed}; give 0 or more")
        if not self.learning_rate > 0 or not math.isfinite(self.learning_rate):
            raise BadTraining(f"the learning rate given is {self.learning_rate}; give one above 0")
        if not self.penalty_weight >= 0 or not math.isfinite(self.penalty_weight):
            raise BadTraining(f"the penalty weight given is {self.penalty_weight}; give 0 or more")
        if self.length > self.shape.max_positions:
            raise BadTraining(
                f"sequences of {self.length} tokens were asked for, but the model has {self.shape.max_positions} "
                f"positions; pass {argument('length', self.shape.max_positions)} or less, or "
                f"{argument('max_positions', self.length)}"
            )
        outside = [level for level in self.levels or () if not 1 <= level <= self.shape.layers]
        if outside:
            raise BadTraining(
                f"the levels to penalise are {list(self.levels or ())}; give some of 1 to {self.shape.layers}"
            )

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.arch]


class LevelStates(Capture):
    """Hooks that hold levels 0 to L of the last forward pass, whole and differentiable.

    They are a Hugging Face model's own block outputs, so level L is before the final norm; in a wrapped model
    (`DistributedDataParallel`) give the model inside.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        structure = Structure(hf)
        sites = [Site(level) for level in range(structure.n_blocks + 1)]
        super().__init__(structure, sites, entries=(hf, hf.base_model))

    @property
    def states(self) -> list[Tensor]:
        """Levels 0 to L of the last forward pass, each (batch, positions, d)."""
        if len(self._states) < len(self.sites):
            raise BadTraining(
                f"levels were asked for, but {len(self._states)} of {len(self.sites)} have been seen; run the model "
                "within `with LevelStates(model)`, and without gradient checkpointing"
            )
        return [self._states[site] for site in self.sites]

    def clear(self) -> None:
        """Let go of the states, and of the graph behind them."""
        self._states.clear()


Loss = Callable[..., Tensor]
WORSE = 2.0
"""So many times what guessing costs (ln of the vocabulary) …"""
PATIENCE = 10
"""… in so many batches in a row, and the run is given up."""


class PenaltyTrainer(ResumableTrainer):
    """Loss + strength × penalty, the same however a batch is cut into parts or dealt out to processes.

    Every row must have as many tokens as any other (text is packed), so that the penalty of a batch is the mean of its
    parts'.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        *,
        penalty: Penalty | None = None,
        strength: float = 0.0,
        levels: Sequence[int] | None = None,
        **settings: Any,
    ) -> None:
        self._loss: Loss = _loss_of(model)
        super().__init__(model, args, compute_loss_func=self._loss, **settings)
        self._penalty = penalty if strength else None
        self._strength, self._chosen = strength, levels
        self._levels = LevelStates(model) if self._penalty else None
        self._limit = WORSE * math.log(model.config.vocab_size)
        self._bad = 0
        self._last: dict[str, Any] = {}
        """What was run last."""
        self._seen = torch.zeros(3, dtype=torch.float64)
        """Sums since the last log: loss, penalty, batches."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **more: Any
    ) -> Any:
        """The loss of one part of a batch."""
        self._last, mask = dict(inputs), inputs.get("attention_mask")
        with self._levels or nullcontext():
            loss: Any = super().compute_loss(model, inputs, *args, **more)
        parts = self.current_gradient_accumulation_steps
        self._note(float(loss.detach()) * parts, 0)
        if self._penalty is None or self._levels is None:
            return loss
        # The Trainer divides the loss by all of the batch's tokens, and leaves what is added to it alone.
        extra = self._strength * self._penalty(self._levels.states, mask, self._chosen)
        self._levels.clear()
        self._note(float(extra.detach()), 1)
        return loss + extra / parts

    def _note(self, value: float, place: int) -> None:
        """Remember a loss or penalty for the log, and stop where it is beyond hope."""
        self._seen[place] += value
        if place == 0:
            self._seen[2] += 1
            self._bad = self._bad + 1 if value > self._limit else 0
        if not math.isfinite(value) or self._bad >= PATIENCE:
            self._give_up(f"the {'penalty' if place else 'loss'} is {value:.3g}")

    def _give_up(self, why: str) -> None:
        last = get_last_checkpoint(str(self.args.output_dir))
        kept = (
            f"the last good checkpoint is {Path(last)}" if last else "no checkpoint was saved yet"
        )
        raise Diverged(
            f"training diverged: {why} at step {self.state.global_step}; {kept}; pass a "
            f"{argument('learning_rate')} below {self.args.learning_rate:g}, or a smaller "
            f"{argument('penalty_weight')}, and another folder"
        )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # The losses so far are of earlier weights: those of now are tried before they are kept.
        loss = self._loss_now()
        ending = self.state.global_step >= self.state.max_steps
        if not math.isfinite(loss) or (ending and loss > self._limit):
            self._give_up(f"the loss is {loss:.3g}")
        if not self._bad and loss <= self._limit:
            super()._save_checkpoint(model, trial)

    @torch.no_grad()
    def _loss_now(self) -> float:
        """What was run last, with the weights as they are; a masked model's row may have no mask in it."""
        inputs, hf = dict(self._last), cast(nn.Module, self.model)
        labels = inputs.pop("labels")
        count = labels.ne(IGNORE_INDEX).sum().clamp(min=1)
        return float(self._loss(hf(**inputs), labels, num_items_in_batch=count))

    def log(self, logs: dict[str, float], *args: Any, **more: Any) -> None:
        """The Trainer's records, with the loss and the penalty apart."""
        if "loss" in logs and self._seen[2]:
            loss, penalty, batches = self._seen.tolist()
            logs = logs | {"lm_loss": loss / batches, "penalty": penalty / batches}
            self._seen.zero_()
        super().log(logs, *args, **more)


def _loss_of(model: PreTrainedModel) -> Loss:
    """The model's own loss over all of a batch's tokens: BERT's forward pass leaves the division to nobody."""
    masked = family_of(model.config).task == "masked"
    find, vocabulary = ForMaskedLMLoss if masked else ForCausalLMLoss, model.config.vocab_size

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return find(outputs["logits"], labels, vocabulary, num_items_in_batch=num_items_in_batch)

    return loss


def training_arguments(
    recipe: Recipe,
    folder: Path,
    *,
    accumulate: int = 1,
    device: str | None = None,
    keep_checkpoints: bool = False,
) -> TrainingArguments:
    """A recipe as the Trainer takes it. Under `torchrun` or `accelerate launch` this joins the other processes."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    _check(device, recipe.batch_size, accumulate, processes)
    cpu = device == "cpu" or not torch.cuda.is_available()
    made = TrainingArguments(
        output_dir=str(folder),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch_size // (accumulate * processes),
        gradient_accumulation_steps=accumulate,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, recipe.steps // 20),
        weight_decay=0.1,
        adam_beta2=0.95,
        bf16=recipe.bf16,
        train_sampling_strategy="sequential",  # `Rows` has shuffled them
        save_steps=recipe.eval_every,
        save_total_limit=None if keep_checkpoints else 2,
        # Of equal parts, so that a run that goes on from a checkpoint logs the same means.
        logging_steps=_part_of(recipe.eval_every),
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
        raise BadTraining(
            f"there is no GPU here to train on; leave {argument('device')} out, or pass cpu"
        )
    if accumulate < 1 or batch % (accumulate * processes):
        raise BadTraining(
            f"a batch of {batch} rows cannot be cut into {accumulate} parts for {processes} processes each; "
            f"give a multiple of {max(1, accumulate) * processes}"
        )


def train_model(
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
    data = PackedRows(rows, recipe.steps * recipe.batch_size, seed=recipe.seed, tokenizer=masked)
    trainer = PenaltyTrainer(
        hf,
        settings,
        train_dataset=data,
        processing_class=tokenizer,
        penalty=PENALTIES.get(recipe.penalty),
        strength=recipe.penalty_weight,
        levels=recipe.levels,
    )
    if track is not None:
        trainer.add_callback(track)
    silence_trainer(trainer)
    with quiet_transformers():
        trainer.train(resume_from_checkpoint=before)
    hf.eval()
    return [row for row in trainer.state.log_history if "loss" in row]


def _part_of(every: int) -> int:
    """The largest divisor that is at most a fifth."""
    return next(n for n in range(max(1, every // 5), 0, -1) if every % n == 0)
