"""The Hugging Face Trainer with a penalty on the states, and an end to runs that diverge."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.trainer_utils import get_last_checkpoint

from layerjump.compress.training import Resumable
from layerjump.errors import Diverged
from layerjump.inputs.families import family_of
from layerjump.train.levels import Levels
from layerjump.train.packing import IGNORED
from layerjump.train.penalties import Penalty

Loss = Callable[..., Tensor]
WORSE = 2.0
"""So many times what guessing costs (ln of the vocabulary) …"""
PATIENCE = 10
"""… in so many batches in a row, and the run is given up."""


class PenaltyTrainer(Resumable):
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
        self._levels = Levels(model) if self._penalty else None
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
            f"training diverged: {why} at step {self.state.global_step}; {kept}; give a --learning-rate below "
            f"{self.args.learning_rate:g}, or a smaller --strength, and another folder"
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
        count = labels.ne(IGNORED).sum().clamp(min=1)
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
