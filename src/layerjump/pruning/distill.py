"""Distil the original model into a pruned one: train its replacements, or all weights, to match hidden states.

The loss is the squared error of the pruned model's states at every level after the first dropped span, relative to the
squared norm of the original model's states, averaged over positions and levels ("Your Transformer is Secretly Linear"
trains its replacements with this layer-wise error). `kl_weight` adds the KL divergence from the original model's
predictions to the pruned model's.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax
from torch.utils.data import Dataset
from transformers import TrainingArguments

from layerjump.data.batches import Batch
from layerjump.errors import BadPruning
from layerjump.models.hooks import Capture
from layerjump.models.model import Model
from layerjump.models.sites import Site
from layerjump.models.weight_forms import quantized_weights, require_gradients
from layerjump.pruning.fit_replacements import FOLDING_METHODS, level_after_pruning, starting_method
from layerjump.pruning.output_weights import folded_output
from layerjump.pruning.prune import CalibrationData, Distillation, Pruned, with_test_loss
from layerjump.pruning.refit_projections import find_projections
from layerjump.training.trainer import ResumableTrainer, find_checkpoint, silence_trainer


def distill(
    pruned: Pruned,
    calibration: CalibrationData,
    training_folder: str | Path,
    *,
    steps: int = 200,
    learning_rate: float = 1e-4,
    kl_weight: float = 0.0,
    train_all_weights: bool = False,
    seed: int = 0,
) -> Pruned:
    """Train a pruned model in place, and measure its test loss again.

    Args:
        pruned: The pruned model; the weights of `pruned.model` change.
        calibration: Text of the pruning; training uses its fit documents.
        training_folder: Folder of the Trainer's checkpoints; an interrupted run resumes from the last one.
        steps: Number of batches.
        learning_rate: Peak learning rate of a linear schedule.
        kl_weight: Weight of the KL divergence in the loss.
        train_all_weights: Whether to train all weights instead of the replacements alone.
        seed: Seed of the order of batches.
    """
    if steps < 1:
        raise BadPruning(f"expected 1 or more distillation steps, got {steps}")
    require_gradients(pruned.model.hf)
    if train_all_weights and (codes := quantized_weights(pruned.model.hf)):
        raise BadPruning(f"the weight {codes[0]} is quantised and cannot be trained; train the replacements alone")
    module = DistillationModule(pruned, kl_weight=kl_weight, train_all_weights=train_all_weights)
    run = {  # everything that the result depends on
        **{name: getattr(pruned.info, name) for name in ("fingerprint", "text_sha256", "tokens", "split")},
        "steps": steps,
        "learning_rate": learning_rate,
        "kl": kl_weight,
        "whole": train_all_weights,
        "seed": seed,
        "method": pruned.method,
        "dropped": list(pruned.dropped),
    }
    checkpoint = find_checkpoint(Path(training_folder), run)
    batches = [{"batch": batch} for batch in calibration.fit]
    trainer = ResumableTrainer(
        model=module,
        args=TrainingArguments(
            output_dir=str(training_folder),
            max_steps=steps,
            per_device_train_batch_size=1,  # one `Batch`, which has many rows
            learning_rate=learning_rate,
            lr_scheduler_type="linear",
            save_steps=max(1, min(50, steps // 4)),
            save_total_limit=2,
            logging_steps=max(1, steps // 20),
            report_to=[],
            remove_unused_columns=False,
            use_cpu=pruned.model.device.type == "cpu",
            seed=seed,
            disable_tqdm=True,  # it prints to standard output
        ),
        train_dataset=cast(Dataset[dict[str, Batch]], batches),  # a list has all that a Dataset needs
        data_collator=lambda examples: examples[0],
    )
    start = time.perf_counter()
    silence_trainer(trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    module.finish()
    distillation = Distillation(
        steps=steps,
        trained="every weight" if train_all_weights else "the replacements",
        kl_weight=kl_weight,
        minutes=round((time.perf_counter() - start) / 60, 1),
    )
    return with_test_loss(replace(pruned, distillation=distillation), calibration)


class DistillationModule(nn.Module):
    """The trained parameters and the distillation loss of a batch, in the form that the Trainer takes.

    The two models are held in a list, hidden from the Trainer, which would save, move and train all their weights.
    """

    def __init__(self, pruned: Pruned, *, kl_weight: float, train_all_weights: bool) -> None:
        super().__init__()
        self._models = [pruned.model, pruned.original]
        self._kl_weight = kl_weight
        self._transforms = pruned.transforms
        # Levels of the pruned model after its first span, each with the original model's level that it approximates.
        first_source, first_target = pruned.spans[0]
        remaining = [block for block in range(1, pruned.original.n_blocks + 1) if block not in pruned.dropped]
        pairs = [(new, dict(pruned.spans).get(old, old)) for new, old in enumerate(remaining, start=1)]
        self._level_pairs = [(0, first_target)] if first_source == 0 else []
        self._level_pairs += [pair for pair in pairs if pair[1] >= first_target]

        trained = list(pruned.model.hf.parameters()) if train_all_weights else []
        if pruned.jumps is not None:
            trained += pruned.jumps.parameters()
        elif starting_method(pruned.original, pruned.method, pruned.spans) in FOLDING_METHODS:
            for source, _ in pruned.spans:
                _, weights, _ = folded_output(pruned.model, level_after_pruning(source, pruned.spans))
                trained += weights.parameters()
        for step in pruned.refitted:
            if step.strength is not None:
                for projection in find_projections(pruned.model, step.block):
                    if projection.write.name == step.part:
                        trained += projection.layer.parameters()
        if not trained:
            raise BadPruning(
                f"{pruned.method} has no replacement to train; train all weights, or prune with another method"
            )
        for parameter in pruned.model.hf.parameters():
            parameter.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)
        self.trained = nn.ParameterList({id(p): p for p in trained}.values())

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss of one batch."""
        student, teacher = self._models
        with torch.no_grad():
            targets = _capture_levels(teacher, batch, [level for _, level in self._level_pairs])
        states = _capture_levels(student, batch, [level for level, _ in self._level_pairs])
        errors = []
        for level, original_level in self._level_pairs:
            target = targets[Site(original_level)]
            for transform in [t for t in self._transforms if t.level <= level][-1:]:
                target = transform(target)  # in the coordinates of the pruned model's stream
            error = (states[Site(level)] - target).square().sum(-1)
            errors.append((error / target.square().sum(-1).clamp_min(1e-12)).mean())
        loss = torch.stack(errors).mean()
        if self._kl_weight:
            with torch.no_grad():
                target_logits = teacher.logits(targets[Site(teacher.n_blocks)])
                target_log_probs = log_softmax(target_logits.float(), -1)
            log_probs = log_softmax(student.logits(states[Site(student.n_blocks)]).float(), -1)
            divergence = kl_div(log_probs, target_log_probs, reduction="batchmean", log_target=True)
            loss = loss + self._kl_weight * divergence
        return {"loss": loss}

    def finish(self) -> None:
        """Restore which parameters require gradients."""
        for parameter in self.trained:
            parameter.requires_grad_(False)
            parameter.grad = None
        for parameter in self._models[0].hf.parameters():
            parameter.requires_grad_(True)


def _capture_levels(model: Model, batch: Batch, levels: list[int]) -> dict[Site, Tensor]:
    with Capture(model.structure, [Site(level) for level in levels]) as capture:
        capture.start(batch.row * batch.input_ids.shape[1] + batch.position)
        model.run_body(batch.input_ids, batch.attention_mask)
        return capture.take()
